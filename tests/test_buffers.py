"""What the table of a run's buffer promises: numbers that are the buffer's, no write, one line for an error."""

import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from group_builders import judged_group
from rich.console import Console
from small_run import small_config

from bapo_jax import buffers
from bapo_jax.config import resolve
from bapo_jax.groups import Verdict, make_batch
from bapo_jax.learner.update import TrainState
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.replay.buffer import ReplayBuffer
from bapo_jax.replay.kinds import make_replay
from bapo_jax.run.checkpoint import Checkpoints
from bapo_jax.run.state import RunState

RIGHT, WRONG = Verdict.CORRECT, Verdict.WRONG


VERDICTS = ([WRONG] * 4, [RIGHT, WRONG, WRONG, WRONG], [RIGHT, RIGHT, WRONG, WRONG])


def stored(directory: Path, method: str, verdicts=VERDICTS) -> Path:
    """A run directory of `method` after step 2, whose weights are one number."""
    config = resolve(small_config(method, Path('cd4')))
    character_tokenizer('a template').save_pretrained(directory / 'base')
    (directory / 'base' / 'config.json').write_text('{}')
    config.model.path = str(directory / 'base')
    rng = np.random.default_rng(0)
    replay = make_replay(config, 100, lambda step: True, None)
    checkpoints = Checkpoints(directory / 'run' / 'checkpoints', keep=None)
    for step in (1, 2):
        fresh = [judged_group(10 * step + i, v, rng) for i, v in enumerate(verdicts)]
        replay.add(step, fresh, make_batch(fresh[1:], ['x1'] * 2))
        if step == 1 and method == 'bapo':
            replay.buffer.mark_reevaluated([judged_group(10, [WRONG] * 4, rng)] * 3)
        checkpoints.save(RunState(TrainState({'w': jnp.ones(1)}, {}), {'w': jnp.ones(1)}, step=step), replay.state())
    checkpoints.close()
    (directory / 'run' / 'config.json').write_text(json.dumps(config.to_dict()))
    rows = [{'step': step, 'buffer/bad/added': 5, 'buffer/bad/evicted': 2, 'buffer/bad/evicted_unseen': 1} for step in (1, 2, 3)]
    (directory / 'run' / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return directory / 'run'


def shown(run: Path, show: int = 10) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, 'w'))
    buffers.show_run(run, show, console)
    return console.export_text()


def cells(text: str, first: str) -> list[str]:
    """The cells of the first table row that begins with `first`."""
    rows = ([cell.strip() for cell in line.strip('│ ').split('│')] for line in text.splitlines() if line.startswith('│'))
    return next(row for row in rows if row[0] == first)


def test_the_numbers_are_those_of_the_newest_checkpoint_and_no_file_changes(tmp_path):
    run = stored(tmp_path, 'bapo')
    before = {p: p.stat().st_mtime_ns for p in run.rglob('*')}
    text = shown(run)
    assert cells(text, 'bad')[1] == '2'  # the all-wrong prompts 10 and 20; one of four is above c1
    assert cells(text, 'high')[1] == '4'
    assert cells(text, '1/4') == ['1/4', '2'] and cells(text, '2/4') == ['2/4', '2']
    assert text.index('Whole run, 2 steps') and '│ bad  │    10 │       4 │              2 │' in text  # step 3 is not in it
    assert cells(text, '10')[:5] == ['10', '0.000', '0.000', '1', '3']
    assert {p: p.stat().st_mtime_ns for p in run.rglob('*')} == before


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path):
    run = stored(tmp_path, 'bapo')
    for file in (run / 'checkpoints' / '2' / 'replay').rglob('*'):
        if file.is_file():
            file.write_bytes(b'')
    assert 'replay buffer after step 1' in shown(run)


def test_repo_has_a_table_of_its_own_and_grpo_keeps_no_buffer(tmp_path):
    assert cells(shown(stored(tmp_path / 'a', 'repo')), '6')[:2] == ['6', '24']  # 6 prompts, 24 responses
    assert 'has no replay buffer' in shown(stored(tmp_path / 'b', 'grpo'))


def test_rows_with_a_replay_of_their_own_have_a_table_of_what_they_hold(tmp_path):
    successes = shown(stored(tmp_path / 'a', 'arpo'))
    assert cells(successes, '4')[:3] == ['4', '6', '8']  # 4 prompts with 1, 2, 1 and 2 right responses, at most 8 each
    for method, capacity in (('fifo', '48'), ('freshper', '12,500')):
        groups = shown(stored(tmp_path / method, method))
        assert cells(groups, '6')[:2] == ['6', capacity] and cells(groups, '0/4') == ['0/4', '2']
        assert '│ 1                │      4 │' in groups  # each step trained on two of its three


def test_a_table_without_rows_is_not_shown(tmp_path):
    text = shown(stored(tmp_path, 'bapo', [[WRONG] * 4] * 3))
    assert 'Contents' in text and 'Accuracy of the high part' not in text


def test_an_error_is_one_line_with_the_remedy(tmp_path, capsys):
    with pytest.raises(SystemExit) as none:
        buffers.run([str(tmp_path)])
    assert none.value.code.startswith('error: ') and '\n' not in none.value.code and str(tmp_path) in none.value.code and '--workdir' in none.value.code
    run = stored(tmp_path, 'bapo')
    os.rename(run / 'checkpoints', run / 'elsewhere')
    with pytest.raises(SystemExit, match=r'no complete checkpoint; train until step 2 \(checkpoint\.every\)'):
        buffers.run([str(run)])
    assert not (run / 'checkpoints').exists()


def test_the_questions_of_a_run_of_another_machine_are_read_with_a_base_that_is_named_here(tmp_path, capsys):
    run = stored(tmp_path, 'bapo')
    buffers.run([str(run)])
    shown = capsys.readouterr().out
    os.rename(tmp_path / 'base', tmp_path / 'elsewhere')
    with pytest.raises(SystemExit, match=r"model\.path='.*base' in its run's config\.json is not a directory here; give --base="):
        buffers.run([str(run)])
    capsys.readouterr()
    buffers.run([str(run), f'--base={tmp_path / "elsewhere"}'])
    assert capsys.readouterr().out == shown and 'Hard prompts' in shown
    recorded = json.loads((run / 'config.json').read_text()) | {'fingerprints': {'tokenizer': 'of another one'}}
    (run / 'config.json').write_text(json.dumps(recorded))
    with pytest.raises(SystemExit, match=r"--base='.*elsewhere' has another tokenizer than the run; give"):
        buffers.run([str(run), f'--base={tmp_path / "elsewhere"}'])


def test_the_prompts_that_resist_are_those_re_evaluated_most_often_then_the_oldest():
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer(bad_capacity=8, high_capacity=8, high_recent_steps=3, c1=1 / 8)
    for step, ids in ((1, (10, 11)), (2, (12, 13, 14))):
        buffer.add([judged_group(i, [Verdict.WRONG, Verdict.WRONG], rng) for i in ids], step)
    for times, i in ((2, 11), (3, 13), (2, 12)):  # 10 was never re-evaluated, and 14 improved
        for _ in range(times):
            buffer.mark_reevaluated([judged_group(i, [Verdict.WRONG, Verdict.WRONG], rng)])
    buffer.mark_reevaluated([judged_group(14, [Verdict.WRONG, Verdict.CORRECT], rng)])
    assert [e.prompt.id for e in buffers.resisting(buffer, 10)] == [13, 11, 12]
    assert [e.prompt.id for e in buffers.resisting(buffer, 1)] == [13]
    assert buffers.resisting(buffer, 0) == []
