"""The host's share of a step at the paper's load, without a model: 256 groups of 8 responses of 8,192 tokens.

    python benchmarks/host_load.py
    python benchmarks/host_load.py --tokenizer=HF_DIRECTORY --shortest=1

Prints one table: seconds and memory of filtering, composing, buffering, packing and decoding in the fourth step, when the buffer
holds three steps. The targets stand beside them: composed, buffered and packed in under 5 s and 3 GiB; with decoding 10 s.

Tokens, log-probs and the number of correct responses are drawn at random. Groups of every accuracy but 0 and 1 may be replayed.
That fills the batch, which the paper's narrower range does not. --shortest=1 draws response lengths from 1 to 8,192.
"""

from __future__ import annotations

import datetime
import os
import platform
import resource
import sys
import time
from importlib.metadata import version

import jax
import numpy as np
from absl import app, flags
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from bapo_jax.config import default_config
from bapo_jax.groups import X1, X2, X3, Batch, Group, Prompt, Response, Verdict, binary_rewards
from bapo_jax.learner.credit import advantages, token_weights
from bapo_jax.learner.packed import Rows
from bapo_jax.learner.packing import cut, pack
from bapo_jax.models.tokenizer import character_tokenizer, load_tokenizer
from bapo_jax.replay.bapo import fill
from bapo_jax.replay.buffer import ReplayBuffer
from bapo_jax.replay.filters import fresh_filter

GROUP_SIZE = 8
PROMPT_TOKENS = (200, 2048)
RESPONSE_TOKENS = 8192
STEPS = 4
MIB, GIB = 1 << 20, 1 << 30


def main(_) -> None:
    config = default_config()
    config.learner.update({'batch_groups': FLAGS.groups, 'mini_batch_groups': min(64, FLAGS.groups), 'micro_batch_rows': 8})
    config.learner.row_tokens = PROMPT_TOKENS[1] + RESPONSE_TOKENS
    tokenizer = load_tokenizer(FLAGS.tokenizer) if FLAGS.tokenizer else character_tokenizer()
    tokenizer.batch_decode([np.zeros(1, np.int32)])  # its first use sets it up, which belongs to no step
    replay = config.replay
    buffer = ReplayBuffer(FLAGS.groups, replay.high_recent_steps * FLAGS.groups, replay.high_recent_steps, replay.c1)

    peak_before = peak_memory()
    seconds: dict[str, float] = {}
    peaks: dict[str, int] = {}

    def timed(part: str, function, *args, **kwargs):
        started = time.perf_counter()
        result = function(*args, **kwargs)
        seconds[part], peaks[part] = time.perf_counter() - started, peak_memory() - peak_before
        return result

    for step in range(1, STEPS + 1):
        rng = np.random.default_rng(step)
        fresh = random_groups(rng, FLAGS.groups, FLAGS.shortest, step, len(tokenizer))
        buffered = sum(e.nbytes for e in buffer.high.values())  # when the batch is composed
        kept = timed('filter', fresh_filter, fresh, replay.fresh_filter, rng)
        batch = timed(
            'compose', fill, kept, [], buffer,
            size=FLAGS.groups, step=step, low=1 / GROUP_SIZE, high=1 - 1 / GROUP_SIZE, rng=rng, use_x3=True,
        )  # fmt: skip
        timed('buffer', buffer.add, fresh, step)
    mini_batches = timed('pack', pack_batch, batch, rng.permutation(len(batch.groups)), config.learner)
    packed = sum(array.nbytes for array in jax.tree.leaves(mini_batches))
    segments = [rows.sequences.segment for rows in mini_batches]
    used = sum(np.count_nonzero(segment) for segment in segments) / sum(segment.size for segment in segments)
    del mini_batches  # by the time the next step's responses are decoded, they are gone
    timed('decode', tokenizer.batch_decode, [r.tokens for g in fresh for r in g.responses], skip_special_tokens=True)

    data = sum(g.prompt.tokens.nbytes + sum(r.tokens.nbytes + r.logp.nbytes for r in g.responses) for g in fresh)
    counts = '/'.join(str(batch.count(origin)) for origin in (X1, X2, X3))
    without_decoding = sum(seconds[part] for part in ('filter', 'compose', 'buffer', 'pack'))
    table = Table('part', 'seconds', 'peak GiB so far', 'what', title=f'Host side of step {STEPS}, {describe_host()}')
    for part, what in {
        'filter': f'{len(fresh)} fresh groups → {len(kept)}',
        'compose': f'batch of {len(batch.groups)} groups, X1/X2/X3 {counts}',
        'buffer': f'holds {len(buffer.bad)} hard prompts and {len(buffer.high)} groups',
        'pack': f'{packed / MIB:.0f} MiB in rows of {config.learner.row_tokens:,} tokens, {100 * used:.0f}% used',
        'decode': f'{sum(len(r.tokens) for g in fresh for r in g.responses):,} tokens, {type(tokenizer).__name__}',
    }.items():
        table.add_row(part, f'{seconds[part]:.2f}', f'{peaks[part] / GIB:.2f}', what, end_section=part == 'decode')
    table.add_row('filter … pack', f'{without_decoding:.2f}', f'{peaks["pack"] / GIB:.2f}', 'target: under 5 s and 3 GiB')
    table.add_row('with decoding', f'{sum(seconds.values()):.2f}', f'{peaks["decode"] / GIB:.2f}', 'target: under 10 s')
    Console().print(table)
    print(
        f'Peak memory is over the {peak_before / GIB:.2f} GiB of the process before any group existed. It includes the synthetic '
        f'rollouts: {data / MIB:.0f} MiB of this step, {buffered / MIB:.0f} MiB in the buffer.'
    )


def pack_batch(batch: Batch, order: np.ndarray, learner: ConfigDict) -> list[Rows]:
    """The rows of one pass, as `Learner.update` makes them where no policy scores the batch."""
    advantage, packed = advantages(batch, learner.advantage), []
    for part in cut(batch, order, learner):
        lengths = [len(r.tokens) for g in part.batch.groups for r in g.responses]
        weight = token_weights(lengths, learner.aggregation, RESPONSE_TOKENS)
        packed.append(pack(part, [advantage[i] for i in part.indices], weight, {}))
    return packed


def random_groups(rng: np.random.Generator, count: int, shortest: int, step: int, vocabulary: int) -> list[Group]:
    """Fresh groups of prompts that no other step has, every number of correct responses equally likely."""

    def response() -> Response:
        n = int(rng.integers(shortest, RESPONSE_TOKENS + 1))
        logp = -rng.random(n, np.float32)
        return Response(rng.integers(0, vocabulary, n, np.int32), logp, 'length' if n == RESPONSE_TOKENS else 'stop', step - 1)

    def group(prompt_id: int) -> Group:
        length = int(rng.integers(PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1))
        prompt = Prompt(prompt_id, 'countdown', rng.integers(0, vocabulary, length, np.int32), {})
        correct = int(rng.integers(GROUP_SIZE + 1))
        verdicts = (Verdict.CORRECT,) * correct + (Verdict.WRONG,) * (GROUP_SIZE - correct)
        return Group(prompt, tuple(response() for _ in range(GROUP_SIZE)), verdicts, binary_rewards(verdicts), step)

    return [group(step * count + i) for i in range(count)]


def peak_memory() -> int:
    """The most memory this process ever had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == 'darwin' else peak * 1024  # Linux counts KiB


def describe_host() -> str:
    packages = ', '.join(f'{name} {version(name)}' for name in ('numpy', 'grain', 'tokenizers'))
    return f'{cpu_name()}, {os.cpu_count()} cores\n{packages}, {datetime.date.today()}'


def cpu_name() -> str:
    try:
        with open('/proc/cpuinfo', encoding='utf-8') as f:
            return next(line.split(':', 1)[1].strip() for line in f if line.startswith('model name'))
    except (FileNotFoundError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == '__main__':
    FLAGS = flags.FLAGS
    flags.DEFINE_integer('groups', 256, 'Groups a step, and the most groups in a batch.', lower_bound=1)
    flags.DEFINE_integer('shortest', RESPONSE_TOKENS, 'Fewest tokens of a response.', lower_bound=1, upper_bound=RESPONSE_TOKENS)
    flags.DEFINE_string('tokenizer', None, 'A Hugging Face directory; default: the tokenizer of bytes that small policies have.')
    app.run(main)
