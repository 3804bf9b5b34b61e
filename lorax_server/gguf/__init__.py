"""Read GGUF files: models and adapters in llama.cpp's format."""
