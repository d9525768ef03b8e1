"""Finding a model's files and loading them."""
