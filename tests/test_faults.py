"""A sample of the fault harness: twenty kinds once, each at a moment of its own. The whole: `make faults`."""

import pytest
from tests.faults.cases import case_of, outcome_of, sound_run
from tests.faults.kinds import KINDS

# Processes take ten seconds to start, and these differ in little from others.
LEFT_OUT = (
    'killed,', 'killed in', 'killed at', 'frozen', 'a second', 'SIGTERM in overlapping', 'SIGTERM in a save', 'disk read-only',
    'the clock jumps ahead',
)  # fmt: skip
SAMPLE = [name for name in KINDS if not name.startswith(LEFT_OUT)]
SEED = 1  # at its moments, state that is kept too early shows
pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def sound(tmp_path_factory, benchmark):
    return sound_run(tmp_path_factory.mktemp('faults'), benchmark)


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # Orbax leaves futures behind
@pytest.mark.parametrize('name', SAMPLE)
def test_a_run_that_is_struck_goes_on_and_nothing_shows(name, sound):
    case = case_of(sound, SEED, list(KINDS).index(name))
    KINDS[name](case)
    outcome = outcome_of(case)
    assert outcome.survived and outcome.lost == 0, outcome.why
