"""Rules between the fields of the rollout section."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from ml_collections import ConfigDict

from bapo_jax.config.field import Need
from bapo_jax.rollout.vllm.gpus import named, parallel_flags
from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE


def check_rollout(c: ConfigDict, need: Need) -> None:
    r = c.rollout
    need(
        not (r.overlap and (r.mixture.share or r.refill_batches > 1)),
        f'rollout.overlap=True with rollout.mixture.share={r.mixture.share} and '
        f'rollout.refill_batches={r.refill_batches}: the prompts of a step, or the policies that answer '
        'them, are only known when that step begins; set rollout.overlap=False',
    )
    need(
        not r.most_behind or r.overlap,
        f'rollout.most_behind={r.most_behind} requests steps ahead, which rollout.overlap=False excludes; '
        'set rollout.overlap=True, or rollout.most_behind=0',
    )
    need(
        not r.most_behind or c.prompts.selector == 'shuffled',
        f'rollout.most_behind={r.most_behind} requests a step before the results of the one before it are '
        f'known, from which prompts.selector={c.prompts.selector!r} learns; set prompts.selector=shuffled, '
        'or rollout.most_behind=0',
    )
    need(
        r.step_share == 1 or not (r.mixture.share or r.refill_batches > 1),
        f'rollout.step_share={r.step_share} continues responses in a later step, which '
        f'rollout.mixture.share={r.mixture.share} and rollout.refill_batches={r.refill_batches} do not '
        'support; set rollout.step_share=1.0',
    )
    need(
        r.step_share == 1 or not r.overlap or c.prompts.selector == 'shuffled',
        f'rollout.step_share={r.step_share} with rollout.overlap=True: prompts.selector='
        f'{c.prompts.selector!r} chooses prompts before the step that continues them is known; set '
        'rollout.overlap=False, or prompts.selector=shuffled',
    )
    need(
        not (r.mixture.share and r.sync_every > 1),
        f'rollout.mixture.share={r.mixture.share} draws from recent rollout policies, and '
        f'rollout.sync_every={r.sync_every} would make them much older; set rollout.sync_every=1',
    )
    need(
        not (r.mixture.share and (c.replay.use_x2 or c.replay.kind == 'exgrpo')),
        f'rollout.mixture.share={r.mixture.share} does not support re-evaluation; set replay.use_x2=False, '
        'and another replay.kind than exgrpo',
    )
    need(
        r.refill_batches == 1 or c.replay.fresh_filter == 'range',
        f'rollout.refill_batches={r.refill_batches} needs a filter that keeps only mixed groups, not '
        f'replay.fresh_filter={c.replay.fresh_filter!r}; set replay.fresh_filter=range',
    )
    need(
        r.group_size >= 2,
        f'rollout.group_size={r.group_size}: a group advantage needs at least 2 responses; raise it',
    )
    for server in r.servers:
        check_server(server, 'rollout.servers')
    need(
        not (r.servers and r.gpus),
        f'rollout.gpus={r.gpus} is only for servers that the run starts, but rollout.servers={r.servers} are '
        'running; remove one of the two',
    )
    for name, value in (('gpus', r.gpus), ('server.memory', r.server.memory)):
        need(
            not value or r.engine == 'vllm',
            f'rollout.{name}={value} is only for servers that the run starts, but rollout.engine={r.engine}; '
            'set rollout.engine=vllm, or remove it',
        )
    check_gpu_words(r, need)
    need(
        not r.servers or bool(os.environ.get(TOKEN_VARIABLE)),
        f'rollout.servers={r.servers}, but {TOKEN_VARIABLE} is not set; set it to the token that the servers '
        'were started with',
    )


def check_gpu_words(r: ConfigDict, need: Need) -> None:
    """Checks that each word lists GPUs, none is listed twice, and vLLM's flags use the same number."""
    try:
        of_servers = [named(word) for word in r.gpus]
        names = [name for gpus in of_servers for name in gpus]
        need(
            len({*names}) == len(names),
            f'rollout.gpus={tuple(r.gpus)} names a GPU twice; give each server its own',
        )
        for gpus in of_servers or [()]:
            parallel_flags(gpus, r.server.args)
    except ValueError as error:
        need(False, str(error))


def check_server(url: str, field: str) -> None:
    """Raises ValueError unless `url` has the form http(s)://HOST[:PORT].

    A user or password is refused, and not shown in the message.
    """
    try:
        parts = urlsplit(url)
        sound = (
            parts.scheme in ('http', 'https')
            and parts.hostname
            and parts.port != 0
            and not parts.query
            and not parts.fragment
        )
    except ValueError:  # bad brackets or a bad port
        parts, sound = None, False
    if '@' in url:
        raise ValueError(
            f'{field} has a URL with a user name or password; remove them: servers only ask for the token in '
            f'{TOKEN_VARIABLE}'
        )
    if not sound:
        raise ValueError(f'{field} has {url!r}; expected http://HOST:PORT')
