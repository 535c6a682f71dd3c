"""Benchmarks: each file asks one question, prints a table and writes its figures to results/.

`python -m benchmarks.NAME --help` says what a benchmark asks, prints and writes.
"""
