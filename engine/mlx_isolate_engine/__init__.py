"""The engine: one child process that owns one model, its cache and its generation thread."""
