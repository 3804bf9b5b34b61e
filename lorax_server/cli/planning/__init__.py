"""`lorax plan`: estimates memory use, latency and the number of GPUs for some traffic, without running a model."""
