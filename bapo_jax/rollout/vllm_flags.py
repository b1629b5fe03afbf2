"""vLLM's own flags, as a user gives them to a server. What is read of them stands in one spelling here, and hides in no other."""

from __future__ import annotations

from collections.abc import Sequence

TENSOR, PIPELINE, PREFILL, DATA = (f'--{kind}-parallel-size' for kind in ('tensor', 'pipeline', 'prefill-context', 'data'))
OVERRIDES = '--hf-overrides'
_SHORT = {'-tp': TENSOR, '-pp': PIPELINE, '-pcp': PREFILL, '-dp': DATA}
_FILE = '--config'
# What sets these. Of two such flags vLLM takes the last, which would replace ours and what was checked of it.
_MEMORY = 'rollout.server_memory, or --memory of serve'
_SET_BY = {
    '--model': 'model.path, or --model of serve',
    '--host': '--host of serve',
    '--port': '--port of serve',
    '--dtype': 'rollout.dtype, or --dtype of serve',
    '--max-model-len': 'the token limits of rollout and evaluate, or --max_tokens of serve',
    '--gpu-memory-utilization': _MEMORY,
    '--device-memory-utilization': _MEMORY,
    '--device-ids': 'rollout.gpus, or --gpus of serve',
    **dict.fromkeys(('--served-model-name', '--worker-extension-cls', '--logprobs-mode', '--generation-config'), 'this package'),
}
_READ = (OVERRIDES, *_SHORT.values(), *_SHORT, *_SET_BY, _FILE)


def in_full(words: Sequence[str | int]) -> list[str]:
    """The flags `words`. Those that this package reads have their whole name, apart from their value: -tp=2 is two words.

    vLLM takes _ for -, = for a space, and for a name any beginning that no other flag shares (tried with the parser of 0.32.0,
    2026-11-28). Raises ValueError where the words are no flags, for a beginning, for a part of an object given by a dot (vLLM
    then drops the object given without), for a flag that is set elsewhere, and for flags in a file.
    """
    words, full = [str(word) for word in words], []  # a config's tuple may have numbers
    if stray := [word for i, word in enumerate(words) if word == '--' or i == 0 and not word.startswith('-')]:
        raise ValueError(f"{stray[0]}: only flags of vLLM's own can stand here, such as --enforce-eager; take it out")
    for word in words:
        said, equals, value = word.partition('=')
        name, dot, _ = said.partition('.')
        name = name.replace('_', '-')
        meant = [flag for flag in _READ if word.startswith('-') and flag.startswith(name)]
        if not meant:
            full.append(word)
        elif name not in meant:
            raise ValueError(f'{word}: this package looks for {meant[0]}; write the name of the flag in full')
        elif name == _FILE:
            raise ValueError(f'{word}: flags in a file are not seen by this package; give each as a flag of its own')
        elif name in _SET_BY:
            raise ValueError(f"{word}: vLLM's {name} is set by {_SET_BY[name]}; leave it out here")
        elif dot:
            raise ValueError(
                f'{word}: a flag with a dot replaces the one without; give an object, as in {OVERRIDES} {{"rope_theta": 40000}}'
            )
        else:
            full += [_SHORT.get(name, name), *([value] if equals else [])]
    return full
