"""Executes the engine's step plans on one rank. Contains the model runners, the KV cache, adapter memory and step
inputs.
"""
