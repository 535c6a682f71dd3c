"""Profiling: from a graph and a cost model to the cost graph, with the time and bytes of nodes."""
