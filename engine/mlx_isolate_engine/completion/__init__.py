"""The execution seam: from a typed request to events and exactly one summary."""
