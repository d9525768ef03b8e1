"""Tests without I/O."""
