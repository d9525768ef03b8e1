"""The tree checks itself."""
