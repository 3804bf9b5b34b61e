"""Decoders whose queries, keys and values come of one matrix, in groups of heads; several know positions by ALiBi."""
