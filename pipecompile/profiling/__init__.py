"""Graph and cost model in, cost graph out: what every node takes and holds."""
