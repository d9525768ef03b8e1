"""Tests of mlx-isolate."""
