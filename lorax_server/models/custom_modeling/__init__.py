"""One file per dataflow; architectures that differ from another in an ingredient are subclasses of it."""
