"""Geometry problems with figures."""
