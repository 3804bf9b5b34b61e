"""Relatives of Llama: each overrides what differs."""
