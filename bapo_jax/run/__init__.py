"""A run's directory: what is written there, and its readers."""
