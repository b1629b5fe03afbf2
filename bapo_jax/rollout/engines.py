"""Starts the engine that a config names: the in-process one, or a client of vLLM servers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from ml_collections import ConfigDict

from bapo_jax.hosts import Hosts
from bapo_jax.models import hf
from bapo_jax.models.qwen import ModelConfig
from bapo_jax.rollout.engine import Engine
from bapo_jax.rollout.jax_engine import JaxEngine
from bapo_jax.rollout.supervise import SupervisedServer
from bapo_jax.rollout.token_guard import TOKEN_VARIABLE
from bapo_jax.rollout.vllm_engine import VllmEngine

POLICIES = 'policy'  # the folder of published policies, in the directory of a run or an evaluation


def start_engine(
    config: ConfigDict, model: ModelConfig, graph: Any, ends: tuple[int, ...], mesh: Mesh, workdir: Path, hosts: Hosts = Hosts()
) -> Engine:
    """The engine that `config` names. With engine 'vllm' and no servers listed, starts a server, which takes a minute."""
    r, e = config.rollout, config.evaluate
    if r.engine == 'jax':
        return JaxEngine(graph, model, ends, r.rows, max(r.max_prompt_tokens, e.max_prompt_tokens), mesh)
    servers, token = list(r.servers), os.environ.get(TOKEN_VARIABLE)
    if not servers:
        stated = ['--hf-overrides', json.dumps(changes)] if (changes := hf.overrides(config.model)) else []
        print('starting a vLLM server …', flush=True)
        servers = SupervisedServer(
            config.model.path,
            workdir / 'server.log',
            dtype=r.dtype,
            max_tokens=max(r.max_prompt_tokens + r.max_response_tokens, e.max_prompt_tokens + e.max_response_tokens),
            memory=r.server_memory,
            deadline_s=r.deadline_s,
            extra=(*stated, *r.server_args),
        )
        servers.start()
        token = servers.token
    return VllmEngine(
        servers, workdir / POLICIES, model, token=token, dtype=r.dtype, stop_tokens=ends, concurrency=r.concurrency,
        deadline_s=r.deadline_s, hosts=hosts,
    )  # fmt: skip
