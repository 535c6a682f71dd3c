"""Cost graph in, stages out: which stage runs what."""
