"""Graph and plan in, stage modules out, under the original parameter names."""
