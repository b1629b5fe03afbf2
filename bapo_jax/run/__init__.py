"""A run directory: what is written there, and what reads it."""
