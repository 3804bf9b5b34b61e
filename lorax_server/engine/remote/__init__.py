"""The engine in a separate process: messages, channel and client."""
