"""`make bench` runs every benchmark."""

from benchmarks import partition, step_time

step_time.main()
partition.main([])
