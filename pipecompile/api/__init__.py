"""It composes the phases, one file for each thing that a user asks for.

`compile.py` reads from top to bottom as the pipeline itself, and calls, in this order:

    choices, options       what is asked of a plan, checked without and with the model
    target, factory        the model, its minibatch and its loss
    capture                the model as a graph
    costs                  what the nodes of the graph take
    links                  what transfers between ranks take
    plan                   graph, costs and options become a plan; stages are timed by `stage_timer`
    draft, partition       the same without PyTorch: cut, stages, schedule, prediction
    soundness, staleness   whether a plan contradicts itself, or its model has changed
    pipeline               the step: `batch_reader` reads the batch, `program` cuts the graph, and
                           `runner` runs the stages

The other files each stand behind one command.
"""
