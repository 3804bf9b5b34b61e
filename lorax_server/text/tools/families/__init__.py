"""The forms in which families of models write calls: how each is read, and the grammar by which it can be asked for."""
