"""The engine: decides which sequences each step computes, and which adapters are on the device. No torch."""
