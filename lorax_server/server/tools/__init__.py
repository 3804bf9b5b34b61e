"""Functions that a request lets the model call: from the request's fields to a grammar, and from text to calls."""
