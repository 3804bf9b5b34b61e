"""Reads GGUF files, which contain models and adapters in llama.cpp's format."""
