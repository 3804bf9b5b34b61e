"""Streaming parsers and grammars for the tool call formats of all model families."""
