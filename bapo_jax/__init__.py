"""BAPO (arXiv 2602.20722) in JAX. Imports nothing: the rollout worker loads it where JAX may be absent."""

__version__ = '0.1.0'  # the one place; pyproject.toml reads it
