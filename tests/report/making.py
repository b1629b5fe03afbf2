"""Small run directories, written by hand."""

import json
from pathlib import Path


def row(step, **more):
    """A step's row with the metrics that most figures need; nothing in it warns."""
    return {
        'step': step, 'critic/score/mean': 0.1 + step / 100, 'critic/rewards/mean': 0.1 + step / 100,
        'accuracy_bins': [4, 2, 2], 'bapo/x1_groups': 4, 'bapo/x2_groups': step % 2, 'bapo/x3_groups': 2,
        'rollout/responses_total': 16 * step, 'rollout/discarded_total': 3 * step, 'rollout/reevaluated_total': step,
        'rollout/reused_total': 2 * step, 'actor/grad_norm': 0.5 + step / 50, 'actor/entropy': 1 - step / 100,
        'response_length/mean': 30.0 + step, 'response_length/clip_ratio': 0.0, 'staleness/mean': 1.5, 'staleness/max': 3,
        'staleness/ess/x1': 0.99, 'staleness/ratio/x1': 1.0, 'staleness/tv/x1': 0.01, 'actor/pg_clipfrac/x1': 0.02,
        'bapo/c2': 0.25, 'bapo/c3': 0.75, 'bapo/r_tot': 0.1 + step / 100,
        'timing_s/step': 2.0, 'timing_s/gen': 0.5, 'timing_s/update_actor': 1.25, **more,
    }  # fmt: skip


def evaluation(step, correct, mean, passed, samples=2):
    """An evals/STEP.json with one benchmark, and tracked prompts 10, 11, …"""
    summary = {'samples': samples, 'mean': mean, 'pass': passed, 'correct': correct}
    tracked = {'prompt_ids': list(range(10, 10 + len(correct))), **summary}
    return {'step': step, 'benchmarks': {'cd4': summary}, 'tracked': tracked}


def config(**more):
    return {'method': 'bapo', 'seed': 1, 'replay': {'use_x2': True, 'use_x3': True}, **more}


def make_run(directory: Path, rows, evaluations=(), events=(), settings=None) -> Path:
    """Writes a run directory; `settings` is its config.json, absent where it is None."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / 'metrics.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
    if evaluations:
        (directory / 'evals').mkdir()
    for e in evaluations:
        (directory / 'evals' / f'{e["step"]:06d}.json').write_text(json.dumps(e))
    if events:
        (directory / 'events.jsonl').write_text(''.join(json.dumps(e) + '\n' for e in events))
    if settings is not None:
        (directory / 'config.json').write_text(json.dumps(settings))
    return directory
