"""Model architectures, one file each.

Most architectures are subclasses of Llama with a different `Architecture` description.
"""
