"""Tool calling: request tools to a grammar, and model output to tool calls."""
