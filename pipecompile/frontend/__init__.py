"""The frontend captures a model: from the model and a sample input to a graph that is checked."""
