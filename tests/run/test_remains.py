"""What a run has recorded is never deleted because its checkpoints are gone; a run that had none begins anew, and says so."""

import json

import pytest
from claims import claim
from learners import BARE, learner_config, make_learner
from test_directory import HERE, PRINTS, config

from bapo_jax.run.opening import open_run
from bapo_jax.run.remains import NONE_YET, drop_later, look_for_first

LEFT = {
    'metrics.jsonl': '{"step": 0}\n{"step": 1}\n{"step": 2}\n',
    'evals/000002.json': '{}',
    'rollouts/000002.jsonl.zst': '',
    'skipped/000002.jsonl.zst': '',
}


def write(workdir, *names):
    for name in names:
        (workdir / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / name).write_text(LEFT.get(name, ''))


@pytest.mark.parametrize('name', LEFT)
@pytest.mark.parametrize('lost', ['the folder', 'all in it', 'the config too'])
def test_steps_without_a_checkpoint_are_refused_with_two_remedies_and_nothing_is_touched(name, lost, tmp_path):
    if lost != 'the config too':
        claim(tmp_path, config(), PRINTS, HERE)
    write(tmp_path, name)
    if lost == 'all in it':
        (tmp_path / 'checkpoints' / '2.orbax-checkpoint-tmp').mkdir(parents=True)
    before = {file: file.read_bytes() for file in tmp_path.rglob('*') if file.is_file()}
    with pytest.raises(ValueError, match=rf'{name} is of step 2, .* Restore {tmp_path}/checkpoints, or give another --workdir'):
        claim(tmp_path, config(), PRINTS, HERE)
    assert {file: file.read_bytes() for file in tmp_path.rglob('*') if file.is_file()} == before


@pytest.mark.parametrize('there', ['checkpoints/2/host', f'checkpoints/{NONE_YET}'])
def test_with_a_checkpoint_or_before_the_first_one_a_run_may_go_on(there, tmp_path):
    claim(tmp_path, config(), PRINTS, HERE)
    write(tmp_path, *LEFT, there)
    assert claim(tmp_path, config(), PRINTS, HERE) == {}


def test_after_the_first_evaluation_alone_nothing_is_lost(tmp_path):
    claim(tmp_path, config(), PRINTS, HERE)
    write(tmp_path, 'evals/000000.json')
    (tmp_path / 'metrics.jsonl').write_text('{"step": 0}\n')
    assert claim(tmp_path, config(), PRINTS, HERE) == {}


def test_a_run_notes_that_it_has_no_checkpoint_until_the_first_is_whole(policy, tmp_path):
    learner, c = make_learner(policy, BARE), learner_config(**BARE)
    state, _, checkpoints = open_run(learner, c, tmp_path / 'checkpoints')
    look_for_first(tmp_path)
    assert (tmp_path / 'checkpoints' / NONE_YET).is_file() and checkpoints.latest_step() is None
    state.step = 3
    checkpoints.save(state)
    checkpoints.close()
    look_for_first(tmp_path)
    assert [path.name for path in (tmp_path / 'checkpoints').iterdir()] == ['3']
    open_run(learner, c, tmp_path / 'checkpoints')[2].close()
    assert not (tmp_path / 'checkpoints' / NONE_YET).exists()


def test_the_samples_of_a_lost_steps_evaluation_go_and_those_of_the_checkpoints_step_stay(tmp_path):
    write(tmp_path, 'evals/000001.partial/0.jsonl', 'evals/000002.partial/0.jsonl')
    drop_later(tmp_path, 1)
    assert [path.name for path in (tmp_path / 'evals').iterdir()] == ['000001.partial']


def test_what_is_later_than_the_checkpoint_goes_and_a_new_beginning_is_said(tmp_path, caplog):
    write(tmp_path, *LEFT, 'evals/000000.json', 'evals/000001.json', 'rollouts/000001.jsonl.zst', 'rollouts/notes.txt')
    drop_later(tmp_path, 1)
    assert not caplog.records
    left = {'metrics.jsonl', 'evals/000000.json', 'evals/000001.json', 'rollouts/000001.jsonl.zst', 'rollouts/notes.txt'}
    assert {str(file.relative_to(tmp_path)) for file in tmp_path.rglob('*') if file.is_file()} == left
    drop_later(tmp_path, 0)
    assert [(r.row['event'], r.row['until']) for r in caplog.records] == [('begun anew', 2)]
    assert json.loads((tmp_path / 'metrics.jsonl').read_text().splitlines()[-1]) == {'step': 2}  # MetricsLog drops these
    assert not (tmp_path / 'evals' / '000001.json').exists() and (tmp_path / 'evals' / '000000.json').exists()
