"""From a config to the things a loop works with, cheapest checks first; and the rules of a run directory."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bapo_jax import config as config_lib
from bapo_jax import parallel
from bapo_jax.checkpoint import Checkpoints
from bapo_jax.groups import Prompt
from bapo_jax.learner.update import Learner
from bapo_jax.metrics import write_text
from bapo_jax.models import hf
from bapo_jax.models.qwen import ModelConfig
from bapo_jax.models.tokenizer import load_tokenizer, stop_tokens
from bapo_jax.prompts.selector import ShuffledEpochs
from bapo_jax.replay.buffer import ReplayBuffer
from bapo_jax.rollout.engine import Engine
from bapo_jax.rollout.jax_engine import JaxEngine
from bapo_jax.rollout.supervise import SupervisedServer
from bapo_jax.rollout.token_guard import TOKEN_VARIABLE
from bapo_jax.rollout.vllm_engine import VllmEngine
from bapo_jax.tasks import encode_prompts, get_task


class Setup(NamedTuple):
    config: ConfigDict  # resolved
    tokenizer: Any
    training_prompts: list[Prompt]
    selector: ShuffledEpochs
    learner: Learner
    engine: Engine
    buffer: ReplayBuffer
    initial_params: Any  # θ_0 on the mesh; also the reference policy
    steps: int


def build(config: ConfigDict, workdir: Path) -> Setup:
    """Checks the config, reads data and model, and claims the run directory, in that order; devices come last.

    Raises ValueError or FileNotFoundError, naming the field and the remedy, before anything is written.
    """
    config = config_lib.resolve(config)
    config_lib.model_path_exists(config)
    model_config = hf.read_config(config.model.path, config.model.dtype)
    tokenizer = load_tokenizer(config.model.path)
    ends = stop_tokens(config.model.path, tokenizer)
    task = get_task(config.task.name)
    truths = task.training_problems(config.task.train, limit=config.task.limit, seed=config.task.seed)
    prompts = encode_prompts(
        config.task.name, truths, tokenizer, template=config.task.template, max_prompt_tokens=config.rollout.max_prompt_tokens
    )
    selector = ShuffledEpochs(prompts, config.learner.batch_groups, config.seed)
    for name in config.evaluate.benchmarks:
        task.benchmark(name)
    if config.evaluate.track_prompts > len(prompts):
        raise ValueError(f'evaluate.track_prompts={config.evaluate.track_prompts} exceeds the {len(prompts)} training prompts')
    mesh = parallel.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
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
    graph, shapes = hf.abstract_params(model_config)
    sharding = parallel.parameter_sharding(mesh, shapes)
    params = hf.load_params(config.model.path, model_config, sharding)
    claim(workdir, config, {'dataset': fingerprint(prompts), 'tokenizer': fingerprint_tokenizer(tokenizer)})
    return Setup(
        config=config,
        tokenizer=tokenizer,
        training_prompts=prompts,
        selector=selector,
        learner=Learner(graph, config.learner, config.rollout.temperature, mesh),
        engine=build_engine(config, model_config, graph, ends, mesh, workdir),
        buffer=ReplayBuffer(
            config.replay.bad_capacity, config.replay.high_capacity, config.replay.high_recent_steps, config.replay.c1
        ),
        initial_params=params,
        steps=config.steps or config.epochs * selector.batches_per_epoch,
    )


def build_engine(config: ConfigDict, model: ModelConfig, graph: Any, ends: tuple[int, ...], mesh: Mesh, workdir: Path) -> Engine:
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
        servers, workdir / 'policy', model, token=token, dtype=r.dtype, stop_tokens=ends, concurrency=r.concurrency,
        deadline_s=r.deadline_s,
    )  # fmt: skip


def claim(workdir: Path, config: ConfigDict, fingerprints: dict[str, str]) -> None:
    """Writes config.json into a new run directory; of a used one, checks that this is the same run.

    Raises ValueError, naming what differs, for a run directory of another config, dataset or tokenizer.
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


def load_for_evaluation(checkpoint: Path, config: ConfigDict | None) -> tuple[Engine, Any, ConfigDict, int]:
    """(engine that holds the policy, tokenizer, config, steps trained) of a run directory or a Hugging Face directory.

    Raises ValueError where a directory that is no run comes without a config, FileNotFoundError where there is no policy.
    """
    if not checkpoint.is_dir():
        raise FileNotFoundError(f'--checkpoint={str(checkpoint)!r} is not a directory; give a run or a Hugging Face directory')
    is_run = (checkpoint / 'checkpoints').is_dir()
    if is_run:
        config = ConfigDict(json.loads((checkpoint / 'config.json').read_text('utf-8')))
    elif config is None:
        raise ValueError(f'{checkpoint} is no run directory, so task, template and sampling are unknown; give --config=FILE')
    else:
        config.model.path = str(checkpoint)
        config = config_lib.resolve(config)
    model_config = hf.read_config(config.model.path, config.model.dtype)
    tokenizer = load_tokenizer(config.model.path)
    graph, shapes = hf.abstract_params(model_config)
    mesh = parallel.make_mesh(1, -1, 1)
    sharding = parallel.parameter_sharding(mesh, shapes)
    if is_run:
        like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, np.float32, sharding=s), shapes, sharding)
        params, step = Checkpoints(checkpoint / 'checkpoints', keep=None).restore_params(like)
    else:
        params, step = hf.load_params(checkpoint, model_config, sharding), 0
    engine = JaxEngine(graph, stop_tokens(config.model.path, tokenizer), config.rollout.rows, parallel.row_sharding(mesh))
    engine.load(params, step)
    return engine, tokenizer, config, step
