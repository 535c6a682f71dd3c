"""Code generation: from a captured graph and a plan to stage modules under the original names."""
