"""Queries on fx graphs, and the functions that passes and code generation let a graph call."""
