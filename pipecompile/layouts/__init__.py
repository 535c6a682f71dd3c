"""Layouts: cuts in the words of other frameworks. They are read, found in a model, and exported."""
