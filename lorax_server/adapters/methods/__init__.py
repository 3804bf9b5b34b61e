"""PEFT's methods besides plain LoRA: the fields of their configs, and their tensors as fields of a module."""
