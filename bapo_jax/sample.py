"""Asks a policy questions, and prints its answers with their log-probs.

    python -m bapo_jax.sample --checkpoint=runs/x 'What is 41 - 12?' --samples=4
    # FILE has one question a line, without its line end; - is standard input
    python -m bapo_jax.sample --checkpoint=HF_DIRECTORY --questions=FILE --temperature=0
    python -m bapo_jax.sample --checkpoint=runs/quickstart --raw $'3 5 7=15\\n'

Each question becomes a user message in the tokenizer's chat template. With --raw, or if there is no chat
template, the policy continues the question's text. For a run, π_θ of the newest checkpoint answers (not the
rollout policy α). With the in-process engine, the same command and --seed give the same answers.
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

from bapo_jax.config import default_config
from bapo_jax.evaluate import load_for_evaluation
from bapo_jax.groups import Author, Begun, Prompt, Response
from bapo_jax.inputs import positions_suffice
from bapo_jax.machine import cli, hub, terminal
from bapo_jax.models import hf
from bapo_jax.policies import BASE_HELP, find_policy
from bapo_jax.rollout.engine import EVALUATION, Draw, RolloutError, Sampling
from bapo_jax.rollout.episodes import NoReply
from bapo_jax.run.log.responses import spans_of
from bapo_jax.tasks.turns import chat

FLAGS = flags.FLAGS


def asked(questions: Sequence[str], tokenizer: Any, raw: bool) -> list[Prompt]:
    """The questions as prompts.

    Raises ValueError if one is empty or, in the chat template, contains a special token.
    """
    prompts = []
    for i, question in enumerate(questions):
        if not question.strip():
            raise ValueError(f'question {i + 1} is empty; give it a text')
        text = question if raw else chat(tokenizer, [{'role': 'user', 'content': question}])
        tokens = tokenizer(text, add_special_tokens=False)['input_ids']
        prompts.append(Prompt(i, 'sample', np.asarray(tokens, np.int32), {'question': question}))
    return prompts


def row(tokenizer: Any, prompt: Prompt, response: Response) -> dict[str, Any]:
    """What --json prints for an answer. Tokens and log-prob are without a tool's replies."""
    spans = {'spans': spans_of(response)} if response.by(Author.ENVIRONMENT).any() else {}
    return {
        'question': prompt.ground_truth['question'],
        'response': tokenizer.decode(response.tokens),
        'finish': response.finish,
        'tokens': int(np.count_nonzero(~response.by(Author.ENVIRONMENT))),
        'logp': float(response.logp.sum(dtype=np.float64)),
        **spans,
    }


def print_answers(tokenizer: Any, prompt: Prompt, responses: Sequence[Response]) -> None:
    """Prints the prompt and each answer, with its log-prob in nats, in all and per token."""
    console = terminal.console(highlight=False)
    console.rule(style='dim')
    console.print(tokenizer.decode(prompt.tokens), style='dim', soft_wrap=True)
    for number, response in enumerate(responses, 1):
        said = row(tokenizer, prompt, response)
        logp, tokens = said['logp'], said['tokens']
        console.print(
            f'{number}: {tokens} tokens, {said["finish"]}, log-prob {logp:.2f}, {logp / tokens:.3f}/token',
            style='bold',
        )
        for span in response.spans if 'spans' in said else ():
            style = 'dim' if span.author == Author.ENVIRONMENT else None  # a tool's reply
            console.print(tokenizer.decode(span.tokens), style=style, soft_wrap=True, end='')
        console.print('' if 'spans' in said else said['response'], soft_wrap=True)


def questions_of(words: Sequence[str], file: str | None) -> list[str]:
    """The questions on the command line, then those in the file.

    Raises ValueError if there are none, and OSError if the file cannot be read.
    """
    lines = []
    if file:
        lines = (sys.stdin.read() if file == '-' else Path(file).read_text('utf-8')).splitlines()
    found = [*words, *(line for line in lines if line.strip())]
    if not found:
        raise ValueError(
            "no question; give one after the flags, such as 'What is 3 + 4?', or --questions=FILE with one "
            'per line'
        )
    return found


def base_config(response_tokens: int) -> ConfigDict:
    """The config for a policy without a run; answers depend only on the model's own settings."""
    config = default_config()
    config.steps, config.rollout.rows = 1, 32
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = 1, response_tokens
    return config


def main(argv: Sequence[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    try:
        questions = questions_of(argv[1:], FLAGS.questions)
        checkpoint = Path(
            hub.model_folder(FLAGS.checkpoint, '--checkpoint')
            if hub.is_model(FLAGS.checkpoint)
            else FLAGS.checkpoint
        )
        config = (
            None if find_policy(checkpoint).run_config is not None else base_config(FLAGS.max_response_tokens)
        )
        base = Path(FLAGS.base) if FLAGS.base else None
        policy = load_for_evaluation(checkpoint, config, FLAGS.engine, FLAGS.servers, base)
        prompts = asked(questions, policy.tokenizer, FLAGS.raw or not policy.tokenizer.chat_template)
        longest = max(len(prompt.tokens) for prompt in prompts)
        policy.config.evaluate.max_prompt_tokens = policy.config.rollout.max_prompt_tokens = longest
        policy.config.evaluate.max_response_tokens = policy.config.rollout.max_response_tokens = (
            FLAGS.max_response_tokens
        )
        model = hf.read_config(policy.config.model.path, stated=hf.overrides(policy.config.model))
        positions_suffice(policy.config, model)
        sampling = Sampling(FLAGS.temperature, FLAGS.max_response_tokens, FLAGS.top_p)
        with tempfile.TemporaryDirectory(prefix='bapo_sample') as workdir:
            engine = policy.start(Path(workdir))
            try:
                answers = engine.ask(
                    list(map(Begun, prompts)),
                    FLAGS.samples,
                    sampling,
                    [Draw(FLAGS.seed, 0, EVALUATION)] * len(prompts),
                )
                for prompt, answer in zip(prompts, answers, strict=True):
                    responses = answer.result()
                    if FLAGS.json:
                        for response in responses:
                            print(json.dumps(row(policy.tokenizer, prompt, response)), flush=True)
                    else:
                        print_answers(policy.tokenizer, prompt, responses)
            finally:
                engine.close()
    except NoReply as e:
        sys.exit(
            f"error: {e}; the ground truth of a question is {{'question': text}} here: make the task's "
            '`reply` return None if another field is missing'
        )
    except (ValueError, OSError, RolloutError) as e:
        sys.exit(f'error: {e}')


def run() -> None:
    """The command: defines the flags and runs `main`."""
    flags.DEFINE_string(
        'checkpoint',
        None,
        'A run, a policy (runs/x/policy/000123), a Hugging Face directory, a PEFT adapter, or a hub name.',
        required=True,
    )
    flags.DEFINE_string('base', None, BASE_HELP)
    flags.DEFINE_string(
        'questions',
        None,
        'File with one question per line, in addition to those on the command line; -: standard input.',
    )
    flags.DEFINE_bool(
        'raw', False, 'Do not apply the chat template: the policy continues the text of the question.'
    )
    flags.DEFINE_integer('samples', 1, 'Responses per question.', lower_bound=1)
    flags.DEFINE_float('temperature', 1.0, 'Sampling temperature; 0: greedy.', lower_bound=0.0)
    flags.DEFINE_float('top_p', 1.0, 'Nucleus (top-p) sampling threshold; 1: off.', 1e-6, 1.0)
    flags.DEFINE_integer('max_response_tokens', 256, 'Longest response in tokens.', lower_bound=1)
    flags.DEFINE_integer('seed', 0, 'Sampling seed.')
    flags.DEFINE_bool('json', False, 'Print one JSON object per response.')
    flags.DEFINE_enum(
        'engine',
        None,
        ['jax', 'vllm'],
        'Engine that generates the responses; default: that of the run, or jax (in-process).',
    )
    flags.DEFINE_list('servers', None, 'URLs of running vLLM servers that no trainer uses.')
    cli.start(main)


if __name__ == '__main__':
    run()
