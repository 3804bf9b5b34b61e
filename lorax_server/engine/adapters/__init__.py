"""Tracks the engine's adapters and moves them between disk, host memory and the device."""
