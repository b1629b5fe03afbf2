"""From a config to the things a loop works with, cheapest checks first; and the rules of a run directory."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict
from safetensors.numpy import save_file

from bapo_jax import config as config_lib
from bapo_jax import parallel
from bapo_jax.checkpoint import Checkpoints, RunState, copy_params
from bapo_jax.groups import Prompt
from bapo_jax.hosts import Hosts
from bapo_jax.learner.update import Learner
from bapo_jax.metrics import write_text
from bapo_jax.models import attention, hf
from bapo_jax.models.hf import architecture
from bapo_jax.models.qwen import ModelConfig
from bapo_jax.models.tokenizer import load_tokenizer, stop_tokens
from bapo_jax.prompts.selector import ShuffledEpochs
from bapo_jax.replay.buffer import ReplayBuffer
from bapo_jax.rollout.engine import Engine
from bapo_jax.rollout.jax_engine import JaxEngine
from bapo_jax.rollout.published import MANIFEST, WEIGHTS, check_model, read_manifest, read_tensors
from bapo_jax.rollout.supervise import SupervisedServer
from bapo_jax.rollout.token_guard import TOKEN_VARIABLE
from bapo_jax.rollout.vllm_engine import VllmEngine
from bapo_jax.tasks import custom_reward, encode_prompts, get_task, leave_out_long, refuse_long

POLICIES = 'policy'  # in a run's or an evaluation's directory: what was published for the servers

# One id range a benchmark, so that no two questions share random keys; training prompts count from 0.
_FIRST_ID = 1 << 24


class Setup(NamedTuple):
    config: ConfigDict  # resolved
    tokenizer: Any
    training_prompts: list[Prompt]
    benchmarks: dict[str, list[Prompt]]
    reward: Callable | None  # the user's, instead of the task's verifier
    selector: ShuffledEpochs
    learner: Learner
    engine: Engine
    buffer: ReplayBuffer
    policy: Policy
    hosts: Hosts
    steps: int


class Policy(NamedTuple):
    """The policy's architecture, and what every host does with it."""

    config: ModelConfig
    graph: nnx.GraphDef
    mesh: Mesh
    shapes: Any  # of the parameters, with the sharding of each
    learner: Learner
    read_initial: Callable[[], Any]  # puts θ_0 on the mesh


def build(config: ConfigDict, workdir: Path, hosts: Hosts = Hosts()) -> Setup:
    """Checks the config, reads data, checks the model's files and claims the run directory, in that order; devices come last.

    Raises ValueError or FileNotFoundError, naming the field and the remedy, before anything is written.
    """
    read = read_inputs(config)
    config, prompts = read.config, read.prompts
    policy = build_policy(config, hosts)
    claim(
        workdir, config,
        {'dataset': fingerprint(prompts), 'tokenizer': fingerprint_tokenizer(read.tokenizer), 'model': architecture(read.model)},
    )  # fmt: skip
    return Setup(
        config=config,
        tokenizer=read.tokenizer,
        training_prompts=prompts,
        benchmarks=read.benchmarks,
        reward=custom_reward.resolve(config.task.reward),
        selector=read.selector,
        learner=policy.learner,
        engine=build_engine(config, read.model, policy.graph, read.stop_tokens, policy.mesh, workdir, hosts),
        buffer=ReplayBuffer(
            config.replay.bad_capacity, config.replay.high_capacity, config.replay.high_recent_steps, config.replay.c1
        ),
        policy=policy,
        hosts=hosts,
        steps=read.steps,
    )


class Inputs(NamedTuple):
    """What a config names, read: all but weights and devices."""

    config: ConfigDict  # resolved
    model: ModelConfig
    tokenizer: Any
    stop_tokens: tuple[int, ...]
    prompts: list[Prompt]
    benchmarks: dict[str, list[Prompt]]
    selector: ShuffledEpochs
    steps: int


def read_inputs(config: ConfigDict, weights: bool = True) -> Inputs:
    """Checks the config and, if they are wanted, the weights' files; reads data and tokenizer. Raises as `build` does."""
    config = config_lib.resolve(config)
    config_lib.model_path_exists(config)
    model = hf.read_config(config.model.path, config.model.dtype)
    if weights:
        hf.check_weights(config.model.path, model)
    tokenizer = load_tokenizer(config.model.path)
    ends = stop_tokens(config.model.path, tokenizer)
    benchmarks = benchmark_prompts(config, tokenizer)
    truths = get_task(config.task.name).training_problems(config.task.train, limit=config.task.limit, seed=config.task.seed)
    prompts = encode_prompts(config.task.name, truths, tokenizer, template=config.task.template)
    prompts = leave_out_long(prompts, config.rollout.max_prompt_tokens)
    selector = ShuffledEpochs(prompts, config.learner.batch_groups, config.seed)
    if config.evaluate.track_prompts > len(prompts):
        raise ValueError(f'evaluate.track_prompts={config.evaluate.track_prompts} exceeds the {len(prompts)} training prompts')
    steps = config.steps or config.epochs * selector.batches_per_epoch
    return Inputs(config, model, tokenizer, ends, prompts, benchmarks, selector, steps)


def build_policy(config: ConfigDict, hosts: Hosts) -> Policy:
    """What every host needs to do its part of the device work; nothing is allocated. Raises as `build` does."""
    model = hf.read_config(config.model.path, config.model.dtype)
    graph, shapes = hf.abstract_params(model)
    mesh = parallel.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    if config.rollout.engine == 'jax' and jax.process_count() > 1:
        raise ValueError('rollout.engine=jax answers from the devices of one process; with several hosts set rollout.engine=vllm')
    kernel = check_mesh(config, model, mesh, mesh.devices.flat[0].platform)
    sharding = parallel.parameter_sharding(mesh, shapes)
    shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, sharding)
    learner = Learner(graph, config.learner, config.rollout.temperature, mesh, kernel, hosts)
    return Policy(model, graph, mesh, shapes, learner, lambda: hf.load_params(config.model.path, model, sharding))


def check_mesh(config: ConfigDict, model: ModelConfig, mesh: Mesh | AbstractMesh, platform: str) -> str:
    """The attention kernel for that mesh of 'cpu', 'gpu' or 'tpu' devices. Raises ValueError where the config cannot run on it."""
    if config.rollout.overlap and config.rollout.engine == 'jax' and mesh.size > 1:
        raise ValueError(
            f'rollout.overlap with rollout.engine=jax on {mesh.size} devices: two programs that exchange data between the same devices '
            'at once may wait for each other for ever, and would be no faster; set rollout.overlap=False, or engine=vllm'
        )
    splits = mesh.shape['data'] * mesh.shape['fsdp']
    if config.learner.micro_batch_rows % splits:
        raise ValueError(
            f'learner.micro_batch_rows={config.learner.micro_batch_rows} is no multiple of mesh.data × mesh.fsdp = {splits}; '
            'rows are split over both'
        )
    return attention.choose(
        config.model.attention, platform, model, row_tokens=config.learner.row_tokens, tensor=mesh.shape['tensor']
    )


class Beginning(NamedTuple):
    run: RunState
    of_host: tuple[dict[str, np.ndarray], str] | None  # of a run that goes on: the buffer's arrays and the selector's state
    reference: Any  # θ_0 where the KL term wants it
    checkpoints: Checkpoints


def begin(policy: Policy, config: ConfigDict, workdir: Path) -> Beginning:
    """Where a run begins, on every host at once: at θ_0, or at its newest checkpoint."""
    checkpoints = Checkpoints(workdir / 'checkpoints', config.checkpoint.keep)
    step = checkpoints.latest_step()
    reference = config.learner.kl_target == 'reference'
    initial = policy.read_initial() if step is None or reference else None
    if step is None:
        # θ is donated at the first update, so it is a copy; α never is.
        run, of_host = RunState(policy.learner.init(copy_params(initial)), alpha=initial), None
    else:
        run, *of_host = checkpoints.restore(step, policy.learner.shapes(policy.shapes))
    return Beginning(run, of_host, initial if reference else None, checkpoints)


def benchmark_prompts(config: ConfigDict, tokenizer: Any) -> dict[str, list[Prompt]]:
    """The questions of every benchmark in config.evaluate.benchmarks.

    Raises ValueError for an unknown name, a bad file or a prompt that is too long, FileNotFoundError where there is none.
    """
    task, prompts = get_task(config.task.name), {}
    for i, name in enumerate(config.evaluate.benchmarks):
        first_id = _FIRST_ID * (1 + i)
        asked = encode_prompts(config.task.name, task.benchmark(name), tokenizer, template=config.task.template, first_id=first_id)
        prompts[name] = refuse_long(asked, config.rollout.max_prompt_tokens, name)
    return prompts


def build_engine(
    config: ConfigDict, model: ModelConfig, graph: Any, ends: tuple[int, ...], mesh: Mesh, workdir: Path, hosts: Hosts = Hosts()
) -> Engine:
    """Who answers; with engine 'vllm' and no servers listed, one is started now, which takes a minute."""
    r = config.rollout
    if r.engine == 'jax':
        return JaxEngine(graph, ends, r.rows, parallel.row_sharding(mesh))
    servers, token = list(r.servers), os.environ.get(TOKEN_VARIABLE)
    if not servers:
        print('starting a vLLM server …', flush=True)
        servers = SupervisedServer(
            config.model.path,
            workdir / 'server.log',
            dtype=r.dtype,
            max_tokens=r.max_prompt_tokens + r.max_response_tokens,
            memory=r.server_memory,
            deadline_s=r.deadline_s,
            extra=r.server_args,
        )
        servers.start()
        token = servers.token
    return VllmEngine(
        servers, workdir / POLICIES, model, token=token, dtype=r.dtype, stop_tokens=ends, concurrency=r.concurrency,
        deadline_s=r.deadline_s, hosts=hosts,
    )  # fmt: skip


def claim(workdir: Path, config: ConfigDict, fingerprints: dict[str, Any]) -> None:
    """Writes config.json into a new run directory; of a used one, checks that this is the same run.

    Raises ValueError, naming what differs, for a run directory of another config, dataset, tokenizer or model.
    """
    path, new = Path(workdir) / 'config.json', {**config.to_dict(), 'fingerprints': fingerprints}
    new = json.loads(json.dumps(new))  # tuples as the lists that a file gives back
    if path.is_file():
        differing = config_lib.differences(json.loads(path.read_text('utf-8')), new)
        if differing:
            raise ValueError(
                f'{workdir} holds a run with other settings; they differ in {", ".join(differing)}. '
                'Give another --workdir, or the settings of that run'
            )
    Path(workdir).mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(new, indent=1) + '\n')


def fingerprint(prompts: list[Prompt]) -> str:
    """Of the training prompts' tokens, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(len(prompt.tokens).to_bytes(4, 'little') + prompt.tokens.tobytes())
    return digest.hexdigest()[:16]


def fingerprint_tokenizer(tokenizer: Any) -> str:
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


class Evaluated(NamedTuple):
    """A policy to be scored. Its weights are read, and a server is started, when `start(output directory)` gives the engine."""

    config: ConfigDict
    tokenizer: Any
    step: int  # training steps it has had
    output: Path  # where its evaluation goes unless told otherwise
    start: Callable[[Path], Engine]


def load_for_evaluation(checkpoint: Path, config: ConfigDict | None, engine: str | None, servers: list[str] | None) -> Evaluated:
    """The policy in a run directory (θ of the newest checkpoint), a published policy's or a Hugging Face directory.

    A run's own config counts, and that of the run a published policy belongs to; else `config` does. `engine` and `servers`
    override either. The servers a run trains with are never asked: its trainer may be using them. Raises ValueError where a config
    is needed or a policy is incomplete or of another model, FileNotFoundError where there is none.
    """
    if not checkpoint.is_dir():
        raise FileNotFoundError(
            f'--checkpoint={str(checkpoint)!r} is not a directory; give a run, a published policy or a Hugging Face directory'
        )
    is_run = (checkpoint / 'checkpoints').is_dir()
    is_published = (checkpoint / MANIFEST).is_file() or (checkpoint / WEIGHTS).is_dir()
    run_config = (checkpoint.absolute().parents[1] if is_published else checkpoint) / 'config.json'
    if is_run or is_published and run_config.is_file():
        if config is not None:
            print(f'note: {run_config} counts, --config is not used', flush=True)
        config = ConfigDict(json.loads(run_config.read_text('utf-8')))
        config.rollout.servers = ()
    elif config is None:
        raise ValueError(f'{checkpoint} is no run directory, so task, template and sampling are unknown; give --config=FILE')
    else:
        if not is_published:
            config.model.path = str(checkpoint)
        config = config_lib.resolve(config)
    if servers and engine == 'jax':
        raise ValueError('--servers are asked with --engine=vllm; leave one of the two out')
    config.rollout.engine = 'vllm' if servers else engine or config.rollout.engine
    config.rollout.servers = tuple(servers or config.rollout.servers)
    if config.rollout.servers and not os.environ.get(TOKEN_VARIABLE):
        raise ValueError(f'{TOKEN_VARIABLE} is not set; put the token that the servers were started with there')
    custom_reward.resolve(config.task.reward)  # now rather than when the first responses are there
    model_config = hf.read_config(config.model.path, config.model.dtype)
    tokenizer = load_tokenizer(config.model.path)
    graph, shapes = hf.abstract_params(model_config)
    mesh = parallel.make_mesh(1, -1, 1)
    sharding = parallel.parameter_sharding(mesh, shapes)
    if is_run:
        checkpoints = Checkpoints(checkpoint / 'checkpoints', keep=None)
        like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, np.float32, sharding=s), shapes, sharding)
        step = checkpoints.latest_step()
        if step is None:
            raise FileNotFoundError(f'{checkpoint / "checkpoints"} holds no complete checkpoint')
        output = checkpoint / 'evaluation' / f'{step:06d}'
    elif is_published:
        manifest = read_manifest(checkpoint)
        check_model(manifest, SimpleNamespace(**architecture(model_config)))
        step, output = manifest.version, checkpoint.with_name(f'{checkpoint.name}_evaluation')
    else:
        hf.check_weights(checkpoint, model_config)
        step, output = 0, checkpoint / 'evaluation'

    def start(output: Path) -> Engine:
        if is_run:
            params = checkpoints.restore_params(like)[0]
        else:
            read = read_published if is_published else hf.load_params
            params = read(checkpoint, model_config, sharding)
        ends = stop_tokens(config.model.path, tokenizer)
        engine = build_engine(config, model_config, graph, ends, mesh, output)
        engine.load(params, step)
        return engine

    return Evaluated(config, tokenizer, step, output, start)


def read_published(directory: Path, config: ModelConfig, sharding: Any) -> Any:
    """A published policy's parameters as `hf.load_params` gives them. Raises RefusedPolicy for a damaged one."""
    # By way of a Hugging Face directory, so that one place knows how their tensors make a parameter tree.
    with tempfile.TemporaryDirectory() as hf_directory:
        save_file(dict(read_tensors(directory, read_manifest(directory))), Path(hf_directory) / 'model.safetensors')
        return hf.load_params(hf_directory, config, sharding)
