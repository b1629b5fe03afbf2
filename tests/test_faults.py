"""A sample of the fault harness: one run that is struck again and again, by faults of three sorts. The whole: `make faults`."""

import pytest
from tests.faults.__main__ import ROWS, caption, table
from tests.faults.cases import Outcome, case_of, outcome_of, sound_run
from tests.faults.kinds import KINDS, MOUNTED
from tests.faults.servers import SERVER_KINDS

SAMPLE = (
    'disk failing as a checkpoint begins', 'killed in a save', 'SIGTERM in generation', 'Ctrl-C of `train … \\| tee log`',
    'half a row of metrics', 'a bit flipped in the policy',
)  # fmt: skip
SEED = 6  # of an early step: each strike takes the run on
pytestmark = pytest.mark.slow


def test_a_table_has_the_command_that_made_it():
    assert caption('hosts', 0, 1).startswith('(`python -m tests.faults hosts --seed=0 --times=1`, 20')
    assert caption('kinds', 3, None).startswith('(`python -m tests.faults kinds --seed=3`, 20')


def test_a_row_of_a_table_sums_up_its_kinds():
    outcomes = {
        'killed in a save': [Outcome(True, 0, 2.0)], 'killed in an update': [Outcome(False, 1, 3.0)],
        'a second trainer': [Outcome(True, 0, 1.0, '', 0.5)],
    }  # fmt: skip
    [of_kills] = [row for row, begins in ROWS.items() if 'killed' in begins]
    assert table(outcomes).splitlines()[2:] == [f'| {of_kills} | 1/2 |  | 3.0 |', '| a second trainer | 1/1 | 0.5 | 1.0 |']
    names = [*KINDS, *MOUNTED, *SERVER_KINDS]
    assert not [begin for begins in ROWS.values() for begin in begins if not any(name.startswith(begin) for name in names)]


def test_a_run_that_is_struck_again_and_again_goes_on_and_nothing_shows(tmp_path, benchmark):
    case = case_of(sound_run(tmp_path, benchmark), SEED, 0)
    for name in SAMPLE:
        KINDS[name](case)
        case = case._replace(step=case.saved())
    outcome = outcome_of(case)
    assert outcome.survived and outcome.lost == 0, outcome.why
