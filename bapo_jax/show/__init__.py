"""Tells the story of a run directory on one screen."""
