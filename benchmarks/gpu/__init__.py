"""What one GPU shows of the predictions: `python -m benchmarks.gpu`. See __main__.py."""
