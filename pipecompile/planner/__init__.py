"""It composes cut, recompute, schedule and memory into plans, without PyTorch and without a model.

    draft               options and costs become a plan: the best of its placements
    placement_draft     one placement: its cut, its stages, its order, its prediction
    open_choices        the schedules and policies that are tried where the user left them open
    joint_search        ranks, replicas, stages, microbatches and the rest, chosen for devices

The phases know nothing of one another; what prices a stage for the partitioner is passed in here.
`api` calls this room with the costs of a model or of a file.
"""
