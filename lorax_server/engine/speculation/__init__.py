"""Draft tokens for speculative decoding, without a draft model."""
