"""Child processes for untrusted work, such as chat templates, tokenizer files and grammars."""
