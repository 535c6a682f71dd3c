"""What a node costs: the CostModel protocol and its implementations, one a file."""
