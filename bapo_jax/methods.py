"""Every method is four choices: which prompts, which policy answers, what is trained on, how it learns.

One row each, as overrides of the config's fields; a new method is a new row, not a new trainer.
`python -m bapo_jax.methods` prints the table. Rows that configs select with `--config=FILE:METHOD`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ml_collections import ConfigDict


class Method(NamedTuple):
    """Overrides of config fields, by choice. Prompt selection is shuffled epochs in every row so far, so it sets nothing."""

    summary: str
    schedule: dict[str, Any]
    batch: dict[str, Any]
    learning: dict[str, Any]


# GRPO as the paper's baseline runs it (verl): ratio against the policy at the step's start, KL to the initial policy.
_GRPO = Method(
    summary='GRPO: every fresh group, once',
    schedule={'rollout.sync_every': 1},
    batch={'replay.fresh_filter': 'none', 'replay.use_x2': False, 'replay.use_x3': False},
    learning={'learner.anchor': 'proximal', 'learner.kl_target': 'reference'},
)

# Algorithm 1 with Table 3; the ambiguities are settled as docs/method.md says.
_BAPO = Method(
    summary='BAPO, the paper: delayed rollouts, filtered fresh groups (X1), re-evaluated hard prompts (X2), replay (X3)',
    schedule={'rollout.sync_every': 5, 'replay.reevaluate_every': 5},
    batch={
        'replay.fresh_filter': 'gaussian',
        'replay.use_x2': True,
        'replay.use_x3': True,
        'replay.c1': 1 / 8,
        'replay.c2': (4 / 8, 1 / 8),
        'replay.c3': (5 / 8, 2 / 8),
        'replay.thresholds': 'easy_to_hard',
    },
    learning={'learner.anchor': 'behaviour', 'learner.kl_target': 'behaviour'},
)

# BAPO as measured at 0.8M parameters: beside each choice its row of studies/first_proof, and those it was chosen over.
_TUNED = _BAPO._replace(
    summary='the settings that studies/first_proof supports: no delay, every mixed group trained on and replayed, none asked again',
    schedule={'rollout.sync_every': 1},  # centre; v2_behaviour_lr2e-4, v5_behaviour_lr2e-4
    batch={
        'replay.fresh_filter': 'range',  # centre; gaussian, uniform, unfiltered
        'replay.use_x2': False,  # wide_no_x2; wide scores alike and takes a tenth more responses
        'replay.use_x3': True,  # wide; no_x3
        'replay.c2': (0.0,),  # wide, of all mixed groups; centre
        'replay.c3': (1.0,),
    },
    learning={
        'learner.anchor': 'behaviour',  # centre; v1_proximal_lr2e-4, v1_decoupled_lr2e-4
        'learner.kl_target': 'behaviour',  # centre; kl_reference, kl_none
    },
)

METHODS: dict[str, Method] = {
    'grpo': _GRPO,
    'grpo_v5': _GRPO._replace(
        summary='off-policy GRPO: rollouts from a policy up to v steps old (Mroueh et al. 2025)',
        schedule={'rollout.sync_every': 5},
        learning={**_GRPO.learning, 'learner.anchor': 'behaviour'},
    ),
    'bapo': _BAPO,
    'bapo_tuned': _TUNED,
    'bapo_mini': _BAPO._replace(
        summary='the parameter-free Mini-test of section 5.2: all-wrong prompts re-evaluated, half-right groups replayed',
        schedule={'rollout.sync_every': 2, 'replay.reevaluate_every': 2},
        batch={**_BAPO.batch, 'replay.fresh_filter': 'range', 'replay.c1': 0.0, 'replay.c2': (0.5,), 'replay.c3': (0.5,)},
        learning={'learner.anchor': 'behaviour', 'learner.kl_target': 'none', 'learner.clip_high': 0.28, 'learner.dual_clip': 10.0},
    ),
    'bapo_no_x2': _BAPO._replace(summary='BAPO without re-evaluation', batch={**_BAPO.batch, 'replay.use_x2': False}),
    'bapo_no_x3': _BAPO._replace(summary='BAPO without replay', batch={**_BAPO.batch, 'replay.use_x3': False}),
}


def apply_method(config: ConfigDict, name: str) -> None:
    """Writes a row's choices into the config. Raises ValueError for an unknown name."""
    if name not in METHODS:
        raise ValueError(f'method {name!r} is unknown; choose one of {", ".join(METHODS)}')
    row = METHODS[name]
    config.update_from_flattened_dict({**row.schedule, **row.batch, **row.learning})
    config.method = name


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table('method', 'which policy answers', 'what is trained on', 'how it learns', title='Methods', show_lines=True)
    for name, row in METHODS.items():
        choices = ('\n'.join(f'{k.split(".")[1]} {v}' for k, v in part.items()) for part in (row.schedule, row.batch, row.learning))
        table.add_row(f'[bold]{name}[/]\n{row.summary}', *choices)
    Console().print(table)


if __name__ == '__main__':
    main()
