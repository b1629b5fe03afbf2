"""Starts a vLLM server that loads the trainer's policies.

    BAPO_ROLLOUT_TOKEN=… python -m bapo_jax.rollout.serve --model=DIR --port=8000

Every route requires the token (`Authorization: Bearer …`). If the environment has none, a token is generated
and printed, but only on a terminal, since it would otherwise stay in a log. The server listens on loopback by
default; on any other address it requires a token of yours. It runs in vLLM's own environment (made by
`bapo-vllm-env DIR`, or by `make vllm-env` in a checkout), which has no JAX and only numpy and ml_dtypes of
this project's requirements. The interpreter is --python, else $BAPO_VLLM_PYTHON, else the checkout's.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags, logging

from bapo_jax.machine import cli, hub, output
from bapo_jax.rollout.vllm.flags import OVERRIDES, in_full
from bapo_jax.rollout.vllm.gpus import ALL, check_there, named, parallel_flags, visible
from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE

FLAGS = flags.FLAGS
ROOT = Path(__file__).resolve().parents[2]
PYTHON_VARIABLE = 'BAPO_VLLM_PYTHON'

# With videos disabled, vLLM reserves no memory for them. Its pixel cache, 4 GiB in each of two processes,
# would rarely hit: a prompt's group is one request, and its image returns only steps later.
IMAGE_OPTIONS = ('--limit-mm-per-prompt', '{"video": 0}', '--mm-processor-cache-gb', '1')


def command(
    model: str, *, port: int, host: str = '127.0.0.1', python: str = '', dtype: str = 'auto',
    max_tokens: int = 0, sequences: int = 0, memory: float = 0.0, gpus: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> list[str]:  # fmt: skip
    """The server's command line. It runs the module behind `vllm serve`, which fails in vLLM's CPU build.

    `python` is as in `python_of`. `max_tokens` limits prompt and response together, `sequences` the number of
    concurrent sequences; `memory` is a fraction of the GPU's memory. 0 leaves each to vLLM. The model is
    split over all `gpus`; `server_environment` makes the same ones visible to the server.

    Raises ValueError if the model cannot be split this way, or if `extra` has vLLM flags that are refused.
    """
    return [
        str(python_of(python)), '-m', 'vllm.entrypoints.launchers.api_server.entry',
        '--model', str(Path(model).absolute()), '--served-model-name', 'policy',
        '--host', host, '--port', str(port), '--dtype', dtype,
        *(['--max-num-seqs', str(sequences)] if sequences else []),
        *(['--max-model-len', str(max_tokens)] if max_tokens else []),
        *(['--gpu-memory-utilization', str(memory)] if memory else []),
        '--worker-extension-cls', 'bapo_jax.rollout.vllm.worker.PolicyLoader',
        '--middleware', 'bapo_jax.rollout.vllm.token_guard.TokenGuard',
        '--enable-scale-out',  # the route that takes and returns token ids, with each token's policy version
        '--logprobs-mode', 'processed_logprobs',  # of logits / temperature
        # The model's own generation config has top-p and penalties, which change the sampling distribution.
        '--generation-config', 'vllm',
        '--disable-uvicorn-access-log',
        *(IMAGE_OPTIONS if reads_images(model) else ()),
        *parallel_flags(gpus, extra, heads(model)),
        *with_float32_head(extra),
    ]  # fmt: skip


class NumberParser(flags.ArgumentParser):
    """Parses a number that vLLM accepts. vLLM would refuse others only a minute later, with a traceback.

    Raises ValueError, which says what is `wanted`, if the word is not a number or does not fit.
    """

    def __init__(self, kind: type[int] | type[float], fits: Callable[[Any], bool], wanted: str):
        super().__init__()
        self._kind, self._fits, self._wanted = kind, fits, wanted

    def parse(self, argument: Any) -> Any:
        with contextlib.suppress(ValueError, OverflowError):
            if self._fits(number := self._kind(argument)):
                return number
        raise ValueError(f'vLLM does not accept it; give {self._wanted}')


def check_length(model: str, max_tokens: int, extra: Sequence[str]) -> None:
    """Raises ValueError if prompt and response together may exceed the model's positions, which vLLM refuses.

    A model with scaled rotary embeddings is left to vLLM, which multiplies the number of positions.
    """
    stated = _stated(model)
    of_language = {**stated, **(stated.get('text_config') or {})}
    overrides = json.loads(with_float32_head(extra)[1])
    section = overrides.get('text_config')
    changed = {**of_language, **overrides, **(section if isinstance(section, dict) else {})}
    positions = changed.get('max_position_embeddings')
    scaled = any(
        isinstance(part, dict) and 'factor' in part
        for part in (changed.get('rope_scaling'), changed.get('rope_parameters'))
    )
    if (
        type(positions) is int
        and positions < max_tokens
        and not (scaled or os.environ.get('VLLM_ALLOW_LONG_MAX_MODEL_LEN'))
    ):
        raise ValueError(
            f'--max_tokens={max_tokens}: the model has only {positions} positions (max_position_embeddings); '
            'give at most '
            f'{positions}, or extend them (docs/vllm.md, "More positions than the model was made for")'
        )


def check_address(host: str, port: int) -> None:
    """Raises ValueError if a server cannot listen there."""
    try:
        with socket.socket(socket.AF_INET6 if ':' in host else socket.AF_INET) as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does
            ours.bind((host, port))
            ours.listen()
    except (OSError, UnicodeError) as e:
        raise ValueError(
            f'--host={host} --port={port}: {e}; give an address of this machine and a free port'
        ) from e


def with_float32_head(extra: Sequence[str]) -> list[str]:
    """The flags, with all --hf-overrides merged into one, since vLLM would use only the last of several.

    Logits are computed in float32 unless a flag says `"head_dtype": "model"`. The trainer's are in float32
    too; rounding to bfloat16 changes logits of 20 to 30 by .02 on average. Raises ValueError if an override
    is not a JSON object, and for what `in_full` refuses.
    """
    others, overrides, flags_left = [], {'head_dtype': 'float32'}, iter(in_full(extra))
    for word in flags_left:
        if word != OVERRIDES:
            others.append(word)
            continue
        value = next(flags_left, '')
        try:
            for field, of_field in dict(json.loads(value)).items():
                before = overrides.get(field)
                overrides[field] = (
                    before | of_field if isinstance(before, dict) and isinstance(of_field, dict) else of_field
                )
        except (ValueError, TypeError) as e:
            raise ValueError(
                f'{OVERRIDES} {value}: give a JSON object, such as {{"max_position_embeddings": 16384}}'
            ) from e
    return [OVERRIDES, json.dumps(overrides), *others]


def in_checkout() -> bool:
    return (ROOT / 'pyproject.toml').is_file()


def python_of(said: str = '') -> Path:
    """vLLM's interpreter: `said`, else $BAPO_VLLM_PYTHON, else the one in the checkout's .venv-vllm."""
    return Path(said or os.environ.get(PYTHON_VARIABLE) or ROOT / '.venv-vllm' / 'bin' / 'python').absolute()


def check_python(said: str, field: str) -> None:
    """Raises ValueError if that interpreter does not exist; `field` is the setting that gives `said`."""
    python = python_of(said)
    if python.is_file() and os.access(python, os.X_OK):
        return
    if said or os.environ.get(PYTHON_VARIABLE):
        found = f'{field if said else PYTHON_VARIABLE}={python} is not an executable file'
    else:
        found = f'{field} and {PYTHON_VARIABLE} are not set, and no vLLM was found'
    raise ValueError(
        f'{found}; run `bapo-vllm-env DIR`{" (here also: make vllm-env)" if in_checkout() else ""} to '
        f'install vLLM, and set {field}=DIR/bin/python'
    )


def reads_images(model: str | Path) -> bool:
    """Whether the model in a Hugging Face directory has a vision tower."""
    return 'vision_config' in _stated(model)


def heads(model: str | Path) -> int:
    """The number of attention heads of a directory's language model; 0 if its config.json does not say."""
    stated = _stated(model)
    count = (stated.get('text_config') or stated).get(
        'num_attention_heads', stated.get('num_attention_heads')
    )
    return count if type(count) is int else 0


def _stated(model: str | Path) -> dict[str, Any]:
    """A Hugging Face directory's config.json; {} if missing. Raises ValueError if it is not a config."""
    file = Path(model) / 'config.json'
    try:
        stated = json.loads(file.read_text('utf-8')) if file.is_file() else {}
        if not isinstance(stated, dict) or not isinstance(stated.get('text_config') or {}, dict):
            raise TypeError('it is not a JSON object')
    except (ValueError, TypeError, RecursionError) as e:
        raise ValueError(
            f'{file} is not a valid model config ({str(e)[:200]}); download the model directory again'
        ) from e
    return stated


def package_alone() -> Path:
    """A folder from which the server imports this package, and nothing else of the trainer's environment.

    A checkout is such a folder. An installed package lies beside the trainer's libraries, which would shadow
    the server's own, so a separate folder in the user's cache links to it.
    """
    if in_checkout():
        return ROOT
    cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
    folder = cache / 'bapo_jax' / hashlib.sha256(str(ROOT).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (folder / 'bapo_jax').exists():
        with contextlib.suppress(FileExistsError):  # another server start has made it
            (folder / 'bapo_jax').symlink_to(ROOT / 'bapo_jax')
    return folder


def server_environment(token: str, gpus: Sequence[str] = (), cpu_cache_gib: int = 1) -> dict[str, str]:
    """This process's environment variables and the server's own.

    The server sees `gpus`, or if none are named, those that this process sees.
    """
    return {
        **os.environ,
        **({'CUDA_VISIBLE_DEVICES': ','.join(gpus)} if gpus else {}),
        TOKEN_VARIABLE: token,
        'PYTHONPATH': os.pathsep.join(filter(None, [str(package_alone()), os.environ.get('PYTHONPATH')])),
        'VLLM_SERVER_DEV_MODE': '1',  # enables the routes that pause, load and resume
        'VLLM_ALLOW_RUNTIME_LORA_UPDATING': '1',  # enables those that add adapters and drop them
        'VLLM_CPU_KVCACHE_SPACE': os.environ.get('VLLM_CPU_KVCACHE_SPACE', str(cpu_cache_gib)),
        'VLLM_HTTP_TIMEOUT_KEEP_ALIVE': '600',  # seconds; longer than the client keeps an idle connection
        'VLLM_NO_USAGE_STATS': '1',
        'HF_HUB_OFFLINE': '1',
    }


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == 'localhost'


def main(argv: Sequence[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    token = os.environ.get(TOKEN_VARIABLE)
    if not token and not is_loopback(FLAGS.host):
        sys.exit(
            f'error: --host={FLAGS.host} is not a loopback address, so others could call the server; set '
            f'{TOKEN_VARIABLE}'
        )
    try:
        check_python(FLAGS.python, '--python')
        model = hub.model_folder(FLAGS.model, '--model')
    except (ValueError, OSError) as e:
        sys.exit(f'error: {e}')
    if not (Path(model) / 'config.json').is_file():
        sys.exit(f'error: --model={FLAGS.model} has no config.json; give a Hugging Face model directory')
    if not token and not sys.stdout.isatty():
        sys.exit(
            'error: standard output is not a terminal, so a generated token would end up in a log; set '
            f'{TOKEN_VARIABLE}'
        )
    if not token:
        token = secrets.token_urlsafe(24)
        print(f'export {TOKEN_VARIABLE}={token}', flush=True)
    try:
        gpus = visible() if FLAGS.gpus == ALL else named(FLAGS.gpus) if FLAGS.gpus else ()
        check_there(gpus)
        words = command(
            model, port=FLAGS.port, host=FLAGS.host, python=FLAGS.python, dtype=FLAGS.dtype,
            max_tokens=FLAGS.max_tokens, sequences=FLAGS.sequences, memory=FLAGS.memory, gpus=gpus,
            extra=argv[1:],
        )  # fmt: skip
        check_length(model, FLAGS.max_tokens, argv[1:])
        check_address(FLAGS.host, FLAGS.port)
    except ValueError as e:
        sys.exit(f'error: {e}')
    output.hand_over()
    os.execve(words[0], words, server_environment(token, gpus))


def define_flags(to: flags.FlagValues = FLAGS) -> None:
    def define_number(
        name: str, default: float, meaning: str, fits: Callable[[Any], bool], wanted: str
    ) -> None:
        flags.DEFINE(NumberParser(type(default), fits, wanted), name, default, meaning, to)

    flags.DEFINE_string(
        'model',
        None,
        'Hugging Face directory or hub name; policies have its architecture.',
        to,
        required=True,
    )
    define_number('port', 8000, 'Port to listen on.', lambda n: 0 < n < 65536, 'a port, 1 to 65535')
    flags.DEFINE_string(
        'host', '127.0.0.1', f'Address to listen on; one that is not loopback needs {TOKEN_VARIABLE}.', to
    )
    flags.DEFINE_string(
        'python',
        '',
        'Python of the vLLM environment; default: $BAPO_VLLM_PYTHON, else that of .venv-vllm.',
        to,
    )
    flags.DEFINE_enum('dtype', 'auto', ['auto', 'float32', 'bfloat16'], 'Compute dtype.', to)
    define_number(
        'max_tokens',
        0,
        "Most prompt plus response tokens; 0: the model's limit.",
        lambda n: n >= 0,
        'a number of tokens, or 0',
    )
    define_number(
        'sequences',
        0,
        "Most concurrent responses; 0: vLLM's default.",
        lambda n: n >= 0,
        'a number of responses, or 0',
    )
    flags.DEFINE_string(
        'gpus', '', "GPUs to split the model over: CUDA's numbers, as in 6,7, or all; '': vLLM's choice.", to
    )
    define_number(
        'memory', 0.0, "Fraction of the GPU's memory, if the trainer has the rest; 0: vLLM's default.",
        lambda x: 0 <= x <= 1, "a fraction of the GPU's memory, from 0 to 1",
    )  # fmt: skip


def run() -> None:
    """Runs the command: parses its flags, then calls `main`."""
    define_flags()
    cli.start(main)


if __name__ == '__main__':
    run()
