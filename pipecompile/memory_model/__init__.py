"""The one memory model: storages, an order of actions and recompute in, bytes of every rank out."""
