"""A sample of the fault harness: one run that is struck again and again, by faults of three sorts. The whole: `make faults`."""

import pytest
from tests.faults.__main__ import caption
from tests.faults.cases import case_of, outcome_of, sound_run
from tests.faults.kinds import KINDS

SAMPLE = (
    'disk failing as a checkpoint begins', 'killed in a save', 'SIGTERM in generation', 'Ctrl-C of `train … \\| tee log`',
    'half a row of metrics', 'a bit flipped in the policy',
)  # fmt: skip
SEED = 6  # of an early step: each strike takes the run on
pytestmark = pytest.mark.slow


def test_a_table_has_the_command_that_made_it():
    assert caption('hosts', 0, 1).startswith('(`python -m tests.faults hosts --seed=0 --times=1`, 20')
    assert caption('kinds', 3, None).startswith('(`python -m tests.faults kinds --seed=3`, 20')


def test_a_run_that_is_struck_again_and_again_goes_on_and_nothing_shows(tmp_path, benchmark):
    case = case_of(sound_run(tmp_path, benchmark), SEED, 0)
    for name in SAMPLE:
        KINDS[name](case)
        case = case._replace(step=case.saved())
    outcome = outcome_of(case)
    assert outcome.survived and outcome.lost == 0, outcome.why
