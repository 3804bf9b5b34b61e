"""Files of models and adapters: their names, their limits, and safe ways to read them."""
