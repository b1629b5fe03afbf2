"""Rollout engines. Imports nothing: the vLLM worker loads from this package, and JAX may be absent there."""
