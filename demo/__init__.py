"""The making of the model that ships in the package, and its scores. `README.md` says how to do it again."""
