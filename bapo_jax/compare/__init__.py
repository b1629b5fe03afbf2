"""Compares methods or settings: trains what is missing, then writes one table and one page."""
