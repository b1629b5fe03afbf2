"""What is remembered and what is trained on. A row that builds its batch otherwise has a file here.

Its class has these functions:

    hard_prompts(step, rng) -> prompts                      those that π_θ re-evaluates at this step; [] for none
    compose(step, fresh, reevaluated, rng, score) -> Batch  the batch that the step trains on
    add(step, fresh, batch)                                 remembers the step, after its update
    metrics(step), state(), restore(arrays)                 for the log and the checkpoint

`score(batch)` gives log-probs under π_θ, where a row wants them. `rng(purpose)` is the step's own numpy generator for one of
PURPOSES, so no random state is saved.
"""

PURPOSES = ('filter', 'reevaluate', 'compose', 'shuffle', 'failures')  # a purpose's place is part of its generator's seed: append only
