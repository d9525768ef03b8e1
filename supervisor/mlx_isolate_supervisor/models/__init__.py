"""All models together: which are loaded, which must leave, and what they may take."""
