"""The runtime: from stage modules and a schedule to a training step."""
