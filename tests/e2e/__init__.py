"""The whole thing: real processes, real files."""
