"""Where a run stands: what a checkpoint gives back is what it was given, bit for bit; what is damaged or another's is refused."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from group_builders import assert_same_arrays, graded, make_group, right
from learners import BARE, batch_of, learner_config, make_learner

from bapo_jax.groups import joined, make_batch, taken
from bapo_jax.learner.learner import Learner
from bapo_jax.learner.objective import ROLLOUT
from bapo_jax.learner.update import TrainState
from bapo_jax.replay.arpo import led_by
from bapo_jax.run.checkpoint import Checkpoints, DamagedCheckpoint, NotSaved, copied_gb
from bapo_jax.run.checksums import checksum_of_text, checksums
from bapo_jax.run.opening import OtherWeights, open_run
from bapo_jax.run.state import RunState, copy_params
from bapo_jax.tasks.traces import trace

REPLAY = {'r_tot': np.array([np.nan]), 'high_tokens': np.arange(7, dtype=np.int32), 'bad_stored': np.array([3, 0], np.int64)}


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def times(params, factor):
    return jax.tree.map(lambda x: jnp.asarray(x * np.float32(factor)), params)


@pytest.fixture(scope='module')
def config():
    return learner_config(**BARE)


@pytest.fixture(scope='module')
def trained(policy, groups):
    """A state whose moments are not 0."""
    learner = make_learner(policy, BARE)
    return learner.update(learner.init(copy_params(policy.params)), batch_of(groups[:3]), np.random.default_rng(0))[0]


@pytest.fixture(scope='module')
def saved(trained, policy, tmp_path_factory):
    """(directory with a checkpoint of step 7, the state it holds)."""
    directory = tmp_path_factory.mktemp('saved') / 'checkpoints'
    initial = checksum_of_text(checksums(make_learner(policy, BARE).read_initial()))
    state = RunState(trained, times(policy.params, 0.9), alpha_version=5, step=7, synced_after=6, initial=initial)
    state.skipped_in_a_row = 2
    state.totals['responses'], state.unwritten = 123, {'critic/score/mean': 0.1}
    checkpoints = Checkpoints(directory, keep=2)
    checkpoints.save(state, REPLAY, '{"position": 9}')
    checkpoints.close()
    return directory, state


# ---- the state of a run


def test_a_sync_makes_alpha_a_copy_of_theta_that_survives_it(policy):
    state = RunState(make_learner(policy, BARE).init(copy_params(policy.params)), times(policy.params, 2), step=4)
    state.sync()
    assert state.alpha_version == 4
    for x in jax.tree.leaves(state.theta.params):
        x.delete()  # as the next update does, which donates them
    same(state.alpha, policy.params)
    assert state.policies()[ROLLOUT] is state.alpha


def test_the_policies_before_alpha_are_kept_as_many_as_asked_newest_first(policy):
    state = RunState(make_learner(policy, BARE).init(copy_params(policy.params)), 'α0', keep_recent=2)
    versions = []
    for step in (1, 2, 3):
        state.step = step
        state.sync()
        versions.append([version for version, _ in state.recent])
    assert versions == [[0], [1, 0], [2, 1]]
    without = RunState(state.theta, 'α0')
    without.sync()
    assert without.recent == []


def test_the_reference_becomes_the_policy_after_the_switch_step_and_stays():
    state = RunState(TrainState('θ', None), 'α', reference='θ0', switch_step=2, frozen=lambda params: f'copy of {params}')
    references = []
    for step in (1, 2, 3):
        state.theta = TrainState(f'θ{step}', None)
        state.trained()
        references.append(state.policies()['reference'])
    assert references == ['θ0', 'copy of θ2', 'copy of θ2']
    without = RunState(TrainState('θ', None), 'α', switch_step=1)
    without.trained()
    assert without.reference is None


def test_a_critic_begins_as_the_decoder_of_the_models_files_and_comes_back_as_it_was_saved(policy, tmp_path):
    learner = make_learner(policy, BARE, advantage='gae')
    state = learner.init(times(policy.params, 2))  # the policy may be elsewhere
    decoder = {name: part for name, part in state.critic.params.items() if name != 'value'}
    same(decoder, {name: policy.params[name] for name in decoder})
    assert decoder.keys() == policy.params.keys() and not np.asarray(state.critic.params['value']['kernel']).any()
    moved = state._replace(critic=state.critic._replace(trained=times(state.critic.trained, 3)))
    checkpoints = Checkpoints(tmp_path / 'checkpoints', keep=2)
    checkpoints.save(RunState(moved, times(policy.params, 0.9), step=1), REPLAY)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path / 'checkpoints', keep=2)
    back, *_ = checkpoints.restore(1, learner.shapes())
    same(back.theta, moved)
    checkpoints.close()


def test_the_counters_are_of_responses_and_count_each_group_once():
    fresh, again = [make_group(i, 4, G=4) for i in range(3)], [make_group(10 + i, 2, G=4) for i in range(2)]
    replayed = [make_group(20, 3, G=4), make_group(21, 3, G=4)]
    state = RunState(None, None, alpha_version=2)
    state.trained()
    state.count(fresh, again, make_batch([fresh[0], again[0], *replayed], ['x1', 'x2', 'x3', 'replay']))
    assert state.totals == {'responses': 20, 'discarded': 8, 'reevaluated': 8, 'reused': 8}
    mixed = led_by(taken(replayed[0], [0]), fresh[0])  # an earlier response, and three fresh ones
    mixing = RunState(None, None)
    mixing.count(fresh, [], make_batch([mixed, fresh[1]], ['replay', 'x1']))
    assert mixing.totals == {'responses': 12, 'discarded': 5, 'reevaluated': 0, 'reused': 1}
    with_trace = RunState(None, None)  # in the place of a fresh response, and alone
    written = graded(fresh[0].prompt, [trace(np.arange(3, dtype=np.int32))], right(1, 1))
    mixed = joined(written, taken(fresh[0], range(1, 4)))
    with_trace.count(fresh, [], make_batch([mixed, fresh[1], written], ['x1', 'x1', 'demonstrations']))
    assert with_trace.totals == {'responses': 12, 'discarded': 5, 'reevaluated': 0, 'reused': 0}
    state.trained()
    state.trained()
    state.trained()
    state.count(fresh, [], make_batch(fresh, ['x1'] * 3))
    assert state.metrics() == {
        'bapo/lag': 1, 'rollout/responses_total': 32, 'rollout/discarded_total': 8, 'rollout/reevaluated_total': 8,
        'rollout/reused_total': 8,
    }  # fmt: skip


# ---- what is saved


def test_writing_a_policy_holds_copies_of_a_gigabyte_or_of_its_largest_array(tmp_path):
    """Orbax refuses an array that is not smaller than what may be copied, so the limit of 1 GB is in force where it refuses this."""
    large = {'w': jnp.zeros(10**9 // 4)}
    assert copied_gb(large) == 2 and copied_gb({'w': jax.ShapeDtypeStruct((10**9 // 4 - 1,), jnp.float32)}) == 1
    checkpoints = Checkpoints(tmp_path / 'checkpoints', keep=1, copied_gb=1)
    checkpoints.save(RunState(TrainState(large, ()), None), REPLAY)
    with pytest.raises(NotSaved, match='1000000000 > 1000000000'):
        checkpoints.close()


def test_what_comes_back_is_what_was_saved_bit_for_bit(saved, policy):
    directory, state = saved
    checkpoints = Checkpoints(directory, keep=2)
    assert checkpoints.latest_step() == 7
    back, replay, selector = checkpoints.restore(7, make_learner(policy, BARE).shapes())
    same(back.theta, state.theta)
    same(back.alpha, state.alpha)
    assert (back.step, back.alpha_version, back.totals, selector) == (7, 5, state.totals, '{"position": 9}')
    assert (back.synced_after, back.skipped_in_a_row, back.unwritten, back.initial) == (6, 2, state.unwritten, state.initial)
    assert_same_arrays(replay, REPLAY)
    checkpoints.close()


def test_theta_alone_comes_back_for_evaluation_and_export(saved, policy):
    directory, state = saved
    checkpoints = Checkpoints(directory, keep=2)
    params, step = checkpoints.restore_params(make_learner(policy, BARE).parameters)
    assert step == 7
    same(params, state.theta.params)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(*map(jax.tree.leaves, (params, state.alpha)), strict=True))
    checkpoints.close()


def test_a_checkpoint_of_another_model_is_refused_naming_the_tensor(saved, make_policy):
    checkpoints = Checkpoints(saved[0], keep=2)
    with pytest.raises(ValueError, match=r'is of another model: embedding\.embedding has shape \(96, 32\) there and \(112, 32\)'):
        checkpoints.restore_params(make_learner(make_policy(vocab_size=112), BARE).parameters)
    checkpoints.close()


def test_a_checkpoint_holds_the_moment_of_the_save_though_training_goes_on_while_it_is_written(tmp_path, policy):
    """The next updates reuse θ's buffers, and the buffer's arrays change in place."""
    a_learner = make_learner(policy, BARE)
    state = RunState(a_learner.init(copy_params(policy.params)), alpha=copy_params(policy.params), step=1)
    replay, overwrite = {'bad/ids': np.arange(1000)}, jax.jit(lambda x: jax.tree.map(lambda y: y * 0 - 7, x), donate_argnums=0)
    checkpoints = Checkpoints(tmp_path / 'checkpoints', keep=2)
    assert checkpoints.save(state, replay, '') > replay['bad/ids'].nbytes
    replay['bad/ids'][:] = -1
    theta = state.theta.params
    for _ in range(20):
        theta = overwrite(theta)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path / 'checkpoints', keep=2)
    back, of_replay, _ = checkpoints.restore(1, a_learner.shapes())
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, back.theta.params, policy.params)
    np.testing.assert_array_equal(of_replay['bad/ids'], np.arange(1000))


def test_where_there_is_no_checkpoint_none_is_found(tmp_path, policy):
    checkpoints = Checkpoints(tmp_path / 'checkpoints', keep=1)
    assert checkpoints.latest_step() is None
    with pytest.raises(FileNotFoundError, match='holds no complete checkpoint'):
        checkpoints.restore_params(make_learner(policy, BARE).parameters)
    checkpoints.close()


def test_a_step_is_saved_once_and_as_many_are_kept_as_asked(trained, policy, tmp_path):
    checkpoints, state = Checkpoints(tmp_path / 'checkpoints', keep=2), RunState(trained, trained.params)
    for step in (1, 2, 3):
        state.step = step
        checkpoints.save(state, REPLAY, '')
    with pytest.raises(RuntimeError, match='no checkpoint was written at step 3'):
        checkpoints.save(state, REPLAY, '')
    checkpoints.close()
    assert sorted(p.name for p in (tmp_path / 'checkpoints').iterdir() if p.name.isdigit()) == ['2', '3']


def test_a_checkpoint_that_cannot_be_written_says_why(trained, tmp_path, monkeypatch):
    """What Orbax raised on a full disk, measured 2026-11-23."""
    checkpoints = Checkpoints(tmp_path / 'checkpoints', keep=2)

    def full(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device [os_error_code='28']")

    monkeypatch.setattr(checkpoints._manager, 'save', full)
    with pytest.raises(NotSaved, match=r'could not be written to .*/checkpoints; .*: RESOURCE_EXHAUSTED: .* No space left on device'):
        checkpoints.save(RunState(trained, trained.params, step=1), REPLAY, '')
    checkpoints.close()


def test_a_directory_that_was_renamed_is_not_made_anew(trained, tmp_path):
    checkpoints = Checkpoints(tmp_path / 'run' / 'checkpoints', keep=2)
    (tmp_path / 'run').rename(tmp_path / 'elsewhere')
    with pytest.raises(NotSaved, match='run/checkpoints was removed or renamed, so no checkpoint can be written; put it back'):
        checkpoints.save(RunState(trained, trained.params, step=1), REPLAY, '')
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == ['elsewhere']


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # Orbax leaves futures behind
@pytest.mark.parametrize('part', ['policy', 'replay'])
def test_a_checkpoint_that_lacks_files_is_damaged_and_says_what_to_do(part, saved, policy, tmp_path):
    directory = shutil.copytree(saved[0], tmp_path / 'checkpoints')
    for file in (directory / '7' / part).rglob('*'):
        if file.is_file() and not file.name.startswith('_'):
            file.unlink()
    checkpoints = Checkpoints(directory, keep=2)
    with pytest.raises(DamagedCheckpoint, match=r'checkpoints/7 cannot be read .*move that directory away'):
        checkpoints.restore(7, make_learner(policy, BARE).shapes())
    checkpoints.close()


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_a_flipped_bit_is_found_wherever_it_is(saved, policy, tmp_path):
    """One bit of one file: the checkpoint is refused, or what comes back is what was saved. Most files are the arrays'."""
    directory, state = saved
    like, rng, refused = make_learner(policy, BARE).shapes(), np.random.default_rng(0), set()
    for i in range(24):
        copy = shutil.copytree(directory, tmp_path / f'copy{i}' / 'checkpoints')
        part = ('policy', 'replay', 'host')[i % 3]
        files = sorted(f for f in (copy / '7' / part).rglob('*') if f.is_file() and f.stat().st_size)
        sizes = np.array([f.stat().st_size for f in files])
        file = files[rng.choice(len(files), p=sizes / sizes.sum())]
        data = bytearray(file.read_bytes())
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        file.write_bytes(data)
        checkpoints = Checkpoints(copy, keep=2)
        try:
            back, replay, selector = checkpoints.restore(7, like)
        except DamagedCheckpoint:
            refused.add(part)
        else:
            same((back.theta, back.alpha), (state.theta, state.alpha))
            assert_same_arrays(replay, REPLAY)
            assert (back.step, back.alpha_version, back.totals, selector) == (7, 5, state.totals, '{"position": 9}')
        checkpoints.close()
    assert refused == {'policy', 'replay', 'host'}


def test_a_bit_that_storage_does_not_notice_is_found(saved, policy, monkeypatch):
    read = Checkpoints._read

    def flipped(self, step, items):
        part = read(self, step, items)
        if 'policy' in part.keys():
            kernel = part.policy['params']['layers']['q']['kernel']
            part.policy['params']['layers']['q']['kernel'] = kernel.at[0, 0, 0].set(-kernel[0, 0, 0])  # the sign bit
        return part

    monkeypatch.setattr(Checkpoints, '_read', flipped)
    learner = make_learner(policy, BARE)
    for restore in (lambda c: c.restore(7, learner.shapes()), lambda c: c.restore_params(learner.parameters)):
        checkpoints = Checkpoints(saved[0], keep=2)
        with pytest.raises(DamagedCheckpoint, match=r'policy\.params\.layers\.q\.kernel is not what was saved'):
            restore(checkpoints)
        checkpoints.close()


def test_the_checksum_is_its_equation():
    """That it is the same on any mesh, tests/cluster/test_mesh.py says."""
    x = np.random.default_rng(0).standard_normal((4, 6, 8)).astype(np.float32)
    words, i = x.view(np.uint32).ravel().astype(object), np.arange(x.size).astype(object)
    assert checksums({'a': jnp.array(x)}) == {'a': int((words * (2 * i + 1)).sum() % 2**32)}
    half = jnp.asarray(x, jnp.bfloat16)
    assert checksums([half, -half, half[::-1]]).keys() == {'0', '1', '2'}
    assert len(set(checksums([half, -half, half[::-1]]).values())) == 3


# ---- where a run begins


def test_a_new_run_begins_at_theta_0_with_an_alpha_of_its_own(policy, config, tmp_path):
    state, of_host, checkpoints = open_run(make_learner(policy, BARE), config, tmp_path / 'checkpoints')
    assert of_host is None and (state.step, state.alpha_version, state.reference) == (0, 0, None)
    same(state.theta.params, policy.params)
    assert state.initial == checksum_of_text(checksums(state.theta.params))  # which every later start computes again
    for x in jax.tree.leaves(state.theta.params):
        x.delete()
    same(state.alpha, policy.params)
    checkpoints.close()


def test_a_used_directory_goes_on_at_its_newest_checkpoint(saved, policy, config):
    directory, want = saved
    state, (replay, selector), checkpoints = open_run(make_learner(policy, BARE), config, directory)
    assert (state.step, state.alpha_version, state.totals, selector) == (7, 5, want.totals, '{"position": 9}')
    same(state.theta, want.theta)
    same(state.alpha, want.alpha)
    assert_same_arrays(replay, REPLAY)
    checkpoints.close()


@pytest.fixture
def two(trained, policy, tmp_path):
    """A directory with checkpoints of steps 4 and 7, the newer one damaged."""
    checkpoints, state = Checkpoints(tmp_path / 'checkpoints', keep=2), RunState(trained, trained.params)
    for state.step in (4, 7):
        checkpoints.save(state, REPLAY, f'after {state.step}')
    checkpoints.close()
    break_host_part(tmp_path / 'checkpoints' / '7')
    return tmp_path / 'checkpoints'


def break_host_part(checkpoint):
    [file] = [f for f in (checkpoint / 'host').rglob('*') if f.is_file() and b'selector' in f.read_bytes()]
    file.write_bytes(file.read_bytes().replace(b'after', b'befor'))


def test_a_damaged_newest_checkpoint_is_put_aside_and_the_run_goes_on_before_it(two, policy, config, caplog):
    state, (_, selector), checkpoints = open_run(make_learner(policy, BARE), config, two)
    assert (state.step, selector, checkpoints.latest_step()) == (4, 'after 4', 4)
    [report] = [r.row for r in caplog.records if r.name == 'bapo_jax.machine.events']
    assert (report['event'], report['step']) == ('checkpoint damaged', 7)
    assert 'checkpoints/7 cannot be read (its host part is not what was saved' in report['message']
    assert 'damaged-7; continuing after step 4' in report['message']
    state.step = 7
    checkpoints.save(state, REPLAY, 'once more')
    checkpoints.close()
    assert (two / 'damaged-7' / 'host').is_dir() and (two / '7').is_dir()


def test_where_no_checkpoint_is_whole_the_run_ends_and_nothing_moves(two, policy, config):
    break_host_part(two / '4')
    with pytest.raises(DamagedCheckpoint, match='checkpoints/7 cannot be read'):
        open_run(make_learner(policy, BARE), config, two)
    assert sorted(p.name for p in two.iterdir() if p.is_dir()) == ['4', '7']


def test_the_reference_is_theta_0_of_the_models_files_also_in_a_run_that_goes_on(saved, policy, config, tmp_path):
    learner = make_learner(policy, BARE, kl_target='reference', kl_coef=0.1)
    for directory in (saved[0], tmp_path / 'checkpoints'):
        state, _, checkpoints = open_run(learner, config, directory)
        same(state.reference, policy.params)
        assert state.policies()['reference'] is state.reference
        checkpoints.close()


def test_a_reference_of_other_weights_is_refused(saved, policy, config, monkeypatch):
    """One bit of the files that the run began with."""
    read = Learner.read_initial

    def flipped(self):
        params = read(self)
        params['norm']['scale'] = params['norm']['scale'].at[0].multiply(-1)
        return params

    monkeypatch.setattr(Learner, 'read_initial', flipped)
    with pytest.raises(OtherWeights, match='holds other weights than at the start of the run'):
        open_run(make_learner(policy, BARE, kl_target='reference', kl_coef=0.1), config, saved[0])
    open_run(make_learner(policy, BARE), config, saved[0])  # a run that does not read them
