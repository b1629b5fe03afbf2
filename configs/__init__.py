"""The configs by task, installed as bapo_jax.configs. `--config=NAME` finds them; each is a file to copy and
change.
"""
