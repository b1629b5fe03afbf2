"""Diagrams: read a number off a figure that is drawn for the question."""
