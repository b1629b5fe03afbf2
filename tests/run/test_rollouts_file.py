"""rollouts/{step}.jsonl.zst: every group that a step sampled, with what became of it. (The module is run/rollouts.py.)"""

import json

import zstandard
from group_builders import graded, make_group, right

from bapo_jax.groups import Verdict, make_batch
from bapo_jax.run.rollouts import uses, write_rollouts


class Spelling:
    """A tokenizer whose texts are the token numbers."""

    def decode(self, tokens):
        return ' '.join(map(str, tokens))

    def batch_decode(self, rows):
        return [self.decode(tokens) for tokens in rows]


def test_everything_sampled_has_one_use_and_what_was_replayed_is_not_there():
    fresh, again, old = [make_group(i, 4) for i in range(3)], [make_group(10 + i, 2) for i in range(2)], make_group(20, 3)
    batch = make_batch([fresh[1], again[0], old], ['x1', 'x2', 'x3'])
    assert uses(fresh, again, batch) == [
        ('discarded', fresh[0]), ('x1', fresh[1]), ('discarded', fresh[2]), ('x2', again[0]), ('left_out', again[1])
    ]  # fmt: skip
    assert uses([], [], batch) == []


def test_a_row_holds_what_was_asked_answered_and_judged(tmp_path):
    g = make_group(3, 1, G=3, step=5)
    verdicts = [*right(1, 2), Verdict.INFRA_ERROR]
    shaped = graded(g.prompt, g.responses, verdicts, 5, [1, 0.25, float('nan')])
    write_rollouts(tmp_path / 'rollouts' / '000005.jsonl.zst', Spelling(), [('x1', shaped), ('left_out', g)])
    first, second = zstandard.decompress((tmp_path / 'rollouts' / '000005.jsonl.zst').read_bytes()).decode().splitlines()
    assert json.loads(first) == {
        'use': 'x1',
        'prompt_id': 3,
        'prompt': ' '.join(map(str, g.prompt.tokens)),
        'ground_truth': {'target': 3},
        'responses': [' '.join(map(str, r.tokens)) for r in g.responses],
        'verdicts': ['correct', 'wrong', 'infra_error'],
        'rewards': [1.0, 0.25, None],  # JSON has no nan
        'finish': [r.finish for r in g.responses],
        'versions': [5, 5, 5],
        'step': 5,
    }
    assert json.loads(second)['use'] == 'left_out' and json.loads(second)['rewards'] == [1.0, 0.0, 0.0]
