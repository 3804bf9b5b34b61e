"""`lorax plan`: estimates memory use, latency and the number of GPUs for expected traffic, without running a model."""
