"""Child processes for untrusted work: chat templates, tokenizer files, grammars."""
