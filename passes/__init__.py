"""Rewrites of a graph, one a file, each stating what it requires and ensures."""
