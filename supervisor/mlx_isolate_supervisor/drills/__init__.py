"""Drills: faults made on purpose in a daemon, each held against what is promised of it."""
