"""The mutants. Each old text occurs once in its file, which tests/test_mutants.py holds."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    file: str  # of the checkout
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]  # pytest's arguments


def _of(file: str, *tests: str):
    """A function of (old, new, breaks) to a mutant of that file, to be noticed by tests/`tests`."""
    return lambda old, new, breaks: Mutant(f'bapo_jax/{file}', old, new, breaks, tuple(f'tests/{test}' for test in tests))


_BUFFER = _of('replay/buffer.py', 'replay/test_buffer.py', 'replay/test_bapo.py')
_BAPO = _of('replay/bapo.py', 'replay/test_bapo.py')
_THRESHOLDS = _of('replay/thresholds.py', 'replay/test_thresholds.py')
_FILTERS = _of('replay/filters.py', 'replay/test_filters.py')
_OWN = _of('own/method.py', 'own/test_method.py')
_OWN_REPLAY = _of('replay/own_replay.py', 'own/test_method.py')
_OWN_SURROGATE = _of('learner/own_surrogate.py', 'own/test_method.py')
_OWN_CODE = _of('config/own_code.py', 'own/test_method.py')
_REPO = _of('replay/repo.py', 'replay/test_repo.py')
_POSTERIOR = _of('replay/posterior.py', 'replay/test_posterior.py')
_CONTINUATIONS = _of('replay/continuations.py', 'replay/test_continuations.py')
_CREDIT = _of('learner/credit.py', 'learner/test_credit.py')
_LOSSES = _of('learner/losses.py', 'learner/test_losses.py', 'learner/test_objective.py')
_OBJECTIVE = _of('learner/objective.py', 'learner/test_objective.py', 'learner/test_rows.py')
_TRUST = _of('learner/trust.py', 'learner/test_trust.py')
_HEAD = _of('learner/head.py', 'learner/test_logprobs.py')
_UPDATE = _of('learner/update.py', 'learner/test_update.py', 'learner/test_objective.py')
_PACKING = _of('learner/packing.py', 'learner/test_packing.py')
_OPTIMIZER = _of('learner/optimizer.py', 'learner/test_optimizer.py')
_CRITIC = _of('learner/critic.py', 'learner/test_critic.py')
_MONITORS = _of('run/theory.py', 'run/test_theory.py')
_SCHEDULE = _of('rollout/schedule.py', 'rollout/test_schedule.py')
_ROLLOUTS = _of('rollout/rollouts.py', 'rollout/test_rollouts.py')
_UNFINISHED = _of('rollout/unfinished.py', 'rollout/test_unfinished.py')
_FINISH = _of('rollout/engine.py', 'rollout/test_unfinished.py')
_SLOTS = _of('rollout/inprocess/slots.py', 'rollout/inprocess/test_inprocess.py')
_DRAWING = _of('rollout/inprocess/drawing.py', 'rollout/inprocess/test_inprocess.py')
_GPU_DRAWING = _of('rollout/inprocess/gpu_drawing.py', 'rollout/inprocess/test_gpu_drawing.py')
_COLLECT = _of('rollout/collect.py', 'rollout/test_collect.py')
_FIDELITY = _of('rollout/fidelity.py', 'rollout/test_fidelity.py')
_MOPPS = _of('prompts/mopps.py', 'prompts/test_mopps.py')
_DOTS = _of('prompts/dots.py', 'prompts/test_dots.py')
_NGRAMS = _of('prompts/ngrams.py', 'prompts/test_dots.py')
_ADAPREFIX = _of('prompts/adaprefix.py', 'prompts/test_adaprefix.py')
_PRIORITISED = _of('prompts/prioritised.py', 'prompts/test_prioritised.py')
_ROLLOUT_REPLAY = _of('replay/rollout_replay.py', 'replay/test_rollout_replay.py')
_EPOCHS = _of('prompts/epochs.py', 'prompts/test_epochs.py')
_SHAPING = _of('tasks/shaping.py', 'tasks/test_shaping.py')
_COUNTDOWN = _of('tasks/countdown/task.py', 'tasks/test_countdown.py')
_SCORES = _of('scores.py', 'test_scores.py')
_RUN = _of('run/run.py', 'run/test_run.py')
_CHECKPOINT = _of('run/checkpoint.py', 'run/test_checkpoint.py')
_MEASURES = _of('run/log/measures.py', 'run/test_measures.py')
_EVALUATION = _of('run/samples.py', 'run/test_samples.py')
_GROUPS = _of('groups.py', 'test_groups.py')
_EVALUATE = _of('run/evaluation.py', 'test_evaluate.py')
_STATE = _of('run/state.py', 'run/test_checkpoint.py')
_POLICY = _of('learner/policy.py', 'learner/test_update.py')
_TRAINEE = _of('learner/trainee.py', 'learner/test_critic.py')
_EXPERTS = _of('models/experts.py', 'models/test_experts.py')
_SPLIT = _of('cluster/split.py', 'models/test_experts.py')
_DELTA = _of('models/delta.py', 'models/test_delta.py')
_FILES = _of('models/hf.py', 'models/test_experts.py', 'models/test_hf.py')

MUTANTS = (
    # ---- replay
    _BUFFER("for prompt_id in sorted(age, key=age.__getitem__)[:",
            "for prompt_id in sorted(age, key=age.__getitem__, reverse=True)[:", 'the shared pool evicts the newest'),
    _BUFFER('i: (entry.stored, entry.order) for', 'i: entry.stored for',
            'within a step the shared pool evicts hard prompts first'),
    _BUFFER("if e.stored <= step - self.high_recent_steps]", "if e.stored < step - self.high_recent_steps]",
            'groups are kept a step too long'),
    _BUFFER("entry.best = float(np.fmax(entry.best, group.accuracy))", "entry.best = group.accuracy",
            'the last re-evaluation counts for the best'),
    _BUFFER("and prompt_id not in exclude_ids", "", 'X3 repeats prompts of X1 and X2'),
    _BUFFER("return entry.was_x1 + entry.sampled", "return entry.sampled", 'being X1 counts for no use'),
    _BUFFER("for prompt_id in list(entries)[: max(0, len(entries) - self.capacity[part])]:",
            "for prompt_id in list(entries)[: max(0, len(entries) - self.capacity[part] - 1)]:",
            'a part holds one more than its capacity'),
    _BAPO('better = improved(asked_again, c.c1 if c.improved_rule == \'threshold\' else 0.0)',
          'better = improved(asked_again, c.c1)', "the rule 'mixed' is the threshold's"),
    _BAPO('return [g for g in groups if not g.infra_error and g.accuracy > before[g.prompt.id]]',
          'return [g for g in groups if not g.infra_error and g.accuracy >= before[g.prompt.id]]',
          'as good as before counts as better'),
    _BAPO('self.buffer.uses(g) if o == X3 else 1', 'self.buffer.uses(g) - 1 if o == X3 else 1',
          'a replayed group counts one use less'),
    _BAPO('for x in (c.c2, c.c3))\n        low, high = on_grid', 'for x in (c.c3, c.c2))\n        low, high = on_grid',
          'c2 and c3 swapped'),
    _BAPO('threshold(x, self.r_tot or 0.0, c.thresholds)', 'threshold(x, self.r_tot or 1.0, c.thresholds)', 'the initial r_tot'),
    _BAPO('self.buffer.add(fresh, step, x1={g.prompt.id for g in batch.of_origin(X1)})', 'self.buffer.add(fresh, step)',
          'what was X1 is not noted'),
    _BAPO('low, high, taken, x3_untrained), size - len(x1) - len(x2))', 'low, high, taken, x3_untrained), size - len(x1))',
          'X3 fills the places of X2 once more'),
    _THRESHOLDS('if direction == \'literal\':', 'if direction != \'literal\':', 'the direction of c2 and c3'),
    _THRESHOLDS('decay * r_tot + (1 - decay) * fresh_mean', '(1 - decay) * r_tot + decay * fresh_mean', 'the weights of r_tot'),
    _THRESHOLDS('levels = np.arange(1, G)', 'levels = np.arange(0, G)', 'a level without a right answer is replayed'),
    _FILTERS('float(1 <= k <= G - 1)', 'float(1 <= k <= G)', 'the range filter keeps all-right groups'),
    _FILTERS('/ (2 * 0.2**2))', '/ 0.2**2)', 'the width of the Gaussian filter'),
    _REPO('return list(range(len(rewards)))[-count:]', 'return list(range(len(rewards)))[:count]', 'the oldest for the newest'),
    _REPO('self.history[prompt_id].size == self._config.repo.per_prompt', 'self.history[prompt_id].size > 0',
          'replay before a history is full'),
    _POSTERIOR('step - known.step >= self._after', 'step - known.step > self._after', 'a prompt is asked again a step later'),
    _POSTERIOR('return 1 - all_right.prod(axis=1) - all_wrong.prod(axis=1)', 'return 1 - all_right.prod(axis=1)',
               'all-wrong groups count as mixed'),
    _CONTINUATIONS('(-1 if 2 * right > asked else 1)', '(1 if 2 * right > asked else -1)', 'help rises with success'),
    # ---- functions of the user's
    _OWN('result.shape != rewards.shape or', '', 'an advantage of any shape'),
    _OWN('or not _all_finite(result)', '', 'an advantage that is not finite'),
    _OWN('given.flags.writeable = False', 'pass', "an advantage may change the group's rewards"),
    _OWN('or not 0 <= result <= 1', '', 'a probability above 1'),
    _OWN_REPLAY('if any(g.infra_error for g in batch.groups):', 'if False:', 'a batch with groups that could not be judged'),
    _OWN_REPLAY('        second.restore(state | others)\n', '', 'a state that nobody restores'),
    _OWN_REPLAY('state | others', 'state', "a state is restored without the checkpoint's other arrays"),
    _OWN_REPLAY(" and array.dtype.kind in 'biuf'", '', 'a state that no checkpoint can hold'),
    _OWN_REPLAY('    lanes_of(batch)', '    pass', 'more origins than the objective has lanes'),
    _OWN_REPLAY('any(all(g is not f for f in fresh) for g in batch.of_origin(X1))', 'False', 'old groups as fresh ones'),
    _OWN_SURROGATE('(slope_RxT == 0) & (advantage_RxT != 0)', '(slope_RxT == 0)', 'prompts count as clipped'),
    _OWN_SURROGATE('return -function(ratio_RxT, advantage_RxT)', 'return function(ratio_RxT, advantage_RxT)',
                   'the objective is minimised'),
    _OWN_SURROGATE('np.random.default_rng(0).permutation(len(pairs))', 'np.arange(len(pairs))', 'means over equal ratios hide a mix'),
    _OWN_SURROGATE(' or (slope - np.diag(np.diag(slope))).any()', '', 'gradients may mix tokens'),
    _OWN_SURROGATE('if not at_one > 0:', 'if False:', 'a loss in place of an objective'),
    _OWN_CODE('OWN_FIELDS = (*JUDGES, *ARGUMENTS)', 'OWN_FIELDS = JUDGES', 'the source of a method is not of the run'),
    # ---- learner
    _CREDIT('rewards.std(ddof=1)', 'rewards.std()', 'the population deviation for the sample one'),
    _CREDIT('p = max(p, 1 / len(rewards)) if p > 0 else 1.0', 'p = rewards.mean()', 'the guard of MaxRL\'s mean'),
    _CREDIT('delta[:, -1] += rewards', 'delta[:, 0] += rewards', 'the reward comes with the first token'),
    _CREDIT('1.0 / (max(1, len(lengths)) * limit)', '1.0 / (len(lengths) * max(1, lengths.max()))',
            'Dr.GRPO divides by the longest response'),
    _LOSSES('tokens.centre_RxT - clip.low, tokens.centre_RxT + clip.high)\n    loss_RxT = -jax.lax.stop_gradient',
            '1.0 - clip.low, 1.0 + clip.high)\n    loss_RxT = -jax.lax.stop_gradient', "CISPO without the clip's centre"),
    _LOSSES(' / jnp.maximum(count_RxS, 1.0)', '', "GSPO's sum in place of the mean"),
    _LOSSES('gap_RxT = jnp.clip(target_logp_RxT - logp_RxT,', 'gap_RxT = jnp.clip(logp_RxT - target_logp_RxT,', "k3's direction"),
    _LOSSES('importance_ratio(proximal_logp_RxT - behaviour_logp_RxT), cap)',
            'importance_ratio(behaviour_logp_RxT - proximal_logp_RxT), cap)', 'the importance weight upside down'),
    _CREDIT('(1 - p) ** _FOCAL_GAMMA', 'p ** _FOCAL_GAMMA', 'F-GRPO turned round'),
    _LOSSES('moved_RxT = p_RxT - p_RxT / weight_RxT', 'moved_RxT = weight_RxT - 1.0', "DPPO's probabilities are the ratio"),
    _LOSSES('jnp.minimum(weight_RxT, _MOST_WEIGHT)', 'weight_RxT', "DPPO's weight has no bound"),
    _TRUST('np.flatnonzero(log_ratio * advantage > 0)', 'np.flatnonzero(advantage)', 'M2PO counts all tokens'),
    _TRUST("kind='stable')", "kind='stable')[::-1]", 'M2PO masks the smallest'),
    _TRUST('np.where(log_ratio < 0, factor, 1.0), np.where(log_ratio > 0, factor, 1.0)',
           'np.where(log_ratio > 0, factor, 1.0), np.where(log_ratio < 0, factor, 1.0)', "SAT's sides are swapped"),
    _TRUST('min(1.0, (g.size - g.correct)', 'min(1.0, g.correct', 'GAPO widens the clip for frequent successes'),
    _OBJECTIVE('advantage_RxT = advantage_RxT * factor_RxT', 'pass', "M2PO's mask is not applied"),
    _OBJECTIVE('over_tokens(anchor_RxT - logp_RxT)', 'over_tokens(logp_RxT - anchor_RxT)', 'the sign of actor/ppo_kl'),
    _OBJECTIVE('over_tokens(entropy_RxT)', 'weighted(entropy_RxT)', 'the entropy is logged as the loss weighs it'),
    _OBJECTIVE("total_RxT - numbers['entropy_coef'] * entropy_RxT", "total_RxT + numbers['entropy_coef'] * entropy_RxT",
               'the sign of the entropy bonus'),
    _OBJECTIVE('return 0 < learner.switch_step < step', 'return 0 < learner.switch_step <= step', 'the switch comes a step early'),
    _OBJECTIVE('math.ceil(max(step - 50, 0) / 10)', 'math.floor(max(step - 50, 0) / 10)', "ReMix's λ falls later"),
    _HEAD('g_CxW = (g_CxW / temperature).astype', 'g_CxW = g_CxW.astype', "the head's gradient without 1/temperature"),
    _HEAD('if entropy_gradient:\n', 'if not entropy_gradient:\n', "the head's entropy gradient"),
    _POLICY("'mismatch/logprob_abs_mean': x1['gap'] / tokens", "'mismatch/logprob_abs_mean': first.largest['gap'][0]",
            'the mean mismatch is the largest'),
    _UPDATE('jnp.where(finite, new, old)', 'jnp.where(finite, new, new)', 'an update that is not finite is taken'),
    _PACKING('int(groups / mini_batch_groups + 0.5)', 'int(groups / mini_batch_groups)', 'mini-batches are not rounded'),
    _PACKING('_write(row, at, np.arange(ends[j] - responses[j], ends[j]), prompt, number)',
             '_write(row, at, np.arange(ends[j] - responses[j], ends[j]), 0, number)', "a slot's positions begin at 0"),
    _OPTIMIZER('optax.scale(learner.vision_rate)', 'optax.scale(1.0)', "the tower's own learning rate"),
    _OPTIMIZER('alpha=FINAL_SHARE', 'alpha=0.0', 'a cosine ends at 0'),
    _CRITIC('return 0.5 * jnp.maximum(', 'return 0.5 * jnp.minimum(', "the value loss's pessimism"),
    _CRITIC('1 - (target - value).var() / target.var()', '(target - value).var() / target.var()', 'explained variance upside down'),
    _TRAINEE('hf.load_params(self._model_path, self._model, self._sharding, self.parameters)',
            'jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.parameters)', "the critic's file is not read"),
    _MONITORS('return float(-gap.sum())', 'return float(gap.sum())', "k1's sign"),
    _MONITORS('value = surrogate - factor * K * tv_now - factor * tv_start',
              'value = surrogate - factor * tv_now - factor * tv_start', 'the bound without K'),
    # ---- rollout
    _SCHEDULE("return (step - (self.sync_phase == 'code')) % self.sync_every == 0", 'return step % self.sync_every == 0',
              "the phase 'code'"),
    _SCHEDULE('if behind > self.most_behind:', 'if behind >= self.most_behind > 0:',
              'a step less is requested before a sync'),
    _ROLLOUTS('one_wave = not ahead and self', 'one_wave = self', 'hard prompts of a step requested ahead are lost'),
    _SCHEDULE('rng.integers(1, self.mixture_policies + 1, prompts)', 'rng.integers(1, max(2, self.mixture_policies), prompts)',
              'ages that never reach N'),
    _SCHEDULE('self.switch_step and step > self.switch_step', 'self.switch_step and step >= self.switch_step',
              'a mixture that ends a step early'),
    _ROLLOUTS('np.minimum(self._schedule.ages(step, len(prompts)), len(policies.recent))',
              'np.minimum(self._schedule.ages(step, len(prompts)), max(0, len(policies.recent) - 1))',
              'the oldest kept policy never answers'),
    _ROLLOUTS('for g in fresh) >= c.learner.batch_groups', 'for g in fresh) > c.learner.batch_groups',
              'a refill at exactly B groups'),
    _UNFINISHED('group.prompt.id in taken or len(taken) == most', 'len(taken) == most', 'a step trains on a prompt twice'),
    _UNFINISHED('.spans, j, most)', '.spans, 0, most)', 'continued responses share their draws'),
    _FINISH('goes_on = added == begun.most and', 'goes_on = added >= 0 and', 'responses cut at the limit are continued'),
    _ROLLOUTS('self._selector.observe(new)', 'self._selector.observe(groups)',
              'the selector sees re-evaluations'),
    _DRAWING('kept_BxV = jnp.cumsum(falling_BxV, axis=-1) - falling_BxV < top_p',
             'kept_BxV = jnp.cumsum(falling_BxV, axis=-1) < top_p', 'nucleus sampling drops the last token'),
    _SLOTS('done_B = stopped_B | (count_B == rows.most_B)', 'done_B = stopped_B | (count_B == rows.most_B - 1)',
           'responses end a token early'),
    _DRAWING('return block_B * VOCABULARY_BLOCK + look_up', 'return block_B * VOCABULARY_BLOCK - 1 + look_up', 'a large vocabulary is off by one'),
    _GPU_DRAWING('jnp.where(p_BxV > 0, logits_BxV, _NEVER)', 'logits_BxV', 'a GPU draws from all words with top_p'),
    _COLLECT('if 5 * missing > asked:', 'if 4 * missing > asked:', 'a fifth without a verdict is borne'),
    _COLLECT('budget_s - verify_s)', 'budget_s)', 'the time for verdicts begins anew with each wave'),
    _GROUPS('TRAINED_ON = Author.POLICY, Author.TRACE', 'TRAINED_ON = Author.POLICY, Author.TRACE, Author.PREFIX',
            'given tokens are trained on'),
    _OBJECTIVE('own_RxT = rows.origin > 0', 'own_RxT = rows.sequences.response > 0', "traces count in the policy's metrics"),
    _GROUPS('Author.PLACEHOLDER if other[i] else Author.POLICY', 'Author.POLICY', 'sampled image tokens are trained on'),
    _FIDELITY('if not (mean <= tolerance and high', 'if not (mean <= tolerance or high', 'a wrong policy passes the probe'),
    # ---- prompts, tasks, scores, groups
    _MOPPS('np.argsort((rate - self._target) ** 2', 'np.argsort(rate - self._target', 'the hardest prompts, not the nearest'),
    _MOPPS('self._decay * beta + (1 - self._decay) * PRIOR + (g.size - g.correct)', 'self._decay * beta + (g.size - g.correct)',
           'decay forgets the prior too'),
    _DOTS('np.fill_diagonal(others, -np.inf)', 'pass', 'a reference predicts itself'),
    _DOTS('slope = max(0.0, float', 'slope = max(-9e9, float', 'a negative slope'),
    _DOTS('log_weight = -np.abs(p - TARGET) / self._tau', 'log_weight = np.abs(p - TARGET) / self._tau', 'the easiest and the hardest'),
    _DOTS('first = self._draws % self._cycle * self._batch', 'first = 0', 'the same prompts in each step of a cycle'),
    _DOTS('drawn = rng.permutation(without_replacement(rng, log_weight, self._cycle * self._batch))',
          'drawn = rng.choice(len(p), self._cycle * self._batch)', 'prompts twice, and any'),
    _NGRAMS('hashed[: len(tokens) - n] + tokens[n:]', 'tokens[n:]', 'no n-grams'),
    _ADAPREFIX('self._gain * (0.5 - g.accuracy)', 'self._gain * (g.accuracy - 0.5)', 'more help where it is not needed'),
    _ADAPREFIX('min(len(reference) - 1, round', 'min(len(reference), round', 'the whole reference is given'),
    _ADAPREFIX('(last - self._step / self._steps) / (last - first)', '(last - self._step / self._steps) / last', 'withdrawn too early'),
    _ADAPREFIX("'own': list(self._own.items())", "'own': []", 'own responses are not saved'),
    _PRIORITISED('np.log1p(-success)', 'np.log1p(success)', 'the solved prompts first'),
    _PRIORITISED('[self._seed, self._draws, _PRIORITISED]', '[self._seed, _PRIORITISED]', 'each draw has the same random numbers'),
    _ROLLOUT_REPLAY('for g in fresh[: self._fresh] if', 'for g in fresh if', 'references are trained on'),
    _ROLLOUT_REPLAY('super().add(step, batch.of_origin(X1), batch)', 'super().add(step, fresh, batch)', 'references are kept'),
    _ROLLOUTS('if p.id in references]', 'if p.id in references and not references]', 'references are asked twice'),
    _ROLLOUTS('fresh += references.values()', 'pass', 'references are not counted'),
    _ROLLOUTS('new = known + new', 'new = new + known', 'chosen references are behind the others'),
    _ROLLOUTS('for one in self._selector.begin(fresh))', 'for one in map(Begun, fresh))', 'no prefixes'),
    _EPOCHS('drop_remainder=True).repeat()', 'drop_remainder=True).repeat(2)', 'the prompts end after two epochs'),
    _SHAPING('return -np.clip((lengths - (limit - cache)) / cache', 'return -np.clip((lengths - limit) / cache',
             'no answer is overlong'),
    _COUNTDOWN('elif right == 0:\n                return None', 'elif right == 0:\n                stack.append(left)',
               'division by zero has a value'),
    _SCORES('np.where(judged >= k, 1 - np.prod(wrong / left, axis=1), np.nan)',
            'np.where(judged >= k, 1 - (1 - correct / judged) ** k, np.nan)', 'pass@k is biased'),
    _SCORES('if len(v) == most]', 'if len(v) >= 1]', 'every answer is a majority'),
    _GROUPS('old.verdicts + new.verdicts', 'new.verdicts + old.verdicts', 'verdicts of joined groups are swapped'),
    # ---- models
    _EXPERTS('    if routing.normalised:\n', '    if not routing.normalised:\n', 'weights add up to 1 where they must not'),
    _EXPERTS('_permuted(y_PxD, jnp.argsort(order_P))', '_permuted(y_PxD, order_P)', "a token gets another's result"),
    _EXPERTS('jnp.bincount(expert_P, length=E)', 'jnp.minimum(jnp.bincount(expert_P, length=E), 2 * expert_P.size // E)',
             'an expert drops tokens above its capacity'),
    _SPLIT('grouped.product(gradient_PxO, whole_ExIxO.swapaxes(1, 2), size_E)',
           'grouped.product(gradient_PxO, whole_ExIxO[::-1].swapaxes(1, 2), size_E)', "a gradient through another expert's matrix"),
    _FILES('yield from _in_order(config, there, (*number, i), (*index, place))',
           'yield from _in_order(config, there, (*number, max(i - 1, 0)), (*index, place))', 'a tensor has the number of the one before'),
    _DELTA('there_BxTx1 = (_shifted(segment_BxT, back) == segment_BxT)', 'there_BxTx1 = (_shifted(segment_BxT, back) >= 0)',
           "the convolution sees another sequence's tokens"),
    _DELTA('faded(total_BxMxNxQ, segment_BxMxQ == before_BxM[..., None])', 'faded(total_BxMxNxQ, segment_BxMxQ >= before_BxM[..., None])',
           'a sequence goes on from the state of the one before'),
    _DELTA('jnp.tril(segment_BxMxQ[..., :, None] == segment_BxMxQ[..., None, :])',
           'jnp.tril(segment_BxMxQ[..., :, None] >= segment_BxMxQ[..., None, :])', "a chunk's sequences see each other"),
    _DELTA("in_chunks(segment_BxT, 'edge')", 'in_chunks(segment_BxT)', 'the last state is lost unless chunks are whole'),
    # ---- run
    _RUN('saves = {}, step == self._steps or is_due(c.checkpoint.every, step)', 'saves = {}, is_due(c.checkpoint.every, step)',
         'the last step has no checkpoint'),
    _RUN('if state.skipped_in_a_row >= limit:', 'if state.skipped_in_a_row > limit:', 'one more diverged step is borne'),
    _RUN('            state.skipped_in_a_row = 0\n', '            pass\n', 'skipped steps need not be in a row'),
    _STATE('if self.step == self.switch_step and self.reference is not None:',
                'if self.step == self.switch_step + 1 and self.reference is not None:', 'the reference after the switch'),
    _STATE('*self.recent][: self.keep_recent]', '*self.recent][: self.keep_recent + 1]', 'one policy too many is kept'),
    _CHECKPOINT("critic = policy.get('critic') and _of_tree(policy['critic'], like.critic)", "critic = like.critic",
                "the critic's arrays are not read again"),
    _CHECKPOINT("united(policy['alpha'], theta.frozen)", "united(policy['params'], theta.frozen)", 'α is read as θ'),
    _MEASURES("[step - 1 - r.versions for g", "[step - r.versions for g", 'staleness is a step too large'),
    _EVALUATION('lines[: len(lines) // (chunk * samples) * chunk * samples]', 'lines[: len(lines) // samples * samples]',
                'a half-written chunk is kept'),
    _EVALUATE('Sampling(e.temperature, e.max_response_tokens, e.top_p)', 'Sampling(e.temperature, e.max_response_tokens)',
              'an evaluation ignores top_p'),
    _EVALUATE('[Draw(config.seed, 0, purpose)]', '[Draw(config.seed, 1, purpose)]', "an evaluation's draw"),
)  # fmt: skip
