"""File names, size limits and safe readers for model and adapter files."""
