"""Cost models: what a node takes. The `CostModel` protocol and its implementations, one a file."""
