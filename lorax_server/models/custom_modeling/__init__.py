"""Model architectures, one file each. Most are subclasses of Llama with a different `Architecture` description."""
