"""Who answers. Imports nothing: the vLLM worker loads from this package where JAX may be absent."""
