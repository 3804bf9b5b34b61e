"""Read GGUF files: models and adapters in the format of llama.cpp."""
