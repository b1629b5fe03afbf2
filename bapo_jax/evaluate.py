"""Scores a policy on benchmarks: mean@n with a confidence interval, pass@k and maj@n.

    python -m bapo_jax.evaluate --checkpoint=runs/x --benchmarks=cd34,cd4 --samples=8
    python -m bapo_jax.evaluate --checkpoint=runs/x/policy/000123
    python -m bapo_jax.evaluate --checkpoint=HF_DIRECTORY --config=configs/quickstart.py
    # a model of the hub
    python -m bapo_jax.evaluate --checkpoint=Qwen/Qwen2.5-Math-1.5B --config=configs/math.py --output=DIR

It prints a table and writes a JSON summary and every sample.

For a run, it scores π_θ of the newest checkpoint (not the rollout policy α) with the run's own config and
engine. A policy that the run published is scored with the same config. `--engine=vllm` selects another
engine: `--servers=URL,URL` names running servers; without it, one is started and stopped.

The config's `evaluate` fields and the flags set the sampling. DeepScaleR's protocol is `--samples=16
--temperature=0.6 --top_p=0.95 --max_response_tokens=32768`; greedy decoding is `--samples=1 --temperature=0`.

Run the same command again to continue an interrupted evaluation. Each chunk of questions is appended to
OUTPUT/BENCHMARK.jsonl once it is judged. With the in-process engine, the files are bit for bit those of an
uninterrupted evaluation.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict
from rich.progress import Progress, TextColumn

from bapo_jax import config as config_lib
from bapo_jax.cluster.devices import present
from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.config.help import topics
from bapo_jax.config.own_code import JUDGES, code_of
from bapo_jax.config.rollout_rules import check_server
from bapo_jax.inputs import benchmark_prompts, check_turn_end, located, make_sight, positions_suffice
from bapo_jax.machine import cli, hub, stopping, terminal
from bapo_jax.machine.files import check_directory, write_text
from bapo_jax.machine.lock import held
from bapo_jax.models import hf
from bapo_jax.models.adapters import model_of
from bapo_jax.models.tokenizer import read_tokenizer
from bapo_jax.policies import (
    BASE_HELP,
    HUGGING_FACE,
    PEFT,
    RUN,
    StoredPolicy,
    base_of,
    check_base,
    find_policy,
)
from bapo_jax.rollout.engine import Engine, RolloutError
from bapo_jax.rollout.serve import PYTHON_VARIABLE
from bapo_jax.rollout.start import POLICIES, check_start, start_engine
from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE
from bapo_jax.run.directory import settings_of
from bapo_jax.run.evaluation import answered_before, evaluate, summary_of
from bapo_jax.run.log.tables import print_scores
from bapo_jax.run.samples import evaluation_settings, sample_files
from bapo_jax.tasks import custom_reward
from bapo_jax.tasks.sight import Sight

FLAGS = flags.FLAGS


@contextlib.contextmanager
def question_bar(name: str, questions: int, done: int) -> Iterator[Callable[[int], None]]:
    """A progress bar of a benchmark's questions. Yields a function that sets the number answered."""
    what = TextColumn('{task.description}', markup=False)
    with Progress(what, *Progress.get_default_columns()[1:], console=terminal.console()) as bar:
        terminal.guard()
        task = bar.add_task(terminal.plain(Path(name).stem), total=questions, completed=done)
        yield lambda answered: bar.update(task, completed=answered)


class Loaded(NamedTuple):
    """A policy ready to be scored.

    `start(output directory)` reads its weights, starts a server if needed, and returns the engine.
    """

    config: ConfigDict
    tokenizer: Any
    stop_tokens: tuple[int, ...]
    sight: Sight | None  # None without a vision tower
    commits: dict[str, str]  # the hub's commits that its run recorded
    step: int  # training steps the policy has had
    title: str  # of its scores: the checkpoint, and after how many steps if that is known
    output: Path  # default directory of its evaluation
    start: Callable[[Path], Engine]


def load_for_evaluation(
    checkpoint: Path, config: ConfigDict | None, engine: str | None, servers: list[str] | None,
    base: Path | None = None,
) -> Loaded:  # fmt: skip
    """The policy in `checkpoint` (policies.py), with the config, tokenizer and engine to score it.

    A run, and a policy that it published, are scored with the run's own config; any other policy with
    `config`. `engine` and `servers` override both. The servers in a run's config are never used, since its
    trainer may be using them. `base` replaces model.path, which may be a directory of another machine.

    Raises ValueError if a config is needed, the policy is incomplete or belongs to another model, or JAX
    computes on other devices than mesh.platform says. Raises FileNotFoundError if there is no policy or no
    base.
    """
    policy = find_policy(checkpoint)
    if policy.run_config is not None:
        if config is not None:
            print("note: --config is ignored; the run's own config.json is used", file=sys.stderr, flush=True)
        config = config_lib.with_later_fields(settings_of(policy.run_config))
        config.rollout.servers = ()
        if os.environ.get(PYTHON_VARIABLE):  # the run may have used another machine
            config.rollout.server.python = ''
    elif config is None:
        raise ValueError(
            f'{checkpoint} does not belong to a run with a config.json, so task, template and sampling are '
            'unknown; give --config=FILE'
        )
    else:
        if base or policy.kind in (HUGGING_FACE, PEFT):
            of_base = base_of(checkpoint, policy.base and str(policy.base), {}, base, weights=True)
            config.model.path = str(of_base)
        config = located(config_lib.resolve(config))
    if policy.adapter:
        config.model.adapter.update(policy.adapter._asdict())
    if servers and engine == 'jax':
        raise ValueError('--servers cannot be used with --engine=jax; leave one of the two out')
    for server in servers or ():
        check_server(server, '--servers')
    config.rollout.engine = 'vllm' if servers else engine or config.rollout.engine
    config.rollout.servers = tuple(servers or config.rollout.servers)
    if config.rollout.servers and not os.environ.get(TOKEN_VARIABLE):
        raise ValueError(
            f'{TOKEN_VARIABLE} is not set; set it to the token that the servers were started with'
        )
    # The in-process engine computes on the config's platform, unless the environment names another.
    wanted = config.mesh.platform if config.rollout.engine == 'jax' and not jax.config.jax_platforms else ''
    devices = present(wanted)
    check_start(config)
    config.model.path = str(
        base_of(
            checkpoint, config.model.path, policy.commits, base,
            weights=config.rollout.engine == 'vllm' or policy.needs_base,
        )
    )  # fmt: skip
    custom_reward.find_reward(config.task.reward)  # fail now, not at the first responses
    model = model_of(config.model)
    tokenizer, ends = read_tokenizer(config.model.path, model)
    check_base(base, policy.run_config, tokenizer)
    policy.check(model)
    mesh, sight = make_mesh(1, -1, 1, devices), make_sight(config, model)

    def start(output: Path) -> Engine:
        params = policy.params(model, Path(config.model.path), mesh)
        engine = start_engine(
            config, model, hf.abstract_params(model)[0], ends, mesh, output, sight=sight, tokenizer=tokenizer
        )
        engine.load(params, policy.step)
        return engine

    after = '' if policy.kind in (HUGGING_FACE, PEFT) else f', after {policy.step} steps'
    return Loaded(
        config, tokenizer, ends, sight, policy.commits, policy.step, f'{checkpoint}{after}',
        default_output(checkpoint, policy), start,
    )  # fmt: skip


def default_output(checkpoint: Path, policy: StoredPolicy) -> Path:
    """RUN/evaluation/STEP, DIRECTORY/evaluation, or beside a published policy (a run may remove it)."""
    if policy.kind == RUN:
        return checkpoint / 'evaluation' / f'{policy.step:06d}'
    return (
        checkpoint / 'evaluation'
        if policy.kind in (HUGGING_FACE, PEFT)
        else checkpoint.with_name(f'{checkpoint.name}_evaluation')
    )


def stop(*_) -> None:
    """Signal handler: exits normally, which stops a server that was started. Samples are already saved."""
    stopping.say('stopped; the same command continues')
    sys.exit(stopping.STATUS)


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    if FLAGS.output == '':
        raise app.UsageError(
            '--output is empty; give a directory, or leave the flag out to write beside the checkpoint'
        )
    stopping.on_asking(stop)
    checkpoint = Path(FLAGS.checkpoint)
    with contextlib.ExitStack() as until_the_end:
        try:
            if hub.is_model(FLAGS.checkpoint):
                if not FLAGS.output:
                    raise ValueError(
                        f'--output is missing; give a directory, since {FLAGS.checkpoint} is a hub name '
                        'without a directory here'
                    )
                checkpoint = Path(hub.model_folder(FLAGS.checkpoint, '--checkpoint'))
            base = Path(FLAGS.base) if FLAGS.base else None
            policy = load_for_evaluation(checkpoint, FLAGS.config, FLAGS.engine, FLAGS.servers, base)
            config, tokenizer = policy.config, policy.tokenizer
            config.evaluate.benchmarks = tuple(FLAGS.benchmarks or config.evaluate.benchmarks)
            for name in ('samples', 'temperature', 'top_p', 'max_prompt_tokens', 'max_response_tokens'):
                if FLAGS[name].value is not None:
                    config.evaluate[name] = FLAGS[name].value
            positions_suffice(config, hf.read_config(config.model.path, stated=hf.overrides(config.model)))
            with hub.commits_of(policy.commits):  # data sets at the commits that the run recorded
                benchmarks = benchmark_prompts(config, tokenizer, policy.sight)
            for prompts in benchmarks.values():
                check_turn_end(config, prompts, tokenizer, policy.stop_tokens)
            output = Path(FLAGS.output) if FLAGS.output else policy.output
            check_directory(output, '--output')
            files = sample_files(output, config.evaluate.benchmarks)
            until_the_end.enter_context(held(output))
            chosen = evaluation_settings(checkpoint, policy.step, config, benchmarks, code_of(config, JUDGES))
            questions = answered_before(output, chosen, files, benchmarks, config)
        except (ValueError, OSError) as e:
            sys.exit(f'error: {e}')
        if any(len(questions[name]) < len(prompts) for name, prompts in benchmarks.items()):
            problems = sum(map(len, benchmarks.values()))
            print(f'{checkpoint}: {problems:,} problems × {config.evaluate.samples} responses', flush=True)
            try:
                engine = policy.start(output)
                for name, prompts in benchmarks.items():
                    with question_bar(name, len(prompts), len(questions[name])) as answered:
                        of_name = name, prompts, config, files[name], questions[name]
                        questions[name] = evaluate(engine, tokenizer, *of_name, answered=answered)
            except (ValueError, OSError, RolloutError) as e:
                sys.exit(f'error: {e}')
            engine.close()
            if (output / POLICIES).is_dir():  # the copy for the servers
                shutil.rmtree(output / POLICIES)
        summaries = {name: summary_of(q, benchmarks[name], config) for name, q in questions.items()}
        try:
            write_text(
                output / 'summary.json', json.dumps({**chosen, 'benchmarks': summaries}, indent=1) + '\n'
            )
        except OSError as e:
            sys.exit(f'error: {e}')
        print_scores(f'{policy.title}, in %', summaries)
        print(f'samples: {output}/*.jsonl   summary: {output / "summary.json"}')


def run() -> None:
    """The command: defines the flags and runs `main`."""
    flags.DEFINE_string(
        'checkpoint',
        None,
        'A run, a policy (runs/x/policy/000123), a Hugging Face directory, a PEFT adapter, or a hub name.',
        required=True,
    )
    flags.DEFINE_string('base', None, BASE_HELP)
    flags.DEFINE_list(
        'benchmarks',
        None,
        'Benchmarks that the task knows, or files of problems; default: those of the config.',
    )
    flags.DEFINE_integer('samples', None, 'Responses per question; default: from the config.', lower_bound=1)
    flags.DEFINE_float(
        'temperature', None, 'Sampling temperature; 0: greedy. Default: from the config.', lower_bound=0.0
    )
    flags.DEFINE_float(
        'top_p', None, 'Nucleus (top-p) sampling threshold; default: from the config.', 1e-6, 1.0
    )
    flags.DEFINE_integer(
        'max_response_tokens', None, 'Longest response in tokens; default: from the config.', lower_bound=1
    )
    flags.DEFINE_integer(
        'max_prompt_tokens', None, 'Longest question in tokens; default: from the config.', lower_bound=1
    )
    flags.DEFINE_enum(
        'engine', None, ['jax', 'vllm'], 'Engine that generates the responses; default: from the config.'
    )
    flags.DEFINE_list(
        'servers',
        None,
        'URLs of running vLLM servers that no trainer uses; without it, --engine=vllm starts one.',
    )
    flags.DEFINE_string(
        'output',
        None,
        'Directory to write; default: RUN/evaluation/STEP, POLICY_evaluation or HF_DIRECTORY/evaluation.',
    )
    cli.define_config(
        'NAME or FILE; gives task, template and sampling if the checkpoint does not belong to a run.',
        config_lib.check_fields,
    )
    cli.start(main, topics=topics)


if __name__ == '__main__':
    run()
