"""Converts a completion's tokens to text and applies stop rules."""
