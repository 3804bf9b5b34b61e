"""Text to tokens and back: tokenizers, detokenizers, chat templates."""
