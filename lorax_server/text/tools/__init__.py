"""Calls of functions in the text of an answer: the forms that model families write them in, read as the text grows."""
