"""Replay: what a row remembers and what it trains on. Each way to build a batch has a file here.

Its class has these methods:

    hard_prompts(step, rng) -> begun groups                 those that π_θ re-evaluates at this step, or []
    compose(step, fresh, reevaluated, rng, score) -> Batch  the batch that the step trains on
    times_trained(batch)                                    how often each group was trained on; before `add`
    add(step, fresh, batch)                                 remembers the step, after its update
    metrics(step), state(), restore(arrays)                 for the log and the checkpoint

`score(batch)` gives log-probs under π_θ, for rows that need them. `rng(purpose)` is the step's own NumPy
generator for one of PURPOSES, so no random state is saved.
"""

# The index of a purpose is part of its generator's seed: append only.
PURPOSES = ('filter', 'reevaluate', 'compose', 'shuffle', 'failures')
