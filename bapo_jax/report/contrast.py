"""Compares runs in arms over seeds: t-intervals, paired differences from the first arm, a sentence on each.

An arm is one config; its runs differ only in the seed. Scores, differences and their intervals are in
percentage points. Intervals cover other seeds on the same test questions. Every function is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

from bapo_jax.report.panels import Table
from bapo_jax.report.records import Records, benchmarks, samples_of
from bapo_jax.run.directory import FREE_TO_CHANGE, differences

ALPHA = 0.05  # two-sided level of significance, after Holm's correction
# Fields that a continued run may change but that tell arms apart: how long it trains, how it is scored, and
# its base, whose weights have no fingerprint.
_OF_AN_ARM = ('steps', 'epochs', 'evaluate.', 'model.path')
# What a run may have of its own within an arm: its seed, its starts, and what else it may change.
_OF_ONE_RUN = ('seed', 'starts', *(name for name in FREE_TO_CHANGE if not name.startswith(_OF_AN_ARM)))
_MOST_FIELDS = 3  # an arm that differs in more fields is named by its first run
_COUNTS = 'no one two three four five six seven eight nine ten'.split()


class Contrast(NamedTuple):
    """The comparison of several arms, ready to be printed."""

    table: Table  # a row per arm: its seeds, and each score at the end with the t-interval over seeds
    differences: Table  # a row per score and later arm: the paired difference from the first arm
    verdict: tuple[str, ...]  # a sentence for each of these rows; one alone if no arm has two seeds


class _Difference(NamedTuple):
    arm: str
    base: str
    measure: str
    values: np.ndarray  # by seed, float [seeds in both arms]
    p: float | None = None  # two-sided, Holm-corrected over the arms; None if there is no interval
    tests: int = 1  # arms that p is corrected over

    @property
    def has_interval(self) -> bool:
        """Whether the values vary. Equal ones, by chance, would give an interval without width."""
        return len(self.values) > 1 and (np.ptp(self.values) > 1e-9 or abs(self.values[0]) < 1e-9)


def contrast(groups: Mapping[str, Sequence[Records]]) -> Contrast:
    """Compares every arm with the first one; `groups` has the runs of each arm by its name.

    Runs of equal planned length are compared at the last step that all of them have evaluated. Differences
    are paired by the config's seed; the p-values of a score are Holm-corrected over the arms.
    """
    runs = [r for some in groups.values() for r in some]
    names = benchmarks(runs)
    ends = {benchmark: _ends(runs, benchmark) for benchmark in names}
    scores, found = {}, []
    for benchmark in names:
        for kind, field in (('mean', 'mean'), ('pass', 'passed')):
            of_one = f'{benchmark} ' if len(names) > 1 else ''
            measure = f'{of_one}{kind}@{samples_of(runs, benchmark)}'
            scores[measure] = {
                arm: _of_seeds(some, benchmark, field, ends[benchmark]) for arm, some in groups.items()
            }
            found += _against_first(measure, scores[measure])
    rows = []
    for arm, some in groups.items():
        steps = {ends[b][_length(r)] for r in some for b in names if _length(r) in ends[b]}
        cells = (mean_interval(list(of[arm].values())) if of[arm] else '–' for of in scores.values())
        rows.append((arm, str(len(some)), ' and '.join(map(str, sorted(steps))) or '–', *cells))
    table = Table(('', 'seeds', 'step', *scores), tuple(rows))
    head = ('score', 'difference', 'seeds', 'points', '95 % interval', "p (Holm's)")
    verdict = tuple(map(_sentence, found))
    if found and all(len(d.values) == 1 for d in found):
        verdict = ('With one seed, no interval can be computed; train more seeds.',)
    elif found and max(len(d.values) for d in found) == 2:
        verdict = (*verdict, 'With two seeds, an interval spans 25 standard errors; train more seeds.')
    return Contrast(table, Table(head, tuple(map(_row, found))), verdict)


def by_seed(runs: Sequence[Records]) -> dict[str, list[Records]]:
    """Groups runs whose settings differ only in the seed; a run without a config is its own group.

    Of the settings that a continued run may change, only its length, its evaluation and its base count; all
    count if runs of one group would otherwise have the same seed.

    A group is named by its method, if not all have the same one, with the fields in which the groups of that
    method differ: 'grpo learning_rate=5e-5'. With many such fields, or without a method, it has the name of
    its first run.
    """
    but: Sequence[str] = _OF_ONE_RUN
    groups = _grouped(runs, but)
    if any(len({r.config.get('seed') for r in of}) < len(of) for of in groups):
        groups = _grouped(runs, but := ('seed', 'starts'))
    firsts = [of[0] for of in groups]
    names = [_name(r, firsts, but) for r in firsts]
    return {
        name if names.count(name) == 1 else of[0].name: of for name, of in zip(names, groups, strict=True)
    }


def _grouped(runs: Sequence[Records], but: Sequence[str]) -> list[list[Records]]:
    groups: list[list[Records]] = []
    for r in runs:
        same = (
            of for of in groups if r.config and of[0].config and not differences(of[0].config, r.config, but)
        )
        if (of := next(same, None)) is not None:
            of.append(r)
        else:
            groups.append([r])
    return groups


def _name(r: Records, firsts: Sequence[Records], but: Sequence[str]) -> str:
    method = r.config.get('method')
    alike = [other for other in firsts if other.config.get('method') == method]
    but = (*but, 'fingerprints')  # they follow from the settings, and nobody reads them
    fields = sorted({field for other in alike for field in differences(r.config, other.config, but)})
    if not method or len(fields) > _MOST_FIELDS:
        return r.name
    values = [f'{f.rpartition(".")[2]}={_value(r.config, f)}' for f in fields]
    return ' '.join(values if values and len(alike) == len(firsts) else [method, *values])


def _value(config: Any, field: str) -> str:
    """A field's value in short: 0.0001 is '1e-4'. '–' if the config lacks it."""
    for part in field.split('.'):
        config = config.get(part, '–') if isinstance(config, dict) else '–'
    if isinstance(config, float):
        small = 0 < abs(config) < 1e-3
        return np.format_float_scientific(config, trim='-', exp_digits=1) if small else f'{config:g}'
    return str(config)


def _length(r: Records) -> tuple[Any, Any]:
    """The planned length of a run: (steps, epochs) of its config."""
    return r.config.get('steps'), r.config.get('epochs')


def _ends(runs: Sequence[Records], benchmark: str) -> dict[tuple[Any, Any], int]:
    """The last step after training that all runs of a planned length have evaluated, by that length."""
    common: dict[tuple[Any, Any], set[int]] = {}
    for r in runs:
        if benchmark in r.scores:
            s = r.scores[benchmark]
            steps = set(s.steps[(s.steps > 0) & np.isfinite(s.mean)].tolist())
            common[_length(r)] = common.get(_length(r), steps) & steps
    return {length: max(steps) for length, steps in common.items() if steps}


def _of_seeds(
    runs: Sequence[Records], benchmark: str, field: str, ends: Mapping[tuple[Any, Any], int]
) -> dict[Any, float]:
    """An arm's score in percent by seed; the mean of runs with the same seed."""
    found: dict[Any, list[float]] = {}
    for r in runs:
        if benchmark in r.scores and (end := ends.get(_length(r))) is not None:
            s = r.scores[benchmark]
            there = getattr(s, field)[s.steps == end]
            if np.isfinite(there).all():
                found.setdefault(r.config.get('seed'), []).extend((100 * there).tolist())
    return {seed: float(np.mean(values)) for seed, values in found.items()}


def _against_first(measure: str, scores: Mapping[str, Mapping[Any, float]]) -> list[_Difference]:
    """The differences of a score from the first arm, with p corrected over those that have an interval."""
    base, *others = scores
    found = [
        _Difference(
            arm, base, measure,
            np.array([x - scores[base][seed] for seed, x in scores[arm].items() if seed in scores[base]]),
        )
        for arm in others
    ]  # fmt: skip
    tested = [d for d in found if d.has_interval]
    ps = iter(holm([p_of_mean(d.values) for d in tested]))
    return [d._replace(p=next(ps), tests=len(tested)) if d.has_interval else d for d in found]


def _row(d: _Difference) -> tuple[str, ...]:
    mean = _signed(d.values.mean()) if len(d.values) else '–'
    interval = '–' if d.p is None else '{} to {}'.format(*map(_minus, t_interval(d.values)))
    p = '–' if d.p is None else _p(d.p).removeprefix('= ')
    return d.measure, f'{d.arm} − {d.base}', str(len(d.values)), mean, interval, p


def _sentence(d: _Difference) -> str:
    seeds = f'{_COUNTS[n] if (n := len(d.values)) < len(_COUNTS) else n} seed{"s" * (n != 1)}'
    if not n:
        return (
            f'{d.arm} and {d.base} have no seed in common with a score for {d.measure}; train and evaluate '
            'both with the same seeds.'
        )
    difference = f'difference {_signed(d.values.mean())} points'
    if d.p is None:
        why = (
            'With one seed'
            if n == 1
            else f'With the same difference in {"both seeds" if n == 2 else f"all {seeds}"}'
        )
        return (
            f'{why}, no interval can be computed for {d.arm} and {d.base} in {d.measure} ({difference}); '
            'train more seeds.'
        )
    low, high = map(_minus, t_interval(d.values))
    corrected = f', p {_p(d.p)} corrected for {d.tests} arms' if d.tests > 1 else ''
    about = f'in {d.measure} with {seeds} ({difference}, 95 % CI {low} to {high}{corrected}).'
    if d.p > ALPHA:
        return f'{d.arm} and {d.base} do not differ significantly {about}'
    return f'{d.arm} is significantly {"higher" if d.values.mean() > 0 else "lower"} than {d.base} {about}'


def mean_interval(values: Sequence[float]) -> str:
    """The mean with its 95 % interval by t, as text: '12.3 (11.0 to 13.6)'; one value alone as '12.3'."""
    if len(values) < 2:
        return _minus(values[0])
    return '{} ({} to {})'.format(*map(_minus, (np.mean(values), *t_interval(values))))


def t_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Student's t-interval of the mean of at least two values."""
    mean, error = _mean_and_error(values)
    half = float(stdtrit(len(values) - 1, (1 + level) / 2)) * error
    return mean - half, mean + half


def p_of_mean(values: Sequence[float]) -> float:
    """The two-sided p-value of a t-test that the mean of at least two values is 0, uncorrected."""
    mean, error = _mean_and_error(values)
    return float(2 * stdtr(len(values) - 1, -abs(mean / error))) if error else float(mean == 0)


def holm(ps: Sequence[float]) -> list[float]:
    """The p-values after Holm's step-down correction, in the order given."""
    corrected, largest = [0.0] * len(ps), 0.0
    for done, i in enumerate(np.argsort(ps, kind='stable')):
        largest = max(largest, min(1.0, (len(ps) - done) * ps[i]))
        corrected[i] = largest
    return corrected


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    v = np.asarray(values, float)
    return float(v.mean()), float(v.std(ddof=1) / np.sqrt(len(v)))


def _minus(x: float) -> str:
    """One decimal, with a minus sign and no negative zero."""
    return f'{round(float(x), 1) + 0.0:.1f}'.replace('-', '−')


def _signed(x: float) -> str:
    return f'{round(float(x), 1) + 0.0:+.1f}'.replace('-', '−')


def _p(p: float) -> str:
    return '< 0.001' if p < 0.001 else f'= {p:.3f}' if p < 0.1 else f'= {p:.2f}'
