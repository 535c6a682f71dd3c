"""Cost graph and stages in, recompute regions out: what is computed twice to hold less."""
