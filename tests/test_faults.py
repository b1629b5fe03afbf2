"""A sample of the fault harness: each kind once, at a moment of its own. The whole: `make faults`."""

import pytest
from tests.faults.cases import case_of, outcome_of, sound_run
from tests.faults.kinds import KINDS

# Of the kinds with a process of their own, which takes ten seconds to start, one; the others differ from it in their moment.
SAMPLE = [name for name in KINDS if not name.startswith(('killed', 'frozen', 'a second'))] + ['killed (kill -9) at any moment']
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('compile_once')]


@pytest.fixture(scope='module')
def sound(tmp_path_factory, benchmark):
    return sound_run(tmp_path_factory.mktemp('faults'), benchmark)


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # Orbax leaves futures behind
@pytest.mark.parametrize('name', SAMPLE)
def test_a_run_that_is_struck_goes_on_and_nothing_shows(name, sound):
    case = case_of(sound, 0, list(KINDS).index(name))
    KINDS[name](case)
    outcome = outcome_of(case)
    assert outcome.survived and outcome.lost == 0, outcome.why
