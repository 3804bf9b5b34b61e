"""The API process receives HTTP requests, forwards them to the engine, and writes responses. It does not
import torch.
"""
