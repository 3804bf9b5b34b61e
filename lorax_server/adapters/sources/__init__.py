"""The sources of adapters, a file for each, and the disk cache of those on the network."""
