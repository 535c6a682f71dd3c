"""`make bench` runs every benchmark."""

from benchmarks import gpipe_models, partition, schedules, time_prediction

time_prediction.main()
partition.main([])
schedules.main([])
gpipe_models.main()
