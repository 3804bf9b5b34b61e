"""Messages generated from `proto/` by `make proto`; never edited by hand."""
