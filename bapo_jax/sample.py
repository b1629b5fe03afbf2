"""Asks a policy questions, and prints its answers with their log-probs.

    python -m bapo_jax.sample --checkpoint=runs/x 'What is 41 - 12?' --samples=4
    python -m bapo_jax.sample --checkpoint=HF_DIRECTORY --questions=FILE --temperature=0     # a line each, without its end; - is standard input
    python -m bapo_jax.sample --checkpoint=runs/quickstart --raw $'3 5 7=15\\n'

A question is a user's message of the tokenizer's chat template. With --raw, or where there is no such template, it is the text that the
policy goes on from. Of a run, π_θ of the newest checkpoint answers (not the rollout policy α). The draws are those of --seed: the same
command gives the same answers, with the in-process engine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags, logging
from ml_collections import ConfigDict

from bapo_jax import cli, hub, terminal
from bapo_jax.config import default_config
from bapo_jax.evaluate import load_for_evaluation
from bapo_jax.groups import Prompt, Response
from bapo_jax.inputs import positions_suffice
from bapo_jax.models import hf
from bapo_jax.policies import find_policy
from bapo_jax.rollout.engine import EVALUATION, Draw, RolloutError, Sampling
from bapo_jax.tasks.turns import chat

FLAGS = flags.FLAGS


def asked(questions: Sequence[str], tokenizer: Any, raw: bool) -> list[Prompt]:
    """The questions as the policy reads them. Raises ValueError where one is empty or, as a turn, holds a special token."""
    prompts = []
    for i, question in enumerate(questions):
        if not question.strip():
            raise ValueError(f'question {i + 1} is empty; give a text')
        text = question if raw else chat(tokenizer, [{'role': 'user', 'content': question}])
        tokens = tokenizer(text, add_special_tokens=False)['input_ids']
        prompts.append(Prompt(i, 'sample', np.asarray(tokens, np.int32), {'question': question}))
    return prompts


def row(tokenizer: Any, prompt: Prompt, response: Response) -> dict[str, Any]:
    """What --json prints of an answer."""
    return {
        'question': prompt.ground_truth['question'],
        'response': tokenizer.decode(response.tokens),
        'finish': response.finish,
        'tokens': len(response.tokens),
        'logp': float(response.logp.sum(dtype=np.float64)),
    }


def print_answers(tokenizer: Any, prompt: Prompt, responses: Sequence[Response]) -> None:
    """The prompt's text and each answer, with the nats of all its tokens and of one."""
    console = terminal.console(highlight=False)
    console.rule(style='dim')
    console.print(tokenizer.decode(prompt.tokens), style='dim', soft_wrap=True)
    for number, response in enumerate(responses, 1):
        said = row(tokenizer, prompt, response)
        logp, tokens = said['logp'], said['tokens']
        console.print(f'{number}: {tokens} tokens, {said["finish"]}, log-prob {logp:.2f}, {logp / tokens:.3f} a token', style='bold')
        console.print(said['response'], soft_wrap=True)


def questions_of(words: Sequence[str], file: str | None) -> list[str]:
    """Those of the command line, then those of the file. Raises ValueError where there are none, OSError where no file is."""
    lines = []
    if file:
        lines = (sys.stdin.read() if file == '-' else Path(file).read_text('utf-8')).splitlines()
    found = [*words, *(line for line in lines if line.strip())]
    if not found:
        raise ValueError("no question; give one behind the flags, 'What is 3 + 4?', or --questions=FILE with one a line")
    return found


def base_config(response_tokens: int) -> ConfigDict:
    """For a policy of no run: nothing of it decides an answer but the model's own settings."""
    config = default_config()
    config.steps, config.rollout.rows = 1, 32
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = 1, response_tokens
    return config


def main(argv: Sequence[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    try:
        questions = questions_of(argv[1:], FLAGS.questions)
        checkpoint = Path(hub.model_folder(FLAGS.checkpoint, '--checkpoint') if hub.is_model(FLAGS.checkpoint) else FLAGS.checkpoint)
        config = None if find_policy(checkpoint).run_config is not None else base_config(FLAGS.max_response_tokens)
        policy = load_for_evaluation(checkpoint, config, FLAGS.engine, FLAGS.servers)
        prompts = asked(questions, policy.tokenizer, FLAGS.raw or not policy.tokenizer.chat_template)
        longest = max(len(prompt.tokens) for prompt in prompts)
        policy.config.evaluate.max_prompt_tokens = policy.config.rollout.max_prompt_tokens = longest
        policy.config.evaluate.max_response_tokens = policy.config.rollout.max_response_tokens = FLAGS.max_response_tokens
        model = hf.read_config(policy.config.model.path, stated=hf.overrides(policy.config.model))
        positions_suffice(policy.config, model)
        sampling = Sampling(FLAGS.temperature, FLAGS.max_response_tokens, FLAGS.top_p)
        with tempfile.TemporaryDirectory(prefix='bapo_sample') as workdir:
            engine = policy.start(Path(workdir))
            try:
                answers = engine.ask(prompts, FLAGS.samples, sampling, [Draw(FLAGS.seed, 0, EVALUATION)] * len(prompts))
                for prompt, answer in zip(prompts, answers, strict=True):
                    responses = answer.result()
                    if FLAGS.json:
                        for response in responses:
                            print(json.dumps(row(policy.tokenizer, prompt, response)), flush=True)
                    else:
                        print_answers(policy.tokenizer, prompt, responses)
            finally:
                engine.close()
    except (ValueError, OSError, RolloutError) as e:
        sys.exit(f'error: {e}')


def run() -> None:
    """The command: its flags, then `main`."""
    flags.DEFINE_string('checkpoint', None, 'A run, policy (runs/x/policy/000123), Hugging Face directory or name.', required=True)
    flags.DEFINE_string('questions', None, 'File with a question a line, beside those of the command line; - is standard input.')
    flags.DEFINE_bool('raw', False, 'A question is the text that the policy goes on from, without the chat template.')
    flags.DEFINE_integer('samples', 1, 'Answers to each question.', lower_bound=1)
    flags.DEFINE_float('temperature', 1.0, 'Of sampling; 0: the likeliest token.', lower_bound=0.0)
    flags.DEFINE_float('top_p', 1.0, 'Nucleus sampling threshold; 1: none.', 1e-6, 1.0)
    flags.DEFINE_integer('max_response_tokens', 256, 'Tokens of an answer.', lower_bound=1)
    flags.DEFINE_integer('seed', 0, 'Of the draws.')
    flags.DEFINE_bool('json', False, 'Print a JSON row an answer.')
    flags.DEFINE_enum('engine', None, ['jax', 'vllm'], 'Who answers; default: the in-process engine, or as the run says.')
    flags.DEFINE_list('servers', None, 'URLs of running vLLM servers that no trainer uses.')
    cli.start(main)


if __name__ == '__main__':
    run()
