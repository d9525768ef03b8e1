"""Official client libraries and a real browser."""
