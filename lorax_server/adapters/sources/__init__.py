"""Adapter sources (local folders, Hugging Face hub, S3) and the disk cache for remote sources."""
