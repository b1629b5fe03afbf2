"""A sample of the fuzzing: the corpus and some inputs of every target. The whole: `make fuzz`."""

import time

import pytest
from tests.fuzz import feed
from tests.fuzz.feed import ACCEPTED, CRASH, fed, parsing
from tests.fuzz.targets import TARGETS

IN_PROCESSES = ['mathematics']
SAMPLE = {'replies': 3000, 'manifests': 100, 'checkpoints': 40, 'lock_file': 100}
# Of the others some must be accepted and some refused: else what is fed is no test of the parser.
ALWAYS_ACCEPTED = ['answer_text', 'lock_file']


def crashes(tally):
    return [(outcome.why, said) for said, outcome in tally.crashes]


@pytest.mark.parametrize('name', [name for name in TARGETS if name not in IN_PROCESSES])
def test_what_is_parsed_is_accepted_or_refused_by_name(name, tmp_path):
    with TARGETS[name][0](tmp_path) as target:
        tally = fed(name, target, SAMPLE.get(name, 300))
    assert crashes(tally) == []
    assert tally.kinds[ACCEPTED] and (len(tally.kinds) > 1 or name in ALWAYS_ACCEPTED)


@pytest.mark.slow
def test_whatever_a_model_writes_has_a_verdict(tmp_path):
    with TARGETS['mathematics'][0](tmp_path) as target:
        tally = fed('mathematics', target, 40)
    assert crashes(tally) == [] and tally.kinds[ACCEPTED]


@pytest.mark.parametrize(
    'parse, why',
    [
        (lambda said: {}[said], "KeyError: '3'"),
        (lambda said: int('x'), 'ValueError: "invalid literal'),  # of the right type, and names nothing
        (lambda said: [].remove(said), "ValueError: 'list.remove"),
        (lambda said: time.sleep(60), r'no end after 0\.1 s'),
        (lambda said: any(i < 0 for i in iter(int, 1)), r'no end after 0\.1 s'),
    ],
    ids=['another error', 'a raw error', 'another raw one', 'a wait', 'a loop'],
)
def test_a_crash_and_a_hang_are_found(parse, why):
    def sound_but_for_3(said):
        if said == 3:
            parse(said)
        if said == 4:
            raise ValueError('row 4: is refused')

    tally = fed('planted', parsing(lambda rng: rng.randrange(5), sound_but_for_3, 0.1, ValueError, naming=r'^row \d'), 50)
    assert tally.kinds.keys() == {ACCEPTED, 'ValueError', CRASH}
    assert all(said == 3 and outcome.why.startswith(why.replace('\\', '')) for said, outcome in tally.crashes)


def test_a_swallowed_deadline_is_still_over():
    def handles_everything(said):
        try:
            time.sleep(60)
        except BaseException:
            pass

    [(_, outcome)] = fed('planted', parsing(lambda rng: 0, handles_everything, 0.1), 1).crashes
    assert outcome.why.startswith('took 0.1 s')


def test_an_input_is_the_same_whenever_it_is_made():
    told = []
    target = parsing(lambda rng: rng.random(), told.append, 1.0)
    fed('planted', target, 3, seed=5)
    fed('planted', target, 4, seed=5)
    assert told[:3] == told[3:6] and len(set(told)) == 4


def test_the_corpus_is_fed_first(tmp_path, monkeypatch):
    monkeypatch.setattr(feed, 'CORPUS', tmp_path)
    (tmp_path / 'planted.jsonl').write_text('"found once"\n')
    told = []
    fed('planted', parsing(lambda rng: 'made', told.append, 1.0), 1)
    assert told == ['found once', 'made']


def test_every_file_of_the_corpus_is_a_targets():
    assert {file.stem for file in feed.CORPUS.glob('*.jsonl')} <= TARGETS.keys()
    assert sum(share for _, share in TARGETS.values()) == 1_000_000
