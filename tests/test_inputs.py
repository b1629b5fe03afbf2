"""What a config names: read without weights and devices, and refused with field or file."""

import json

import pytest
from small_run import small_config

from bapo_jax.inputs import benchmark_prompts, read_inputs
from bapo_jax.models import hf
from bapo_jax.tasks import geometry


@pytest.fixture(autouse=True)
def no_weights_are_read(monkeypatch):
    monkeypatch.setattr(hf, 'load_params', lambda *_: pytest.fail('weights were read'))


def test_a_model_may_be_taken_for_more_positions_than_it_was_made_for(benchmark):
    longer = {'rollout__max_response_tokens': 5000, 'learner__slot_tokens': 0, 'learner__row_tokens': 0}
    stated = {'model__max_positions': 8192, 'model__rope_theta': 40_000.0, **longer}
    model = read_inputs(small_config('bapo_tuned', benchmark, **stated)).model
    assert (model.max_positions, model.rope_theta) == (8192, 40_000.0)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'model__path': 'nowhere'}, r'model\.path=.nowhere. is not a directory'),
        ({'task__train': 'missing.parquet'}, r'missing\.parquet'),
        ({'task__limit': 7}, r'7 training prompts do not fill learner\.batch_groups=8'),
        ({'rollout__max_prompt_tokens': 5}, r'rollout\.max_prompt_tokens'),
        ({'evaluate__benchmarks': ('cd5',)}, r'cd5'),
        ({'rollout__max_response_tokens': 5000, 'learner__slot_tokens': 0, 'learner__row_tokens': 0},
         r'rollout\.max_prompt_tokens=16 \+ rollout\.max_response_tokens=5000 = 5016 tokens; '
         r'max_position_embeddings of .*config\.json is 4096\. .*model\.max_positions=16384'),
        ({'evaluate__max_response_tokens': 4081}, r'evaluate\.max_response_tokens=4081 = 4097 tokens'),
        ({'evaluate__track_prompts': 61}, r'evaluate\.track_prompts=61 exceeds the 60 training prompts'),
    ],
)
def test_bad_input_is_refused(benchmark, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_inputs(small_config('bapo_tuned', benchmark, **changes))


def test_steps_are_those_of_the_config_or_whole_batches_of_its_epochs(benchmark):
    assert read_inputs(small_config('bapo_tuned', benchmark)).steps == 6
    assert read_inputs(small_config('bapo_tuned', benchmark, steps=0, epochs=3)).steps == 3 * (60 // 8)


def test_training_prompts_count_from_0_and_no_benchmark_shares_their_ids(benchmark, tmp_path):
    (tmp_path / 'other.jsonl').write_bytes(benchmark.read_bytes())
    names = (str(benchmark), str(tmp_path / 'other.jsonl'))
    read = read_inputs(small_config('bapo_tuned', benchmark, evaluate__benchmarks=names))
    assert [p.id for p in read.prompts] == list(range(60))
    assert {name: [p.id for p in prompts] for name, prompts in read.benchmarks.items()} == {
        name: [(1 + i << 24) + j for j in range(4)] for i, name in enumerate(names)
    }


def test_weights_are_checked_unless_they_are_not_wanted(benchmark, monkeypatch):
    checked = []
    monkeypatch.setattr(hf, 'check_weights', lambda path, model: checked.append(path))
    config = small_config('bapo_tuned', benchmark)
    read_inputs(config, weights=False)
    assert checked == []
    read_inputs(config)
    assert checked == [config.model.path]


def test_a_small_config_is_read_whole(benchmark):
    read = read_inputs(small_config('bapo_tuned', benchmark))
    assert read.config.replay.bad_capacity == 8  # resolved
    assert len(read.prompts) == 60 and [p.id for p in read.prompts] == list(range(60))
    assert list(read.benchmarks) == [str(benchmark)] and len(read.benchmarks[str(benchmark)]) == 4
    assert read.model.num_layers == 4 and read.steps == 6
    assert [p.id for p in read.selector.next()] != [p.id for p in read.selector.next()]
    assert all(isinstance(end, int) for end in read.stop_tokens) and read.stop_tokens


def test_no_steps_means_whole_epochs_of_full_batches(benchmark):
    config = small_config('bapo_tuned', benchmark, steps=0, epochs=2)
    assert read_inputs(config).steps == 2 * (60 // 8)


def test_no_two_questions_share_an_id_and_so_random_keys(benchmark, tmp_path):
    other = tmp_path / 'other.jsonl'
    other.write_text(json.dumps({'nums': [3, 5, 2], 'target': 30}) + '\n')
    config = small_config('bapo_tuned', benchmark, evaluate__benchmarks=(str(benchmark), str(other)))
    read = read_inputs(config)
    ids = [p.id for prompts in (read.prompts, *read.benchmarks.values()) for p in prompts]
    assert len(set(ids)) == len(ids) == 60 + 4 + 1
    # A benchmark's ids are by its place, so its samples do not depend on the training prompts.
    for name, again in benchmark_prompts(read.config, read.tokenizer).items():
        assert [p.id for p in again] == [p.id for p in read.benchmarks[name]]


def test_weights_are_not_needed_where_none_are_asked_for(benchmark, tmp_path):
    base = tmp_path / 'base'
    base.mkdir()
    config = small_config('bapo_tuned', benchmark)
    for name in ('config.json', 'tokenizer.json', 'tokenizer_config.json'):
        (base / name).write_bytes((type(tmp_path)(config.model.path) / name).read_bytes())
    config.model.path = str(base)
    assert read_inputs(config, weights=False).model.num_layers == 4
    with pytest.raises((ValueError, FileNotFoundError), match='safetensors'):
        read_inputs(config)


def test_more_tracked_prompts_than_there_are_is_refused(benchmark):
    with pytest.raises(ValueError, match=r'evaluate\.track_prompts=61 exceeds the 60 training prompts'):
        read_inputs(small_config('bapo_tuned', benchmark, evaluate__track_prompts=61))
