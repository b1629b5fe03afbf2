"""Countdown: write an expression that reaches a target with given numbers."""
