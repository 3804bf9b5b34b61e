"""Tool calling: converts a request's tools to a grammar, and model output to tool calls."""
