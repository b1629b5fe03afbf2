"""A run and its traces: judged once as responses are, kept by content, and refused if they are not those of its problems."""

import json

import numpy as np
import pytest
from small_run import rollouts, run, small_config

from bapo_jax.groups import Author, Verdict
from bapo_jax.inputs import read_inputs
from bapo_jax.run.start import claim_directory
from bapo_jax.run.traces import judged_traces
from bapo_jax.tasks import get_task
from bapo_jax.tasks.countdown.solutions import worked_solution


def config_of(benchmark, file, **changes):
    c = small_config('luffy', benchmark, replay__given_by='policy', replay__traces__file=str(file), **changes)
    c.evaluate.benchmarks, c.evaluate.track_prompts = (), 0
    return c


@pytest.fixture
def file(tmp_path, benchmark):
    """Traces of problems 0 to 39: right ones, every fifth a wrong one."""
    asked = read_inputs(small_config('grpo', benchmark)).prompts
    rows = []
    for prompt in asked[:40]:
        text = worked_solution(prompt.ground_truth, np.random.default_rng(prompt.id))
        rows.append({'prompt_id': prompt.id, 'text': text if prompt.id % 5 else '1+1=2<answer>1+1</answer>'})
    path = tmp_path / 'traces.jsonl'
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


def test_a_trace_has_the_verdict_and_the_reward_of_its_text(benchmark, file):
    traces = judged_traces(read_inputs(config_of(benchmark, file)))
    right = {i for i, g in traces.items() if g.verdicts == (Verdict.CORRECT,)}
    assert right == {i for i in traces if i % 5} and len(traces) > 35
    for i, g in traces.items():
        assert (g.prompt.id, g.size, g.step, g.rewards.tolist()) == (i, 1, 0, [float(i in right)])
        assert g.responses[0].by(Author.TRACE).all()


def test_the_reward_of_a_trace_is_that_of_the_users_function_and_is_punished_for_its_length(benchmark, file):
    longest = read_inputs(config_of(benchmark, file)).config.rollout.max_response_tokens
    traces = judged_traces(read_inputs(config_of(benchmark, file, task__reward='parity:odd', task__overlong_share=0.5)))
    tokenizer = read_inputs(config_of(benchmark, file)).tokenizer
    for g in traces.values():
        tokens = g.responses[0].tokens
        odd = len(tokenizer.decode(tokens, skip_special_tokens=True)) % 2
        assert g.rewards[0] == pytest.approx(odd - max(0, len(tokens) - longest / 2) / (longest / 2), abs=1e-6)


def test_a_trace_that_nobody_could_judge_is_left_out_and_many_end_the_run(benchmark, file, monkeypatch):
    def failing(count):
        """The task's verifier, which fails on the first `count` responses."""
        task = get_task('countdown')
        verify = task.verify_all

        def some(responses, truths, budget_s):
            outcomes = verify(responses, truths, budget_s)
            return [(Verdict.INFRA_ERROR, None)] * count + outcomes[count:]

        with monkeypatch.context() as m:
            m.setattr(task, 'verify_all', some)
            return judged_traces(read_inputs(config_of(benchmark, file)))

    every = failing(0)
    assert list(failing(3)) == list(every)[3:]
    with pytest.raises(RuntimeError, match=r'12 of \d+ responses of step 0 have no verdict'):
        failing(12)


def test_traces_of_which_none_is_correct_are_refused(benchmark, tmp_path):
    """As if their numbers counted from 1, or the answers had another form."""
    path = tmp_path / 'shifted.jsonl'
    path.write_text(''.join(json.dumps({'prompt_id': i, 'text': '<answer>1+1</answer>'}) + '\n' for i in range(9)))
    with pytest.raises(ValueError, match=r'shifted\.jsonl: the verifier finds none of the 9 traces correct; check that each "prompt_id"'):
        judged_traces(read_inputs(config_of(benchmark, path)))


def test_a_run_continues_with_the_same_traces_alone_wherever_they_lie(benchmark, file, tmp_path):
    def claim(path):
        return claim_directory(read_inputs(config_of(benchmark, path)), tmp_path / 'run', amend=True)

    claim(file)
    moved = tmp_path / 'moved.jsonl'
    lines = file.read_text().splitlines()
    moved.write_text('\n'.join(reversed(lines)))
    assert list(claim(moved).changed) == ['replay.traces.file']
    moved.write_text('\n'.join(lines).replace('1+1=2', '1+1=3'))
    with pytest.raises(ValueError, match=r'fingerprints\.traces.*restore what was changed: .*the traces of replay\.traces\.file=.*moved\.jsonl'):
        claim(moved)


@pytest.mark.slow
def test_a_run_says_how_many_prompts_have_a_trace_and_writes_the_groups_that_it_trained_on(benchmark, file, tmp_path, capsys):
    run(config_of(benchmark, file, steps=1), tmp_path / 'run')
    assert 'prompts have a trace; ' in capsys.readouterr().out
    rows = rollouts(tmp_path / 'run', 1)
    assert [row['use'] for row in rows] == ['x1'] * 8
    traced = [row for row in rows if row['spans'][0][0][0] == 'trace']
    given = {json.loads(line)['prompt_id']: json.loads(line)['text'] for line in file.read_text().splitlines()}
    assert 0 < len(traced) < 8
    for row in rows:
        assert len(row['responses']) == 4 and (row in traced) == (row['prompt_id'] in given)
    for row in traced:
        assert row['responses'][0].startswith(given[row['prompt_id']]) and row['versions'] == [-1, 0, 0, 0]
        assert row['logp'][0] == [None] * len(row['logp'][0]) and row['trained'] == 1
