"""What is remembered and what is trained on. A row that builds its batch otherwise has a file, whose class has these functions:

    hard_prompts(step, rng) -> prompts                      those that π_θ is to answer at this step; [] for none
    compose(step, fresh, reevaluated, rng) -> Batch         what is trained on
    add(step, fresh, batch)                                 remembers the step, after it was trained on
    metrics(step), state(), restore(arrays)                 for the log and the checkpoint

`rng(purpose)` is the step's own numpy generator for one of PURPOSES, so nothing random has to be saved.
"""

PURPOSES = ('filter', 'reevaluate', 'compose', 'shuffle')  # the place of each is part of its generator's seed: append only
