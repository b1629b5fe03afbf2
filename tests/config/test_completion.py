"""The completion script in a real bash, and in zsh where there is one; its flags are those that --help lists."""

import re
import shutil
import subprocess
import sys

import pytest

from bapo_jax.config.completion import SHELLS, script
from bapo_jax.methods import METHODS

BASH = """
source "$1"
complete_line() {
    COMPREPLY=() COMP_LINE="$*" COMP_POINT="${#COMP_LINE}"
    [ "$(complete -p "$1")" = "complete -o bashdefault -o default -F _bapo_complete $1" ] || exit 9
    _bapo_complete "$1"
    echo "${COMPREPLY[@]}"
}
shift
for line in "$@"; do PATH= complete_line $line; done
"""
# Line -> what bash puts after the last = or : of the word.
COMPLETED = {
    'bapo-train --work': '--workdir=',
    'bapo-train --am': '--amend',
    'bapo-evaluate --top': '--top_p=',
    'bapo-train --conf': '--config= --config.',
    'bapo-train --config=quick': 'quickstart',
    'bapo-train --config=quickstart:bapo_g': 'bapo_guarded',
    'bapo-train --config=quickstart --config.learner.clip_l': '--config.learner.clip_low=',
    'bapo-train --config=quickstart --config.learner.adam.b': '--config.learner.adam.b1= --config.learner.adam.b2=',
    'bapo-train --help lea': 'learner',
    'bapo-train --workdir=ru': '',  # the shell's own completion of files
    'bapo-compare quickstart:gspo quick': 'quickstart',
    'bapo-compare quickstart:gs': 'gspo',
    'bapo-compare quickstart --set=rollout.temp': 'rollout.temperature=',
}


def test_a_real_bash_completes_flags_configs_methods_and_fields_without_starting_a_process(tmp_path):
    (tmp_path / 'completion').write_text(script('bash'))
    command = ['bash', '--norc', '-c', BASH, 'bash', str(tmp_path / 'completion'), *COMPLETED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, '')
    assert dict(zip(COMPLETED, done.stdout.splitlines(), strict=True)) == COMPLETED


@pytest.mark.skipif(not shutil.which('zsh'), reason='there is no zsh')
def test_zsh_takes_the_script_and_completes_whole_words(tmp_path):
    """bashcompinit gives the function bash's variables, except COMP_WORDBREAKS; zsh itself keeps the words that match."""
    (tmp_path / 'completion').write_text(script('zsh'))
    said = 'COMP_LINE="bapo-train --config=quick"; COMP_POINT=${#COMP_LINE}; _bapo_complete bapo-train; echo $COMPREPLY'
    command = ['zsh', '-f', '-c', f'source {tmp_path / "completion"}; {said}; echo $_comps[bapo-train]']
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env={'HOME': str(tmp_path), 'PATH': '/bin:/usr/bin'})
    completed, installed = done.stdout.splitlines()
    assert '--config=quickstart' in completed.split() and installed == '_bash_complete -o bashdefault -o default -F _bapo_complete'


@pytest.mark.parametrize('shell', SHELLS)
def test_a_script_names_every_method(shell):
    assert all(re.search(rf'\b{name}\b', script(shell)) for name in METHODS)


def test_no_jax_is_needed_to_write_the_script():
    code = 'import sys; from bapo_jax.config.completion import script; script("bash"); sys.exit("jax" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], timeout=60).returncode == 0
