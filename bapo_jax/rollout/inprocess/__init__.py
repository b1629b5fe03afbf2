"""The engine that samples in the trainer's own process, with the trained decoder."""
