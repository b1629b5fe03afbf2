"""Starts, guards, queries and polls vLLM servers. Imports nothing: the worker loads from here without JAX."""
