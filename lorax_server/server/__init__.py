"""The HTTP process: receives requests, forwards them to the engine, and writes responses. It does not import torch."""
