"""`make bench` runs every benchmark."""

from benchmarks import partition, schedules, step_time

step_time.main()
partition.main([])
schedules.main([])
