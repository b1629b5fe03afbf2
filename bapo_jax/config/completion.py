"""The shell completion of the console commands: their flags, the configs, the methods and the fields.

    bapo-train --completion bash > ~/.bapo_completion    # then, in ~/.bashrc: source ~/.bapo_completion
    bapo-train --completion zsh > ~/.bapo_completion     # then, in ~/.zshrc: source ~/.bapo_completion

The script has all the words, so completing a word starts no process. Write it again after an update.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import bapo_jax
from bapo_jax.config import rows
from bapo_jax.config.table import SECTIONS
from bapo_jax.machine.cli import config_names
from bapo_jax.methods import METHODS

SHELLS = ('bash', 'zsh')
_FLAGS_OF = {'bapo_jax.train': 'bapo_jax.command'}  # where a command's flags are, if elsewhere
# The flags in a command's source, by absl or argparse. Importing every command would take seconds.
_DEFINED = re.compile(r"(?i:(define_\w+))\(\s*'(\w+)'|add_argument\(\s*'--(\w+)'")

_START = {
    'bash': '',
    'zsh': 'autoload -Uz compinit bashcompinit && compinit && bashcompinit\n',
}
_SCRIPT = r"""
# Completion of the commands of bapo_jax {version}. `bapo-train --completion {kind}` wrote it.
_bapo_flags() {{
    case "$1" in
{flags}
    esac
}}

_bapo_complete() {{
    local typed="${{COMP_LINE:0:$COMP_POINT}}" word choices start breaks
    word="${{typed##*[[:space:]]}}"
    case "$word" in
        --config=*:*) choices="{methods}" start="${{word%%:*}}:" ;;
        --config=*) choices="{configs}" start="--config=" ;;
        --config.*=* | --set=*=*) return ;;
        --config.*) choices="{fields}" start="--config." ;;
        --set=*) choices="{fields}" start="--set=" ;;
        --*=*) return ;;
        -*) choices="$(_bapo_flags "$1")" ;;
        *:*) choices="{methods}" start="${{word%%:*}}:" ;;
        *)
            case "$typed" in
                *bapo-compare\ *) choices="{configs}" ;;
                *\ --help\ "$word") choices="{sections}" ;;
            esac ;;
    esac
    COMPREPLY=($(compgen -P "$start" -W "$choices" -- "${{word#"$start"}}"))
    # Where a shell breaks words at = or :, it wants only what follows the last of them.
    case "$COMP_WORDBREAKS" in *=*) breaks="=" ;; esac
    case "$COMP_WORDBREAKS" in *:*) breaks="$breaks:" ;; esac
    [ -n "$breaks" ] && start="${{word%"${{word##*[$breaks]}}"}}" && COMPREPLY=("${{COMPREPLY[@]#"$start"}}")
    case "${{COMPREPLY[0]}}" in *=) compopt -o nospace 2>/dev/null ;; esac
}}

complete -o bashdefault -o default -F _bapo_complete {commands}
"""


def script(shell: str) -> str:
    """The completion script for bash or zsh. Raises ValueError if the commands are not installed."""
    flags = {name: flags_in(_source(module)) for name, module in commands().items()}
    if not flags:
        raise ValueError('there is no console command to complete; install the package: pip install -e .')
    return _START[shell] + _SCRIPT.format(
        version=bapo_jax.__version__,
        kind=shell,
        flags='\n'.join(f'        *{name}) echo "{" ".join(words)}" ;;' for name, words in flags.items()),
        methods=' '.join(METHODS),
        sections=' '.join(SECTIONS),
        configs=' '.join(config_names()),
        fields=' '.join(f'{name}=' for name, _ in rows()),
        commands=' '.join(flags),
    ).lstrip('\n')


def commands() -> dict[str, str]:
    """The installed console commands and the modules that define their flags."""
    scripts = metadata.entry_points(group='console_scripts')
    modules = {s.name: s.module for s in scripts if s.module.startswith('bapo_jax.')}
    return {name: _FLAGS_OF.get(module, module) for name, module in sorted(modules.items())}


def flags_in(source: str) -> list[str]:
    """The flags that a source defines: with = if they take a value; '--config.' stands for the fields."""
    words = ['--help', '--version']
    for kind, of_absl, of_argparse in _DEFINED.findall(source):
        words.append(f'--{of_absl or of_argparse}{"" if kind.lower() == "define_bool" else "="}')
    return words + (['--config=', '--config.'] if 'define_config(' in source else [])


def _source(module: str) -> str:
    path = Path(bapo_jax.__file__).parent.joinpath(*module.split('.')[1:])
    return path.with_suffix('.py').read_text('utf-8')
