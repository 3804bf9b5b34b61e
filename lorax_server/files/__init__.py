"""Files of models and adapters: their names, their limits, and how they are read safely."""
