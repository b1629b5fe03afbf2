"""The packages, which pyproject.toml cannot say: every folder of bapo_jax, and configs/ as bapo_jax.configs."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=['bapo_jax', 'bapo_jax.*'], exclude=['*.__pycache__']), 'bapo_jax.configs'],
    package_dir={'bapo_jax.configs': 'configs'},
)
