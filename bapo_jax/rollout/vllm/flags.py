"""vLLM's own flags, as a user gives them to a server. Those that this package reads get one spelling here."""

from __future__ import annotations

from collections.abc import Sequence

TENSOR, PIPELINE, PREFILL, DATA = (
    f'--{kind}-parallel-size' for kind in ('tensor', 'pipeline', 'prefill-context', 'data')
)
OVERRIDES = '--hf-overrides'
_SHORT = {'-tp': TENSOR, '-pp': PIPELINE, '-pcp': PREFILL, '-dp': DATA}
_FILE = '--config'
# What sets each flag. Of two equal flags vLLM takes the last, which would override the checked value.
_MEMORY = 'rollout.server.memory, or --memory of serve'
_SET_BY = {
    '--model': 'model.path, or --model of serve',
    '--host': '--host of serve',
    '--port': '--port of serve',
    '--dtype': 'rollout.dtype, or --dtype of serve',
    '--max-model-len': 'the token limits of rollout and evaluate, or --max_tokens of serve',
    '--gpu-memory-utilization': _MEMORY,
    '--device-memory-utilization': _MEMORY,
    '--device-ids': 'rollout.gpus, or --gpus of serve',
    **dict.fromkeys(
        ('--served-model-name', '--worker-extension-cls', '--logprobs-mode', '--generation-config'),
        'this package',
    ),
}
_READ = (OVERRIDES, *_SHORT.values(), *_SHORT, *_SET_BY, _FILE)


def in_full(words: Sequence[str | int]) -> list[str]:
    """The flags `words`, with those that this package reads in full: -tp=2 becomes the full name and a value.

    vLLM accepts _ for -, = for a space, and any unique prefix of a name (tried with the parser of 0.32.0,
    2026-11-28). Raises ValueError if the words are not flags, for a prefix, for a dotted part of an object
    (vLLM then drops the object given without a dot), for a flag that is set elsewhere, and for flags in a
    file.
    """
    words, full = [str(word) for word in words], []  # a config's tuple may contain numbers
    if stray := [word for i, word in enumerate(words) if word == '--' or i == 0 and not word.startswith('-')]:
        raise ValueError(
            f"{stray[0]}: only vLLM's own flags are allowed here, such as --enforce-eager; remove it"
        )
    for word in words:
        said, equals, value = word.partition('=')
        name, dot, _ = said.partition('.')
        name = name.replace('_', '-')
        meant = [flag for flag in _READ if word.startswith('-') and flag.startswith(name)]
        if not meant:
            full.append(word)
        elif name not in meant:
            raise ValueError(f'{word}: this abbreviates {meant[0]}; write the name of the flag in full')
        elif name == _FILE:
            raise ValueError(
                f'{word}: flags in a file are not checked by this package; give each of them here'
            )
        elif name in _SET_BY:
            raise ValueError(f"{word}: vLLM's {name} is set by {_SET_BY[name]}; leave it out here")
        elif dot:
            raise ValueError(
                f'{word}: a dotted flag replaces all others; give an object, as in {OVERRIDES} '
                f'{{"rope_theta": 40000}}'
            )
        else:
            full += [_SHORT.get(name, name), *([value] if equals else [])]
    return full
