"""Structured output: completions that match a JSON schema, regex, choice list or grammar."""
