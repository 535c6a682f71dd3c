"""Stage modules and schedule in, a training step out: in one process or under torchrun."""
