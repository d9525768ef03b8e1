"""The relay: carries one request to one engine and its answer back, byte for byte."""
