"""Rewrites of a graph, one a file; each states what it requires and what it ensures."""
