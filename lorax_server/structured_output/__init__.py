"""Structured output, which makes completions match a JSON schema, a regex, a list of choices or a grammar."""
