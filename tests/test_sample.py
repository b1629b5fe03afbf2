"""`python -m bapo_jax.sample`: what is asked and that log-probs are the policy's own."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from scored import logits_in
from small_run import ROOT

from bapo_jax.groups import Author, Response, Span
from bapo_jax.models import hf
from bapo_jax.models.tokenizer import character_tokenizer, load_tokenizer
from bapo_jax.sample import asked, print_answers, questions_of, row
from bapo_jax.weights.publish import publish

BASE = ROOT / 'configs' / 'quickstart_base'
CHAT = '{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>'


def command(*arguments, text='', checkpoint=BASE):
    whole = [sys.executable, '-m', 'bapo_jax.sample', f'--checkpoint={checkpoint}', *arguments]
    environment = os.environ | {'PYTHONPATH': str(ROOT)}
    return subprocess.run(whole, env=environment, input=text, capture_output=True, text=True, timeout=200)


def sample(*arguments, **how):
    done = command(*arguments, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_question_is_a_turn_of_the_chat_or_the_text_itself():
    tokenizer = character_tokenizer(chat_template=CHAT)
    prompts = asked(['2+2?', 'x'], tokenizer, raw=False)
    assert [tokenizer.decode(p.tokens) for p in prompts] == ['<user>2+2?<assistant>', '<user>x<assistant>']
    assert [p.id for p in prompts] == [0, 1]
    [prompt] = asked(['2+2='], tokenizer, raw=True)
    assert tokenizer.decode(prompt.tokens) == '2+2='
    with pytest.raises(ValueError, match='question 2 is empty'):
        asked(['x', ' '], tokenizer, raw=True)


def test_questions_come_from_the_command_line_and_from_a_file(tmp_path):
    (tmp_path / 'asked.txt').write_text('one\n\ntwo é\n', 'utf-8')
    assert questions_of(['zero'], str(tmp_path / 'asked.txt')) == ['zero', 'one', 'two é']
    with pytest.raises(ValueError, match='no question; give one'):
        questions_of([], None)
    with pytest.raises(FileNotFoundError):
        questions_of([], str(tmp_path / 'none'))


def test_a_tools_reply_counts_neither_as_tokens_nor_in_the_log_prob(capsys):
    tokenizer = character_tokenizer()
    own, said = (np.array(tokenizer.encode(text), np.int32) for text in ('1+1', 'two'))
    spans = Span(own, np.full(3, -0.5, np.float32), Author.POLICY, 7), Span(said, None, Author.ENVIRONMENT)
    [prompt] = asked(['x'], tokenizer, raw=True)
    got = row(tokenizer, prompt, Response((*spans, spans[0]), 'stop'))
    assert (got['response'], got['tokens'], got['logp']) == ('1+1two1+1', 6, -3.0)
    assert got['spans'] == [['policy', 7, 3], ['environment', -1, 3], ['policy', 7, 3]]
    print_answers(tokenizer, prompt, [Response((*spans, spans[0]), 'stop'), Response(spans[:1], 'stop')])
    printed = capsys.readouterr().out
    assert '6 tokens' in printed and '-0.500/token' in printed and '\n1+1two1+1\n' in printed and printed.endswith('\n1+1\n')


@pytest.mark.slow
def test_answers_have_the_policys_log_probs():
    flags = '--raw', '--json', '--samples=3', '--max_response_tokens=20', '--questions=-'
    rows = [json.loads(line) for line in sample(*flags, text='44 19 35=98\n3 5 7=15\n').splitlines()]
    assert [row['question'] for row in rows] == ['44 19 35=98'] * 3 + ['3 5 7=15'] * 3
    assert len({row['response'] for row in rows}) > 2
    config, tokenizer = hf.read_config(BASE), load_tokenizer(BASE)
    graph, params = hf.abstract_params(config)[0], hf.load_params(BASE, config)
    for row in rows:
        prompt, response = (tokenizer(row[part], add_special_tokens=False)['input_ids'] for part in ('question', 'response'))
        if len(response) != row['tokens']:
            continue  # the text does not always give the tokens back
        tokens = np.array([prompt + response])
        logp = jax.nn.log_softmax(logits_in(graph, params, tokens))[0]
        want = sum(float(logp[len(prompt) - 1 + i, token]) for i, token in enumerate(response))
        np.testing.assert_allclose(row['logp'], want, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_greedy_answers_are_one_answer_and_are_shown():
    shown = sample('--samples=2', '--temperature=0', '--max_response_tokens=20', '44 19 35=98')
    head, first, second = shown.partition('1: ')[0], *shown.partition('1: ')[2].split('2: ')
    assert '44 19 35=98' in head and first.strip() == second.strip() and 'log-prob' in first and '/token' in first


@pytest.mark.slow
def test_a_published_policy_is_asked_by_its_runs_config_and_prints_rows_alone(tmp_path):
    """The base is named here, since the run was of another machine."""
    (tmp_path / 'config.json').write_text(json.dumps({'model': {'path': str(tmp_path / 'there')}}))
    config = hf.read_config(BASE)
    flags = {'checkpoint': publish(tmp_path / 'policy', 7, hf.load_params(BASE, config), config, 'float32')}
    [row] = map(json.loads, sample(f'--base={BASE}', '--raw', '--json', '--max_response_tokens=4', '3 + 5', **flags).splitlines())
    assert row['question'] == '3 + 5' and row['logp'] < 0
    refused = command(f'--base={BASE}', '--raw', '--max_response_tokens=5000', '3 + 5', **flags)
    assert refused.returncode == 1 and 'max_position_embeddings' in refused.stderr and refused.stdout == ''
