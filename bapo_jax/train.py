"""BAPO, Algorithm 1 (arXiv 2602.20722). Every method of methods.py is this loop with other choices.

    python -m bapo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart
    python -m bapo_jax.train --config=configs/countdown.py:grpo --workdir=runs/x --config.learner.learning_rate=2e-6

A used run directory continues where it stopped; SIGTERM or Ctrl-C stops after the step, with a checkpoint. With --dry_run nothing is
trained: dry_run.py says what a run would take, and whether it fits.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging
from ml_collections import config_flags

from bapo_jax.checkpoint import Checkpoints, DamagedCheckpoint, RunState
from bapo_jax.dry_run import dry_run
from bapo_jax.evaluate import core_metrics, score, score_benchmarks
from bapo_jax.follow import follow
from bapo_jax.groups import Batch, Prompt
from bapo_jax.hosts import HostError, Hosts, join
from bapo_jax.metrics import (
    MetricsLog, ProgressBar, Timer, batch_metrics, discarded_metrics, fresh_metrics, replayed_metrics, trained_tokens, write_text,
)  # fmt: skip
from bapo_jax.rollouts_log import uses, write_rollouts
from bapo_jax.parallel import describe_devices
from bapo_jax.replay.compose import compose, improved
from bapo_jax.replay.filters import fresh_filter
from bapo_jax.replay.thresholds import threshold, update_r_tot
from bapo_jax.report import draw_run
from bapo_jax.rollout.ahead import Rollouts
from bapo_jax.rollout.collect import Collected, collect
from bapo_jax.rollout.engine import FRESH, PROBE, REEVALUATION, TRACKING, Draw, RolloutError, Sampling
from bapo_jax.rollout.fidelity import check_probe, mismatch
from bapo_jax.rollout.schedule import last_ahead, reevaluation_due, sync_due
from bapo_jax.run.tables import print_table
from bapo_jax.setup import Setup, begin, build
from bapo_jax.tasks.custom_reward import BadReward

# Streams of host-side randomness; a generator is keyed by (seed, step, stream), so there is no state to save.
_FILTER, _REEVALUATE, _COMPOSE, _SHUFFLE = range(4)
_PROBE_TOKENS = 32  # of each answer that is compared after a sync


def train(s: Setup, workdir: Path) -> RunState:
    """Trains until `steps`, continuing what `workdir` holds. Returns where the run stands."""
    run, reference, log, checkpoints = start_or_continue(s, workdir)
    c, replay, engine = s.config, s.config.replay, s.engine
    sampling = Sampling(c.rollout.temperature, c.rollout.max_response_tokens)
    v, m = c.rollout.sync_every, replay.reevaluate_every if replay.use_x2 else 0
    progress, stop_asked, timer = ProgressBar(s.steps, run.step), stop_on_signal(), Timer()

    def rng(stream: int) -> np.random.Generator:
        return np.random.default_rng([c.seed, step, stream])

    def ask(step: int, prompts: Sequence[Prompt], hard: Sequence[Prompt]) -> Collected:
        draws = [Draw(c.seed, step, FRESH)] * len(prompts) + [Draw(c.seed, step, REEVALUATION)] * len(hard)
        return collect(engine, s.tokenizer, [*prompts, *hard], c.rollout.group_size, sampling, draws, s.reward)

    rollouts = Rollouts(s.selector, ask)

    for step in range(run.step + 1, s.steps + 1):
        with timer('step'):
            # Lines 3-5: every v steps the rollout policy α becomes π_θ.
            if sync_due(step, v):
                with timer('weight_sync'):
                    s.hosts.tell('sync')
                    run.sync()
                    serve_alpha(s, run)

            # Line 12: every m steps hard prompts are asked again, of π_θ; together with the fresh ones where α is π_θ.
            hard = s.buffer.hard_prompts(rng(_REEVALUATE), replay.max_reevaluate) if reevaluation_due(step, m) else []
            one_wave = run.alpha_version == step - 1

            # Lines 6-7: G responses to each prompt from α, with its log-probs; rewards.
            with timer('wait_rollouts'):
                fresh, reevaluated, gen_s, reward_s, selector_state = rollouts.take(step, hard if one_wave else ())
            timer.seconds.update({'timing_s/gen': gen_s, 'timing_s/reward': reward_s})
            run.r_tot = update_r_tot(run.r_tot, np.mean([g.mean_reward for g in fresh if not g.infra_error] or [np.nan]))
            low, high = (threshold(x, run.r_tot or 0.0, replay.thresholds) for x in (replay.c2, replay.c3))

            # Lines 13-15, eq. 6: hard prompts that π_θ now sometimes solves are X2.
            if hard and not one_wave:
                with timer('reevaluate'):
                    engine.load(run.learner.params, step - 1)
                    reevaluated = ask(step, [], hard).groups
                    engine.load(run.alpha, run.alpha_version)
            promoted = improved(reevaluated, replay.c1)

            # Lines 11, 16-17, eq. 5-8: the adaptive batch X1 ∪ X2 ∪ X3.
            with timer('compose'):
                kept = fresh_filter(fresh, replay.fresh_filter, rng(_FILTER))
                batch = compose(
                    kept, promoted, s.buffer,
                    size=c.learner.batch_groups, step=step, low=low, high=high, rng=rng(_COMPOSE), use_x3=replay.use_x3,
                    x3_untrained=replay.x3_untrained,
                )  # fmt: skip
                replayed = replayed_metrics(batch, s.buffer, step)

            # While this step trains, those after it are answered, as long as α stays what it is.
            if c.rollout.overlap:
                for later in range(step + 1, last_ahead(step, s.steps, v, m, c.evaluate.every) + 1):
                    rollouts.begin(later)

            # Line 18: advantages and the clipped update.
            run.learner, update = s.learner.update(run.learner, batch, rng(_SHUFFLE), reference)

            # Lines 8-9 and 19: the fresh groups enter the buffer, after this step's draws from it.
            s.buffer.add(fresh, step, x1={g.prompt.id for g in kept})
            run.step = step
            run.responses_total += sum(g.size for g in [*fresh, *reevaluated])

            # A server's log-probs against the trainer's, of the same policy and tokens: of a mini-batch's worth of X1.
            if c.rollout.engine == 'vllm' and kept:
                with timer('mismatch'):
                    some = tuple(kept[: c.learner.mini_batch_groups])
                    update |= mismatch(*s.learner.logprobs(run.alpha, Batch(some, ('x1',) * len(some))))

        # Evaluate, log, save.
        metrics = {
            **fresh_metrics(fresh), **batch_metrics(batch, step), **replayed, **discarded_metrics(fresh, kept), **update,
            **s.buffer.metrics(step), 'bapo/r_tot': run.r_tot, 'bapo/c2': low, 'bapo/c3': high,
            'bapo/reevaluated': len(reevaluated), 'bapo/improved': len(promoted), 'bapo/lag': step - 1 - run.alpha_version,
            'rollout/responses_total': run.responses_total,
        }  # fmt: skip
        stopping = stop_asked() or step == s.steps
        if step == s.steps or every(c.evaluate.every, step):
            with timer('testing'):
                metrics |= evaluate_policy(s, run, workdir)
        if every(c.rollouts.every, step):
            write_rollouts(workdir / 'rollouts' / f'{step:06d}.jsonl.zst', s.tokenizer, uses(fresh, kept, reevaluated, promoted))
        metrics |= {**timer.seconds, 'perf/throughput': trained_tokens(batch) / timer.seconds['timing_s/step']}
        log.write(step, metrics)
        progress.update(step, metrics)
        timer = Timer()  # a save comes after its step's row, so its seconds are in the next one
        if stopping or every(c.checkpoint.every, step):
            with timer('save_checkpoint'):
                s.hosts.tell('save')
                checkpoints.save(run, s.buffer.state(), selector_state)
        if stopping:
            break

    rollouts.close()
    progress.stop()
    log.close()
    checkpoints.close()
    engine.close()
    if run.step == s.steps:
        print_results(workdir, run.step)
    else:
        print(f'stopped after step {run.step} of {s.steps}; the same command continues')
    return run


def start_or_continue(s: Setup, workdir: Path) -> tuple[RunState, Any, MetricsLog, Checkpoints]:
    """θ_0, or the newest checkpoint; α in the engine; the log cut back to what counts; the initial policy evaluated once."""
    s.hosts.tell('begin', config=s.config.to_dict())
    s.hosts.agree('')
    run, of_host, reference, checkpoints = begin(s.policy, s.config, workdir)
    if of_host:
        buffer, selector = of_host
        s.buffer.restore(buffer)
        s.selector.restore(selector)
        print(f'continuing {workdir} after step {run.step}')
    log = MetricsLog(workdir, run.step if run.step else -1)
    serve_alpha(s, run)
    if run.step == 0:
        c = s.config
        print(
            f'{len(s.training_prompts):,} prompts, {s.steps} steps of {c.learner.batch_groups} prompts × {c.rollout.group_size} '
            f'responses; method {c.method}: v={c.rollout.sync_every}, anchor {c.learner.anchor}, '
            f'filter {c.replay.fresh_filter}, X2 {c.replay.use_x2}, X3 {c.replay.use_x3}; on {describe_devices()}, '
            f'attention {s.learner.kernel}',
            flush=True,
        )
        log.write(0, evaluate_policy(s, run, workdir))
    return run, reference, log, checkpoints


def serve_alpha(s: Setup, run: RunState) -> None:
    """Loads α into the engine; of every server, the log-probs of one prompt's answers are compared with the trainer's."""
    c = s.config
    s.engine.load(run.alpha, run.alpha_version)
    if c.rollout.engine == 'vllm':
        prompts = s.training_prompts[:1] * s.engine.servers
        sampling = Sampling(c.rollout.temperature, min(_PROBE_TOKENS, c.rollout.max_response_tokens))
        draws = [Draw(c.seed, run.step, PROBE)] * len(prompts)
        groups = collect(s.engine, s.tokenizer, prompts, c.rollout.group_size, sampling, draws, s.reward).groups
        served_and_trained = s.learner.logprobs(run.alpha, Batch(tuple(groups), ('x1',) * len(groups)))
        check_probe(*served_and_trained, c.rollout.probe_tolerance, run.alpha_version)


def evaluate_policy(s: Setup, run: RunState, workdir: Path) -> dict[str, float | None]:
    """Scores π_θ (not α) on the benchmarks and the tracked prompts, and keeps every question's count in evals/."""
    c = s.config
    s.engine.load(run.learner.params, run.step)
    summaries = score_benchmarks(s.engine, s.tokenizer, s.benchmarks, c)
    result = {'step': run.step, 'benchmarks': summaries}
    if c.evaluate.track_prompts:
        # A fixed subset of the training prompts, for the accuracy-migration figures.
        chosen = np.random.default_rng(c.seed).permutation(len(s.training_prompts))[: c.evaluate.track_prompts]
        tracked = [s.training_prompts[i] for i in np.sort(chosen)]
        result['tracked'] = {'prompt_ids': [p.id for p in tracked], **score(s.engine, s.tokenizer, tracked, c, TRACKING)}
    s.engine.load(run.alpha, run.alpha_version)
    (workdir / 'evals').mkdir(exist_ok=True)
    write_text(workdir / 'evals' / f'{run.step:06d}.json', json.dumps(result) + '\n')
    return core_metrics(summaries)


def print_results(workdir: Path, step: int) -> None:
    """Base against trained policy, and where the figure is."""
    base, trained = (json.loads((workdir / 'evals' / f'{i:06d}.json').read_text('utf-8'))['benchmarks'] for i in (0, step))
    print_table(f'{workdir}, {step} steps, %', {'base': base, 'trained': trained})
    print(f'figure: {draw_run(workdir)}   metrics: {workdir / "metrics.jsonl"}')


def every(period: int, step: int) -> bool:
    """Is it due? A period of 0 means never."""
    return period > 0 and step % period == 0


def stop_on_signal():
    """Returns a function that says whether SIGTERM or SIGINT came; the step under way is finished and saved first."""
    asked = []

    def ask(signum, frame):
        asked.append(signum)
        print(f'\n{signal.Signals(signum).name}: stopping after this step, with a checkpoint', flush=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    return lambda: bool(asked)


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    if FLAGS.dry_run:
        try:
            sys.exit(0 if dry_run(FLAGS.config, FLAGS.topology).fits is not False else 1)
        except (ValueError, OSError) as e:
            sys.exit(f'error: {e}')
    if FLAGS.workdir is None:
        raise app.UsageError('--workdir is missing: the run directory')
    workdir, hosts = Path(FLAGS.workdir), Hosts(FLAGS.config.mesh.deadline_s)
    if FLAGS.hosts > 1 and not FLAGS.coordinator:
        raise app.UsageError(f'--hosts={FLAGS.hosts} needs --coordinator=ADDRESS:PORT, an address of host 0 that the others reach')
    if FLAGS.coordinator:
        join(FLAGS.coordinator, FLAGS.hosts, FLAGS.host, FLAGS.join_timeout)
    try:
        if FLAGS.host:
            follow(FLAGS.config, workdir, hosts)
            return
        with hosts:
            try:
                setup = build(FLAGS.config, workdir, hosts)
            except (ValueError, OSError, RolloutError) as e:
                sys.exit(f'error: {e}')
            train(setup, workdir)
    except DamagedCheckpoint as e:
        sys.exit(f'error: {e}')
    except (RolloutError, BadReward, HostError) as e:
        sys.exit(f'error: {e}\nThe same command continues from the last checkpoint.')


if __name__ == '__main__':
    FLAGS = flags.FLAGS
    flags.DEFINE_string('workdir', None, 'The run directory; a used one continues.')
    flags.DEFINE_bool('dry_run', False, 'Check everything and compile the train step; train nothing, write nothing.')
    flags.DEFINE_string('topology', '', "For --dry_run: a TPU slice ('v5e:2x4') or GPUs ('8x80GB') in place of the devices here.")
    config_flags.DEFINE_config_file('config', None, 'FILE or FILE:METHOD.', lock_config=True)
    flags.DEFINE_string('coordinator', None, 'Many hosts: ADDRESS:PORT of host 0, the port free there.')
    flags.DEFINE_integer('hosts', 1, 'Many hosts: how many processes train together, one a host.', lower_bound=1)
    flags.DEFINE_integer('host', 0, 'Many hosts: which of them this is; 0 runs the loop and speaks to the rollout servers.', lower_bound=0)
    flags.DEFINE_integer('join_timeout', 300, 'Many hosts: most seconds until all of them have come.', lower_bound=1)
    flags.mark_flag_as_required('config')
    app.run(main)
