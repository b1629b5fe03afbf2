"""A sample of the faults of real vLLM servers. The whole: `python -m tests.faults servers`."""

import pytest
from tests.faults.servers import SERVER_KINDS, struck
from tests.faults.served import served_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def sound(tmp_path_factory, benchmark, server):
    return served_run(tmp_path_factory.mktemp('served'), benchmark, server.url)


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # Orbax leaves futures behind
@pytest.mark.parametrize('name', ['the server killed while it answers', 'three damaged replies to a group'])
def test_a_run_whose_server_is_struck_loses_nothing_but_what_it_says(name, sound, two_servers):
    outcome = struck(sound, tuple(two_servers), name, 0, list(SERVER_KINDS).index(name))
    assert outcome.survived and outcome.lost == 0, outcome.why
