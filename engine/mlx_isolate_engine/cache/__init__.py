"""The prompt cache: a RAM tier and an SSD tier behind `take` and `put`."""
