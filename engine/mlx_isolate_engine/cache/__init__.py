"""The prompt cache: a RAM tier and a cold tier behind take and put."""
