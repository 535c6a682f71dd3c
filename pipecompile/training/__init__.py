"""A plan that runs: the pipeline and its step, and what a training run needs beside.

    pipeline          what a user holds
    batch_reader      reads the batch of a step
    program           the graph cut into stages
    programs          one for each set of modes, shape and size of microbatches
    runner            runs a program on this process
    begun_training    a run of many minibatches, by steps or without emptying the pipeline
    continuous_training, saved_versions    the latter, and its weight versions in checkpoints
    materialisation   gives values to a model on the meta device
    checkpoint, held_model, safetensors_file    state that is saved and loaded
    run_recorder      a recorded run
    stage_timer       times whole stages for a plan

The room lies above the phases: it puts `frontend`, `codegen` and `runtime` together.
"""
