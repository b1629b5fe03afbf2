"""Runs on episodes, with the real quickstart policy: Countdown, where the environment asks for a second try."""

import pytest
from small_run import kill_after, metrics, rollouts, run, small_config

from bapo_jax.groups import Author
from bapo_jax.replay.bapo import X2, X3

pytestmark = pytest.mark.slow
TOKENS = 80


def episodes_config(benchmark, **changes):
    """BAPO with X2 and X3, and one step ahead, so that a policy is loaded while episodes are under way."""
    parts = {
        'task__name': 'helpers.second_try', 'task__turns': 1, 'rollout__max_response_tokens': TOKENS, 'learner__slot_tokens': TOKENS,
        'learner__row_tokens': 16 + 2 * TOKENS, 'rollout__sync_every': 1, 'rollout__overlap': True, 'rollout__most_behind': 1,
        'mesh__data': 1, 'evaluate__every': 3, 'replay__reevaluate_every': 2,
    }  # fmt: skip
    return small_config('bapo', benchmark, **parts | changes)


@pytest.fixture(scope='module')
def whole(tmp_path_factory, benchmark):
    workdir = tmp_path_factory.mktemp('runs') / 'episodes'
    run(episodes_config(benchmark), workdir)
    return workdir


def test_groups_of_episodes_are_fresh_reevaluated_and_replayed(whole):
    rows = [row for step in range(1, 7) for row in rollouts(whole, step)]
    spans = [spans for row in rows for spans in row['spans']]
    authors = {tuple(author for author, _, _ in of_response) for of_response in spans}
    assert authors == {('policy',), ('policy', 'environment', 'policy')}
    assert {row['use'] for row in rows} >= {'x1', X2, X3}
    of_both = [s for row in rows if row['use'] in (X2, X3) for s in row['spans'] if len(s) == 3]
    assert of_both and all(s[0][1] == s[2][1] >= 0 > s[1][1] for s in of_both)  # one policy wrote both turns


def test_nobody_trains_on_the_environments_tokens_and_its_words_are_no_answer(whole):
    environment = Author.ENVIRONMENT.name.lower()
    for row in (row for step in range(1, 7) for row in rollouts(whole, step)):
        for i, spans in enumerate(row['spans']):
            at = 0
            for author, _, length in spans:
                part = slice(at, at := at + length)
                assert all((x is None) == (author == environment) for x in row['logp'][i][part])
                if row['ratio']:
                    assert all((x is None) == (author == environment) for x in row['ratio'][i][part])
            if len(spans) == 3 and row['verdicts'][i] == 'correct':  # the last turn's answer counts
                assert row['answers'][i] in ''.join(row['pieces'][i][spans[0][2] + spans[1][2] :])
            assert ' no ' not in (row['answers'][i] or '')


def test_what_a_budget_of_tokens_cuts_goes_on_with_its_turns(tmp_path, benchmark):
    """Partial rollouts: a response may have a reply and tokens of several policies, in any order."""
    run(episodes_config(benchmark, rollout__step_share=0.3, rollout__most_behind=0, evaluate__every=0), tmp_path)
    spans = [spans for step in range(1, 7) for row in rollouts(tmp_path, step) for spans in row['spans']]
    mixed = [s for s in spans if len({v for author, v, _ in s if author == 'policy'}) > 1]
    assert any('environment' in {author for author, _, _ in s} for s in mixed)
    assert all(sum(n for _, _, n in s) <= TOKENS and sum(author == 'environment' for author, _, _ in s) <= 1 for s in spans)


def test_a_killed_run_repeats_every_metric(tmp_path, whole, benchmark):
    kill_after(4, episodes_config, benchmark, tmp_path / 'run')
    run(episodes_config(benchmark), tmp_path / 'run')
    assert metrics(tmp_path / 'run') == metrics(whole)
    assert [rollouts(tmp_path / 'run', step) for step in (5, 6)] == [rollouts(whole, step) for step in (5, 6)]
