"""Benchmarks: each answers one question, as a ratio within one run."""
