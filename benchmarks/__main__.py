"""`make bench` runs every benchmark."""

from benchmarks import gpipe_models, partition, schedules, step_time

step_time.main()
partition.main([])
schedules.main([])
gpipe_models.main()
