"""A start of a run that succeeds, as far as its directory is concerned."""

from bapo_jax.run import directory


def claim(workdir, *settings, **options):
    """Claims the directory and records the settings. Returns the fields that changed."""
    claimed = directory.claim(workdir, *settings, **options)
    directory.record(workdir, claimed.settings)
    return claimed.changed
