"""Tool calling: converts the tools in a request to a grammar, and model output to tool calls."""
