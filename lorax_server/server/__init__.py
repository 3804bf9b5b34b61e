"""The HTTP process: takes requests, asks the engine, writes answers. No torch."""
