"""Turn the tokens of one completion into text and apply stop rules."""
