"""Model and sample input in, a proven graph out: the capture."""
