r"""The host's share of a step at the paper's load, without a model: 256 groups of 8 responses of 8,192 tokens
of mathematics.

    python -m benchmarks.host.load
    python -m benchmarks.host.load --tokenizer=HF_DIRECTORY --shortest=1

Prints one table: seconds and memory of the parts of the fourth step, when the buffer holds three. In the
order of a step:

    render                   prompts of 200 to 2,048 tokens through a chat template
    decode                   responses to text
    judge                    their \boxed{} answers; half of the groups need computer algebra, done by
                             the verifier's processes
    filter, compose, buffer  X1, X2 ∪ X3, and what is remembered
    pack                     the rows of all mini-batches

The targets stand beside them: filtered to packed in under 5 s and 3 GiB, with decoding in 10 s, all in 25 s
and 4 GiB. Receiving the responses is `client_load.py`.

Log-probs and the number of correct responses are drawn at random. Groups of every accuracy but 0 and 1 may be
replayed. That fills the batch, which the paper's narrower range does not. --shortest=1 draws response lengths
from 1 to 8,192.
"""

from __future__ import annotations

import datetime
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from bapo_jax.config import default_config
from bapo_jax.groups import (
    X1,
    Author,
    Batch,
    Group,
    Prompt,
    Response,
    Verdict,
    binary_rewards,
    lanes_of,
    sampled,
)
from bapo_jax.learner.credit import advantages, weights
from bapo_jax.learner.mini_batch import Rows
from bapo_jax.learner.packing import cut, pack
from bapo_jax.models.tokenizer import character_tokenizer, load_tokenizer
from bapo_jax.replay.bapo import X2, X3, fill
from bapo_jax.replay.buffer import ReplayBuffer
from bapo_jax.replay.filters import fresh_filter
from bapo_jax.tasks import encode_prompts
from bapo_jax.tasks.mathematics import task as mathematics

PARTS = ('render', 'decode', 'judge', 'filter', 'compose', 'buffer', 'pack')
GROUP_SIZE = 8
PROMPT_TOKENS = (200, 2048)
RESPONSE_TOKENS = 8192
STEPS = 4
MIB, GIB = 1 << 20, 1 << 30
CHAT = '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: '
# what a response is full of
SENTENCE = r'Then $\frac{x_{1}^2}{3} + \sqrt{y} = \left(2 z\right)$, so we try {1, 2} next and see. '


class Part(NamedTuple):
    seconds: float
    peak: int  # bytes over those of the process before any group existed
    what: str = ''


def measure(
    groups: int, tokenizer: Any, shortest: int = RESPONSE_TOKENS, tokens: int = RESPONSE_TOKENS
) -> dict[str, Part]:
    """The parts of the last step by name, in their order, for responses of `shortest` to `tokens` tokens."""
    config = default_config()
    config.learner.update(
        {'batch_groups': groups, 'mini_batch_groups': min(64, groups), 'micro_batch_rows': 8}
    )
    config.learner.row_tokens = PROMPT_TOKENS[1] + tokens
    replay = config.replay
    buffer = ReplayBuffer(groups, replay.high_recent_steps * groups, replay.high_recent_steps, replay.c1)
    write = Writer(tokenizer, shortest, tokens)
    warm_up(tokenizer)
    peak_before = peak_memory()
    parts: dict[str, Part] = {}

    def timed(name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = function(*args, **kwargs)
        parts[name] = Part(time.perf_counter() - started, peak_memory() - peak_before)
        return result

    def tell(name: str, what: str) -> None:
        parts[name] = parts[name]._replace(what=what)

    for step in range(1, STEPS + 1):
        rng = np.random.default_rng(step)
        truths = [write.problem(rng) for _ in range(groups)]
        first = step * groups
        prompts = timed('render', encode_prompts, 'math', truths, tokenizer, template='chat', first_id=first)
        answered = [write.group(rng, prompt, step) for prompt in prompts]
        if step == STEPS:
            pairs = [(g.prompt.ground_truth, r) for g in answered for r in g.responses]
            texts = timed(
                'decode', tokenizer.batch_decode, [r.tokens for _, r in pairs], skip_special_tokens=True
            )
            verdicts = timed('judge', mathematics.verify_all, texts, [truth for truth, _ in pairs])
            del texts
        kept = timed('filter', fresh_filter, answered, replay.fresh_filter, rng)
        batch = timed(
            'compose', fill, kept, [], buffer,
            size=groups, step=step, low=1 / GROUP_SIZE, high=1 - 1 / GROUP_SIZE, rng=rng, use_x3=True,
        )  # fmt: skip
        timed('buffer', buffer.add, answered, step)
    mini_batches = timed(
        'pack', pack_batch, batch, rng.permutation(len(batch.groups)), config.learner, tokens
    )

    meant = [verdict for g in answered for verdict in g.verdicts]
    right = sum(verdict == known for (verdict, _), known in zip(verdicts, meant, strict=True))
    packed = sum(array.nbytes for array in jax.tree.leaves(mini_batches))
    segments = [rows.sequences.segment for rows in mini_batches]
    used = sum(np.count_nonzero(segment) for segment in segments) / sum(segment.size for segment in segments)
    written = sum(len(r.tokens) for g in answered for r in g.responses)
    tell('render', f'{sum(len(p.tokens) for p in prompts):,} tokens of {len(prompts)} prompts')
    tell('decode', f'{written:,} tokens, {type(tokenizer).__name__}')
    tell('judge', f'{right} of {len(meant)} verdicts as they should be')
    tell('filter', f'{len(answered)} fresh groups → {len(kept)}')
    tell(
        'compose',
        f'{len(batch.groups)} groups, X1/X2/X3 '
        + '/'.join(str(batch.count(origin)) for origin in (X1, X2, X3)),
    )
    tell('buffer', f'holds {len(buffer.bad)} hard prompts and {len(buffer.high)} groups')
    tell(
        'pack',
        f'{packed / MIB:.0f} MiB in rows of {config.learner.row_tokens:,} tokens, {100 * used:.0f}% used',
    )
    return {name: parts[name] for name in PARTS}


class Writer:
    """Writes synthetic questions and answers. A question has a numeral for its answer, or an expression."""

    def __init__(self, tokenizer: Any, shortest: int, longest: int):
        self._encode = lambda text: np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
        self._lengths = shortest, longest
        self._filler = np.tile(self._encode(SENTENCE), longest)[: 2 * longest]

    def problem(self, rng: np.random.Generator) -> dict[str, Any]:
        """A ground truth. `numbers` are those of its answer, for `group`."""
        a, b, c = (
            int(x) for x in (rng.integers(101, 999), rng.choice([7, 11, 13]), rng.choice([2, 3, 5, 6]))
        )
        sentences = int(rng.integers(PROMPT_TOKENS[0], PROMPT_TOKENS[1] - 200)) // len(SENTENCE)
        answer = str(a) if rng.random() < 0.5 else rf'\frac{{{a}}}{{{b}}}\sqrt{{{c}}}'
        return {
            'problem': SENTENCE * max(1, sentences) + 'What is x?',
            'answers': [answer],
            'numbers': [a, b, c],
        }

    def group(self, rng: np.random.Generator, prompt: Prompt, step: int) -> Group:
        """Responses of which a random number is correct; no two spell their answer alike."""
        correct = int(rng.integers(GROUP_SIZE + 1))
        answers = [self._answer(prompt.ground_truth, i, i < correct) for i in range(GROUP_SIZE)]
        verdicts = (Verdict.CORRECT,) * correct + (Verdict.WRONG,) * (GROUP_SIZE - correct)
        return Group(
            prompt,
            tuple(self._response(rng, a, step) for a in answers),
            verdicts,
            binary_rewards(verdicts),
            step,
        )

    def _answer(self, truth: dict[str, Any], i: int, right: bool) -> str:
        (a, b, c), k = truth['numbers'], i + 2
        a += 0 if right else k
        if truth['answers'] == [str(truth['numbers'][0])]:
            return f'{a}.{"0" * i}'.rstrip('.')
        return rf'\frac{{{k * a}\sqrt{{{c}}}}}{{{k * b}}}'

    def _response(self, rng: np.random.Generator, answer: str, step: int) -> Response:
        tail = self._encode(rf' So the answer is \boxed{{{answer}}}.')
        n = max(len(tail), int(rng.integers(self._lengths[0], self._lengths[1] + 1)))
        start = int(rng.integers(len(self._filler) // 2))
        tokens = np.concatenate([self._filler[start : start + n - len(tail)], tail])
        return sampled(
            tokens, -rng.random(n, np.float32), 'length' if n == self._lengths[1] else 'stop', step - 1
        )


def warm_up(tokenizer: Any) -> None:
    """First uses, which belong to no step: the tokenizer sets itself up, and the verifier's processes start."""
    tokenizer.batch_decode([np.zeros(1, np.int32)])
    mathematics.verify_all(
        [rf'\boxed{{\frac{{{i}\sqrt{{2}}}}{{7}}}}' for i in range(8 * mathematics.MAX_WORKERS)],
        ['x'] * 8 * mathematics.MAX_WORKERS,
    )


def pack_batch(batch: Batch, order: np.ndarray, learner: ConfigDict, most_tokens: int) -> list[Rows]:
    """The rows of one pass, as `Learner.update` makes them where no policy scores the batch."""
    advantage, packed = advantages(batch, learner.advantage), []
    for part in cut(batch, order, learner):
        weight = {'rl': weights(part.batch, Author.POLICY, (), learner.aggregation, most_tokens)}
        packed.append(pack(part, lanes_of(batch), [advantage[i] for i in part.indices], weight, {}))
    return packed


def table(parts: dict[str, Part]) -> Table:
    rows = Table(
        'part', 'seconds', 'peak GiB so far', 'what', title=f'Host side of step {STEPS}, {describe_host()}'
    )
    for name, part in parts.items():
        rows.add_row(
            name, f'{part.seconds:.2f}', f'{part.peak / GIB:.2f}', part.what, end_section=name == 'pack'
        )

    def add_sum(name: str, of: tuple[str, ...], target: str) -> None:
        chosen = [parts[part] for part in of]
        rows.add_row(
            name, f'{sum(p.seconds for p in chosen):.2f}', f'{max(p.peak for p in chosen) / GIB:.2f}', target
        )

    replayed = PARTS[PARTS.index('filter') :]
    add_sum('filter … pack', replayed, 'target: under 5 s and 3 GiB')
    add_sum('with decoding', ('decode', *replayed), 'target: under 10 s')
    add_sum('all', PARTS, 'target: under 25 s and 4 GiB')
    return rows


def main(_) -> None:
    tokenizer = load_tokenizer(FLAGS.tokenizer) if FLAGS.tokenizer else character_tokenizer(CHAT)
    workers = min(len(os.sched_getaffinity(0)), mathematics.MAX_WORKERS)
    Console(width=132).print(table(measure(FLAGS.groups, tokenizer, FLAGS.shortest)))
    mathematics._pool().close()  # so that the processes are counted below
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(
        'Peak memory is over that of the process before any group existed, and includes the synthetic '
        f'rollouts of this step and of the buffer.\nBeside it, each of the {workers} verifier processes had '
        f'at most {largest / GIB:.2f} GiB.'
    )


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
    flags.DEFINE_integer(
        'shortest',
        RESPONSE_TOKENS,
        'Fewest tokens of a response.',
        lower_bound=1,
        upper_bound=RESPONSE_TOKENS,
    )
    flags.DEFINE_string(
        'tokenizer', None, 'A Hugging Face directory with a chat template; default: a tokenizer of bytes.'
    )
    app.run(main)
