"""The packages, which pyproject.toml cannot say: every folder of bapo_jax, and configs/ and locks/ as folders of it."""

from setuptools import find_namespace_packages, setup

BESIDE = {'bapo_jax.configs': 'configs', 'bapo_jax.locks': 'locks'}

setup(
    packages=[*find_namespace_packages(include=['bapo_jax', 'bapo_jax.*'], exclude=['*.__pycache__']), *BESIDE],
    package_dir=BESIDE,
)
