"""Model architectures. Each file implements one architecture.

Most architectures are subclasses of Llama with a different `Architecture` description.
"""
