"""What stages recompute, and which saved tensors they encode, so that less is held."""
