"""Serve thousands of fine-tuned language models from one base model."""

__version__ = "0.1.0"
