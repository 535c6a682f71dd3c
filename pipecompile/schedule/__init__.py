"""Stages in, schedule out: which rank does what, when; simulated and proven free of deadlocks.

To read the room, begin with `named_orders` and what it lists (`flush`, `zero_bubble`,
`v_shaped_orders`, `asynchronous_versions`), then `simulator`, `transfers` and `check`. `search`
looks for better orders, and `lower_bound` says how much better any can be. `selection` is what
plans call, `request` the scheduler alone.
"""
