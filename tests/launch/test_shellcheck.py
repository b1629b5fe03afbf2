"""shellcheck has nothing to say of the shell scripts."""

import subprocess
import sys
from pathlib import Path

import pytest
from launched import ROOT


@pytest.mark.slow
def test_shellcheck_finds_nothing():
    scripts = [*sorted((ROOT / 'launch').glob('*.sh')), ROOT / '.ci' / 'run']
    assert len(scripts) > 6
    found = subprocess.run([Path(sys.executable).with_name('shellcheck'), *scripts], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
