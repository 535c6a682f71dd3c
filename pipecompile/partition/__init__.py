"""The partition phase: a cost graph in, the stage of each node out. `solver.solve` is its entry."""
