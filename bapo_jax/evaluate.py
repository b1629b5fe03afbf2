"""A policy's score on the benchmarks: mean@n with an interval, pass@k, maj@n; a table on the terminal, JSON, and every sample.

    python -m bapo_jax.evaluate --checkpoint=runs/x --benchmarks=cd34,cd4 --samples=8
    python -m bapo_jax.evaluate --checkpoint=runs/x/policy/000123
    python -m bapo_jax.evaluate --checkpoint=HF_DIRECTORY --config=configs/quickstart.py
    python -m bapo_jax.evaluate --checkpoint=Qwen/Qwen2.5-Math-1.5B --config=configs/math.py --output=DIR     # of the hub

Of a run, π_θ of the newest checkpoint is scored (not the rollout policy α), with the run's own config and engine. The same config
counts for a policy that the run published. `--engine=vllm` chooses another engine: `--servers=URL,URL` names running servers;
without them one is started and stopped.

How much and how is sampled are the config's fields `evaluate`, and flags: DeepScaleR's protocol is `--samples=16 --temperature=0.6
--top_p=0.95 --max_response_tokens=32768`, greedy decoding `--samples=1 --temperature=0`.

The same command continues an interrupted evaluation. Each chunk of questions is appended to OUTPUT/BENCHMARK.jsonl once it is
judged. With the in-process engine the files equal those of an uninterrupted evaluation, bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict
from rich.progress import Progress, TextColumn

from bapo_jax import config as config_lib
from bapo_jax import cli, events, hub, parallel, stopping, terminal
from bapo_jax.config_method import check_server
from bapo_jax.groups import Group, Prompt
from bapo_jax.files import check_directory, write_text
from bapo_jax.inputs import benchmark_prompts, check_turn_end, located, make_sight, positions_suffice
from bapo_jax.models import hf
from bapo_jax.models.tokenizer import read_tokenizer
from bapo_jax.policies import HUGGING_FACE, RUN, StoredPolicy, find_policy
from bapo_jax.rollout.collect import judge
from bapo_jax.rollout.engine import EVALUATION, TRACKING, Draw, Engine, RolloutError, Sampling
from bapo_jax.rollout.token_guard import TOKEN_VARIABLE
from bapo_jax.run.directory import settings_of
from bapo_jax.run.evaluation import done_before, open_evaluation, sample_files, sample_rows, settings
from bapo_jax.run.lock import held
from bapo_jax.run.tables import print_scores
from bapo_jax.scores import Question, question, summary
from bapo_jax.rollout.engines import POLICIES, check_start, start_engine
from bapo_jax.rollout.serve import PYTHON_VARIABLE
from bapo_jax.tasks import custom_reward, get_task, repeats
from bapo_jax.tasks.own_module import fingerprints_of_code
from bapo_jax.tasks.sight import Sight

FLAGS = flags.FLAGS
_CHUNK = 256  # responses judged and written together; an interruption loses no more, beside those under way
_TRACKED = ''  # stands for the tracked prompts where benchmarks have names


def chunk_size(config: ConfigDict) -> int:
    """Questions that are judged and written together."""
    return max(1, _CHUNK // config.evaluate.samples)


def votes(config: ConfigDict) -> bool:
    """Whether maj@n is reported: where the task's own verifier extracts answers that can be voted on.

    A user's reward function may name no answer, or one that is no vote.
    """
    return get_task(config.task.name).VOTES and not config.task.reward


def answer_and_judge(
    engine: Engine, tokenizer: Any, prompts: Sequence[Prompt], config: ConfigDict, purpose: int
) -> Generator[list[Group], None, None]:
    """`evaluate.samples` judged responses to each prompt, one chunk of prompts after the other, in order.

    All prompts are asked at once: while a chunk is judged, later ones are answered. Equal questions get equal random keys, whichever
    policy answers. Close the generator when leaving early, or the rest is answered too.
    """
    e, size, rewards = config.evaluate, chunk_size(config), custom_reward.rewards_of(config.task)
    draws = [Draw(config.seed, 0, purpose)] * len(prompts)
    answers = engine.ask(prompts, e.samples, Sampling(e.temperature, e.max_response_tokens, e.top_p), draws)
    try:
        for first in range(0, len(prompts), size):
            chunk = slice(first, first + size)
            responses = [answer.result() for answer in answers[chunk]]
            yield judge(tokenizer, prompts[chunk], responses, draws[chunk], rewards, config.task.verify_s)
    finally:
        for answer in answers:
            answer.cancel()


def summary_of(questions: Sequence[Question], prompts: Sequence[Prompt], config: ConfigDict) -> dict[str, Any]:
    """The summary (scores.py) of the answers to these prompts, of which some may be copies of others."""
    return summary(questions, votes(config), repeats.numbered([p.ground_truth for p in prompts]))


def core_metrics(summaries: dict[str, dict]) -> dict[str, float | None]:
    """What training logs: val-core/<benchmark>/acc/{mean@n,pass@n,maj@n}, the last where answers are votes."""
    return {
        f'val-core/{name}/acc/{measure}@{s["samples"]}': s[measure]
        for name, s in summaries.items()
        for measure in ('mean', 'pass', 'maj')
        if measure in s
    }


def evaluate(
    engine: Engine, tokenizer: Any, name: str, prompts: Sequence[Prompt], config: ConfigDict, file: Path, done: list[Question],
    purpose: int = EVALUATION, answered: Callable[[int], Any] = lambda questions: None,
) -> list[Question]:  # fmt: skip
    """Answers the prompts after those `done`, and appends each chunk's samples to `file` once it is judged.

    `answered` hears after each chunk how many questions are answered. Returns all questions, those `done` included, in order.
    """
    questions, missing = list(done), prompts[len(done) :]
    if not missing:
        return questions
    with closing(answer_and_judge(engine, tokenizer, missing, config, purpose)) as chunks, file.open('ab') as f:
        for groups in chunks:
            rows = sample_rows(name, len(questions), groups, tokenizer)
            f.write(''.join(json.dumps(row) + '\n' for row in rows).encode())
            f.flush()
            questions += map(question, groups)
            answered(len(questions))
    return questions


@contextlib.contextmanager
def shown(name: str, questions: int, done: int) -> Iterator[Callable[[int], None]]:
    """A bar of a benchmark's questions. Yields what moves it, a function of how many are answered."""
    what = TextColumn('{task.description}', markup=False)
    with Progress(what, *Progress.get_default_columns()[1:], console=terminal.console()) as bar:
        terminal.guard()
        task = bar.add_task(terminal.plain(Path(name).stem), total=questions, completed=done)
        yield lambda answered: bar.update(task, completed=answered)


def answered_before(
    output: Path, chosen: dict[str, Any], files: dict[str, Path], benchmarks: dict[str, list[Prompt]], config: ConfigDict
) -> dict[str, list[Question]]:
    """Opens the directory of an evaluation, and returns the questions that it has answered, by benchmark.

    Raises ValueError where it holds another evaluation than `chosen` says, or a damaged file.
    """
    open_evaluation(output, chosen, list(files.values()))
    size = chunk_size(config)
    return {name: done_before(files[name], len(p), config.evaluate.samples, size) for name, p in benchmarks.items()}


def evaluate_in_training(
    engine: Engine, tokenizer: Any, benchmarks: dict[str, list[Prompt]], tracked: list[Prompt], config: ConfigDict, evals: Path,
    step: int, initial: int, say: Callable[[str], None],
) -> dict[str, dict]:  # fmt: skip
    """Scores the policy that a run has after `step` steps, and writes `evals`/STEP.json. Returns the benchmarks' summaries.

    What is answered is kept in `evals`/STEP.partial until that file is there, so a run that ends in between goes on behind it.
    `initial` is the checksum of θ_0. `say` hears from time to time how far the evaluation is.
    """
    asked = {**benchmarks, _TRACKED: tracked} if tracked else benchmarks
    partial, summaries, before = evals / f'{step:06d}.partial', {}, 0
    files = {name: partial / f'{i}.jsonl' for i, name in enumerate(asked)}
    # A run directory may be moved: its policy is known by where it began, and by its steps.
    chosen = settings(partial, step, config, asked, fingerprints_of_code(config.task)) | {'checkpoint': initial}
    try:
        done = answered_before(partial, chosen, files, asked, config)
    except ValueError as e:  # of other settings, or damaged
        events.report('evaluation begun anew', f'the answers in {partial} are dropped: {e}')
        shutil.rmtree(partial)
        done = answered_before(partial, chosen, files, asked, config)
    samples, total = config.evaluate.samples, sum(map(len, asked.values()))

    def answered(questions: int) -> None:
        say(f'evaluating: {samples * (before + questions):,} of {samples * total:,} responses')

    for name, prompts in asked.items():
        purpose = EVALUATION if name in benchmarks else TRACKING
        questions = evaluate(engine, tokenizer, name, prompts, config, files[name], done[name], purpose, answered)
        summaries[name], before = summary_of(questions, prompts, config), before + len(prompts)
    of_tracked = {'prompt_ids': [p.id for p in tracked], **summaries.pop(_TRACKED)} if tracked else None
    result = {'step': step, 'benchmarks': summaries, **({'tracked': of_tracked} if tracked else {})}
    write_text(evals / f'{step:06d}.json', json.dumps(result) + '\n')
    shutil.rmtree(partial)
    return summaries


class Loaded(NamedTuple):
    """A policy ready to be scored. `start(output directory)` reads its weights, starts a server if needed, and gives the engine."""

    config: ConfigDict
    tokenizer: Any
    stop_tokens: tuple[int, ...]
    sight: Sight | None  # of a policy with a vision tower
    commits: dict[str, str]  # the hub's, which its run recorded
    step: int  # training steps the policy has had
    output: Path  # where its evaluation goes by default
    start: Callable[[Path], Engine]


def load_for_evaluation(checkpoint: Path, config: ConfigDict | None, engine: str | None, servers: list[str] | None) -> Loaded:
    """The policy in `checkpoint` (policies.py), with the config, tokenizer and engine that score it.

    The run's own config counts, of a run and of a policy that it published; for any other policy `config` does. `engine` and
    `servers` override either. The servers of a run's config are never used: its trainer may be using them.

    Raises ValueError where a config is needed, the policy is incomplete or of another model, or JAX computes on other devices than
    mesh.platform says; FileNotFoundError where there is no policy.
    """
    policy = find_policy(checkpoint)
    if policy.run_config is not None:
        if config is not None:
            print("note: the run's own config.json counts, --config is not used", file=sys.stderr, flush=True)
        config = ConfigDict(config_lib.with_later_fields(settings_of(policy.run_config)))
        config.rollout.servers = ()
        if os.environ.get(PYTHON_VARIABLE):  # the run may have been on another machine
            config.rollout.python = ''
    elif config is None:
        raise ValueError(
            f'{checkpoint} belongs to no run with a config.json, so task, template and sampling are unknown; give --config=FILE'
        )
    else:
        if policy.kind == HUGGING_FACE:
            config.model.path = str(checkpoint)
        config = located(config_lib.resolve(config))
    if servers and engine == 'jax':
        raise ValueError('--servers are asked with --engine=vllm; leave one of the two out')
    for server in servers or ():
        check_server(server, '--servers')
    config.rollout.engine = 'vllm' if servers else engine or config.rollout.engine
    config.rollout.servers = tuple(servers or config.rollout.servers)
    if config.rollout.servers and not os.environ.get(TOKEN_VARIABLE):
        raise ValueError(f'{TOKEN_VARIABLE} is not set; put the token that the servers were started with there')
    # The in-process engine computes where the config says, unless whoever starts the command says otherwise.
    wanted = config.mesh.platform if config.rollout.engine == 'jax' and not jax.config.jax_platforms else ''
    devices = parallel.present(wanted)
    check_start(config)
    config.model.path = hub.folder_in_run(config.model.path, policy.commits, weights=config.rollout.engine == 'vllm')
    custom_reward.find_reward(config.task.reward)  # now rather than when the first responses are there
    model = hf.read_config(config.model.path, config.model.dtype, hf.overrides(config.model))
    tokenizer, ends = read_tokenizer(config.model.path, model)
    policy.check(model)
    mesh, sight = parallel.make_mesh(1, -1, 1, devices), make_sight(config, model)

    def start(output: Path) -> Engine:
        params = policy.params(model, mesh)
        engine = start_engine(config, model, hf.abstract_params(model)[0], ends, mesh, output, sight=sight)
        engine.load(params, policy.step)
        return engine

    return Loaded(config, tokenizer, ends, sight, policy.commits, policy.step, default_output(checkpoint, policy), start)


def default_output(checkpoint: Path, policy: StoredPolicy) -> Path:
    """RUN/evaluation/STEP, HF_DIRECTORY/evaluation, or beside a published policy, which the run may remove."""
    if policy.kind == RUN:
        return checkpoint / 'evaluation' / f'{policy.step:06d}'
    return checkpoint / 'evaluation' if policy.kind == HUGGING_FACE else checkpoint.with_name(f'{checkpoint.name}_evaluation')


def stop(*_) -> None:
    """What a signal does: the samples up to now are in their files. The end is a normal one, which stops a server of our own."""
    stopping.say('stopped; the same command continues')
    sys.exit(stopping.STATUS)


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    if FLAGS.output == '':
        raise app.UsageError('--output is missing: the directory to write; without the flag it is one beside the checkpoint')
    stopping.on_asking(stop)
    checkpoint = Path(FLAGS.checkpoint)
    with contextlib.ExitStack() as until_the_end:
        try:
            if hub.is_model(FLAGS.checkpoint):
                if not FLAGS.output:
                    raise ValueError(f'--output is missing: {FLAGS.checkpoint} of the hub has no directory of its own here')
                checkpoint = Path(hub.model_folder(FLAGS.checkpoint, '--checkpoint'))
            policy = load_for_evaluation(checkpoint, FLAGS.config, FLAGS.engine, FLAGS.servers)
            config, tokenizer = policy.config, policy.tokenizer
            config.evaluate.benchmarks = tuple(FLAGS.benchmarks or config.evaluate.benchmarks)
            for name in ('samples', 'temperature', 'top_p', 'max_prompt_tokens', 'max_response_tokens'):
                if FLAGS[name].value is not None:
                    config.evaluate[name] = FLAGS[name].value
            positions_suffice(config, hf.read_config(config.model.path, stated=hf.overrides(config.model)))
            with hub.commits_of(policy.commits):  # a run's benchmarks stay those of the run
                benchmarks = benchmark_prompts(config, tokenizer, policy.sight)
            for prompts in benchmarks.values():
                check_turn_end(config, prompts, tokenizer, policy.stop_tokens)
            output = Path(FLAGS.output) if FLAGS.output else policy.output
            check_directory(output, '--output')
            files = sample_files(output, config.evaluate.benchmarks)
            until_the_end.enter_context(held(output))
            chosen = settings(checkpoint, policy.step, config, benchmarks, fingerprints_of_code(config.task))
            questions = answered_before(output, chosen, files, benchmarks, config)
        except (ValueError, OSError) as e:
            sys.exit(f'error: {e}')
        if any(len(questions[name]) < len(prompts) for name, prompts in benchmarks.items()):
            try:
                engine = policy.start(output)
                for name, prompts in benchmarks.items():
                    with shown(name, len(prompts), len(questions[name])) as answered:
                        of_name = name, prompts, config, files[name], questions[name]
                        questions[name] = evaluate(engine, tokenizer, *of_name, answered=answered)
            except (ValueError, OSError, RolloutError) as e:
                sys.exit(f'error: {e}')
            engine.close()
            if (output / POLICIES).is_dir():  # the copy that servers loaded
                shutil.rmtree(output / POLICIES)
        summaries = {name: summary_of(q, benchmarks[name], config) for name, q in questions.items()}
        try:
            write_text(output / 'summary.json', json.dumps({**chosen, 'benchmarks': summaries}, indent=1) + '\n')
        except OSError as e:
            sys.exit(f'error: {e}')
        print_scores(f'{checkpoint}, after {policy.step} steps; shares in %', summaries)
        print(f'every sample: {output}/*.jsonl   summary: {output / "summary.json"}')


def run() -> None:
    """The command: its flags, then `main`."""
    flags.DEFINE_string('checkpoint', None, 'A run, policy (runs/x/policy/000123), Hugging Face directory or name.', required=True)
    flags.DEFINE_list('benchmarks', None, 'Names the task knows, or files of problems; default: as the config says.')
    flags.DEFINE_integer('samples', None, 'Responses to each question; default: as the config says.', lower_bound=1)
    flags.DEFINE_float('temperature', None, 'Of sampling; 0: the likeliest token. Default: as the config says.', lower_bound=0.0)
    flags.DEFINE_float('top_p', None, 'Share that the tokens drawn from make up; default: as the config says.', 1e-6, 1.0)
    flags.DEFINE_integer('max_response_tokens', None, 'Tokens of a response; default: as the config says.', lower_bound=1)
    flags.DEFINE_integer('max_prompt_tokens', None, 'Tokens of a question; default: as the config says.', lower_bound=1)
    flags.DEFINE_enum('engine', None, ['jax', 'vllm'], 'Who answers; default: as the config says.')
    flags.DEFINE_list('servers', None, 'URLs of running vLLM servers that no trainer uses; without, --engine=vllm starts one.')
    flags.DEFINE_string('output', None, 'Directory; default: RUN/evaluation/STEP, POLICY_evaluation or HF_DIRECTORY/evaluation.')
    cli.define_config('NAME or FILE; says task, template and sampling where the checkpoint is of no run.', config_lib.check_fields)
    cli.start(main)


if __name__ == '__main__':
    run()
