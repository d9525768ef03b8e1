"""Contracts between supervisor and engine; standard library and msgspec only."""
