"""`make bench` runs every benchmark."""

from benchmarks import step_time

step_time.main()
