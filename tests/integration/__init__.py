"""Tests with real child processes and sockets."""
