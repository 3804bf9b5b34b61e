"""An engine in a process of its own: messages, the channel, and a client."""
