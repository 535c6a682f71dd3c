"""One question a file. Each prints a table and writes its figures to benchmarks/results/."""
