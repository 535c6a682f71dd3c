"""The values that flow between phases: frozen, self-verifying, free of PyTorch."""
