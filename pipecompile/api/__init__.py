"""It composes the phases, one file for each thing that a user asks for.

`compilation.py` reads from top to bottom as the pipeline itself, and calls, in this order:

    choices, options       what is asked of a plan, checked without and with the model
    costs                  what the nodes of the graph take
    links                  what transfers between ranks take
    plan                   graph, costs and options become a plan, in `planner/`, without PyTorch
    soundness, staleness   whether a plan contradicts itself, or its model has changed

The model is read and captured in `frontend/`, and the pipeline that comes out is `training/`. The
other files each stand behind one command.
"""
