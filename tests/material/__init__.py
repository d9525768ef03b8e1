"""Models and tokenizers made on the spot."""
