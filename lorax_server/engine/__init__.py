"""The engine schedules sequences and decides which adapters are on the device. It does not import torch."""
