"""The generation thread: the only place where a model's forward pass runs."""
