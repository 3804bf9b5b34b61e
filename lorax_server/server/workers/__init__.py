"""Several API processes in front of one engine: a parent, its workers, and the state that is one for all."""
