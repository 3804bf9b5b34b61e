"""The places adapters come from, a file for each."""
