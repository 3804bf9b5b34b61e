"""Converts the tokens of a completion to text and applies stop rules."""
