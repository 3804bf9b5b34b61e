"""Runs the engine in a separate process. Contains the messages, the channel and the client."""
