"""How the model that ships in the package was made, and how good it is. `README.md` says how to do it again."""
