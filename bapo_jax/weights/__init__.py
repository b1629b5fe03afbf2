"""Policy transfer: the trainer publishes policies, servers check and read them.

Imports nothing, since servers import it without JAX.
"""
