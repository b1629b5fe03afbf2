"""BAPO (arXiv 2602.20722) in JAX. Imports nothing: the rollout worker loads it where JAX may be absent."""
