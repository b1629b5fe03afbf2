"""rollouts/{step}.jsonl.zst: every group that a step sampled or trained on. (The module is run/log/responses.py.)"""

import dataclasses
import json

import numpy as np
import pytest
import zstandard
from group_builders import graded, make_group, masked, right
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from bapo_jax.groups import Author, Span, Verdict, joined, make_batch, taken
from bapo_jax.run.log.responses import Logged, logged, token_texts, two_responses, write_rollouts
from bapo_jax.tasks.traces import trace


class Spelling:
    """A tokenizer whose texts are the token numbers."""

    def decode(self, tokens):
        return ''.join(f'{t} ' for t in tokens)

    def batch_decode(self, rows):
        return [self.decode(tokens) for tokens in rows]


def test_everything_sampled_or_trained_on_has_one_use():
    fresh, again, old = [make_group(i, 4) for i in range(3)], [make_group(10 + i, 2) for i in range(2)], make_group(20, 3)
    batch = make_batch([fresh[1], again[0], old], ['x1', 'x2', 'x3'])
    logp = [[r.logp for r in g.responses] for g in batch.groups]
    assert logged(fresh, again, batch, [1, 1, 4], logp) == [
        ('discarded', fresh[0], 0, None), ('x1', fresh[1], 1, logp[0]), ('discarded', fresh[2], 0, None),
        ('x2', again[0], 1, logp[1]), ('left_out', again[1], 0, None), ('x3', old, 4, logp[2]),
    ]  # fmt: skip
    assert logged([], [], batch, [1, 1, None], [None] * 3)[2] == ('x3', old, None, None)


def test_a_group_with_a_trace_stands_for_the_fresh_one_and_nothing_is_known_of_the_trace(tmp_path):
    fresh = [make_group(i, 1, G=3, step=5) for i in range(2)]
    mixed = joined(graded(fresh[0].prompt, [trace(np.array([7, 8], np.int32))], right(1, 1)), taken(fresh[0], [1, 2]))
    logp = [r.logp - np.float32(1) for r in mixed.responses]
    groups = logged(fresh, [], make_batch([mixed], ['x1']), [1], [logp])
    assert [(x.use, x.group) for x in groups] == [('discarded', fresh[1]), ('x1', mixed)]
    write_rollouts(tmp_path / '000005.jsonl.zst', Spelling(), groups[1:])
    row = json.loads(zstandard.decompress((tmp_path / '000005.jsonl.zst').read_bytes()))
    assert row['spans'][0] == [['trace', -1, 2]] and row['versions'] == [-1, 5, 5] and row['responses'][0] == '7 8 '
    assert row['logp'][0] == row['ratio'][0] == [None, None]
    assert row['ratio'][1:] == [[pytest.approx(np.exp(-1), abs=0.0005)] * len(r.tokens) for r in fresh[0].responses[1:]]


def test_a_row_holds_what_was_asked_answered_judged_and_trained_on(tmp_path):
    g = make_group(3, 1, G=3, step=5)
    verdicts = [*right(1, 2), Verdict.INFRA_ERROR]
    first = masked(g.responses[0], np.arange(len(g.responses[0].tokens)) > 0)
    shaped = graded(g.prompt, [first, *g.responses[1:]], verdicts, 5, [1, 0.25, float('nan')], ('7', None, None))
    logp = [r.logp + np.float32(np.log(2)) for r in shaped.responses]
    file = tmp_path / 'rollouts' / '000005.jsonl.zst'
    write_rollouts(file, Spelling(), [Logged('x3', shaped, 2, logp), Logged('left_out', g)])
    row, other = (json.loads(line) for line in zstandard.decompress(file.read_bytes()).decode().splitlines())
    assert row == {
        'use': 'x3',
        'prompt_id': 3,
        'prompt': ''.join(f'{t} ' for t in g.prompt.tokens),
        'ground_truth': {'target': 3},
        'responses': [''.join(f'{t} ' for t in r.tokens) for r in g.responses],
        'verdicts': ['correct', 'wrong', 'infra_error'],
        'answers': ['7', None, None],
        'rewards': [1.0, 0.25, None],  # JSON has no nan
        'finish': [r.finish for r in g.responses],
        'versions': [5 if r.versions.size else -1 for r in shaped.responses],
        'spans': [
            [['placeholder', -1, 1], *([['policy', 5, n - 1]] if n > 1 else [])] if i == 0 else [['policy', 5, n]]
            for i, n in enumerate(len(r.tokens) for r in g.responses)
        ],
        'step': 5,
        'trained': 2,
        'pieces': [[f'{t} ' for t in r.tokens] for r in g.responses],
        'logp': [
            [pytest.approx(float(x), abs=0.0005) if t else None for x, t in zip(r.logp, r.trained_on, strict=True)]
            for r in shaped.responses
        ],
        'ratio': [[2.0 if t else None for t in r.trained_on] for r in shaped.responses],
    }
    assert (other['use'], other['rewards'], other['trained'], other['ratio']) == ('left_out', [1.0, 0.0, 0.0], 0, None)


def test_given_tokens_have_no_log_prob(tmp_path):
    g = make_group(3, 1, G=3, step=5)
    own = g.responses[1]
    prefix = Span(np.array([4, 5], np.int32), None, Author.PREFIX)
    whole = dataclasses.replace(own, spans=(prefix, *own.spans))
    file = tmp_path / '000005.jsonl.zst'
    write_rollouts(file, Spelling(), [Logged('x2', graded(g.prompt, [whole], right(1, 1), 5))])
    row = json.loads(zstandard.decompress(file.read_bytes()))
    assert row['spans'] == [[['prefix', -1, 2], ['policy', 5, len(own.tokens)]]] and row['responses'] == [''.join(f'{t} ' for t in (4, 5, *own.tokens))]
    assert row['logp'] == [[None, None, *(pytest.approx(float(x), abs=0.0005) for x in own.logp)]]


BYTES = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({f'<0x{i:02X}>': i for i in range(256)}, unk_token='<0x00>'))
)
BYTES.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
SPELLED = dict(enumerate(BYTES.batch_decode([[i] for i in range(256)])))


@given(st.text())
def test_the_text_that_tokens_add_is_the_response_also_where_a_character_is_of_several_tokens(text):
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    added = token_texts(BYTES, tokens, SPELLED)
    assert len(added) == len(tokens) and ''.join(added) == text
    places = np.cumsum([len(c.encode()) for c in text]) - 1  # a character's last byte brings it
    assert [added[i] for i in places] == list(text)


@given(st.binary(min_size=1))
def test_bytes_that_are_no_text_are_as_many_pieces_as_tokens(tokens):
    added = token_texts(BYTES, np.frombuffer(tokens, np.uint8).astype(np.int32), SPELLED)
    assert len(added) == len(tokens) and ''.join(added)


def test_nothing_is_written_of_no_groups_or_of_a_group_that_was_lost(tmp_path):
    write_rollouts(tmp_path / 'a.zst', Spelling(), [])
    write_rollouts(tmp_path / 'b.zst', Spelling(), [Logged('discarded', graded(make_group(1, 1).prompt, (), ()))])
    assert zstandard.decompress((tmp_path / 'a.zst').read_bytes()) == b''
    assert json.loads(zstandard.decompress((tmp_path / 'b.zst').read_bytes()))['pieces'] == []


def test_a_run_shows_the_first_right_response_and_the_first_other_one():
    groups = [make_group(0, 0, G=2), make_group(1, 1, G=3), make_group(2, 2, G=2)]

    def line(group, i, verdict):
        prompt, response = (Spelling().decode(tokens) for tokens in (group.prompt.tokens, group.responses[i].tokens))
        return f'step 7, {verdict}: {prompt} → {response}'

    assert two_responses(7, Spelling(), groups) == f'{line(groups[1], 0, "correct")}\n{line(groups[0], 0, "wrong")}'
    assert two_responses(7, Spelling(), groups[:1]) == line(groups[0], 0, 'wrong')
    assert two_responses(7, Spelling(), []) == ''


class Long(Spelling):
    def decode(self, tokens):
        return 'é' * 150 + '\n' + 'x' * 150


def test_what_a_run_shows_of_a_text_is_one_line_of_its_end_or_its_beginning():
    shown = two_responses(1, Long(), [make_group(0, 0, G=2)])
    assert shown == f'step 1, wrong: …{"é" * 8}\\n{"x" * 150} → {"é" * 150}\\n{"x" * 8}…'
