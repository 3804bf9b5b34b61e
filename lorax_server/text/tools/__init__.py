"""Tool calls: streaming parsers and grammars for each model family's format."""
