"""`lorax plan`: how much a GPU holds, how fast it answers, and how many of them some traffic needs. Nothing is run."""
