"""A run directory: what is written there, and its readers."""
