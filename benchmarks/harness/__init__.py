"""Code that the benchmarks share: models and adapters, load generation, GPU timing and reports."""
