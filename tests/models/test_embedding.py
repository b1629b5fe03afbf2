"""Embeddings by a model: the mean of Hugging Face's last hidden states, in any batch."""

import numpy as np
import pytest
import torch
from small_run import ROOT
from tiny import QWEN3_5
from transformers import AutoModel

from bapo_jax.models import hf
from bapo_jax.models.embedding import mean_states

LENGTHS = (3, 17, 1, 40, 8)


@pytest.fixture(scope='module', params=['the quickstart', 'a hybrid'])
def model(request, tiny_hf):
    return tiny_hf(**QWEN3_5) if request.param == 'a hybrid' else ROOT / 'configs' / 'quickstart_base'


def test_an_embedding_is_the_mean_of_hugging_faces_last_hidden_states(model):
    config, rng = hf.read_config(model), np.random.default_rng(0)
    texts = [rng.integers(0, config.vocab_size, n).tolist() for n in LENGTHS]
    theirs = AutoModel.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        want = [theirs(torch.tensor([text])).last_hidden_state[0].mean(dim=0).numpy() for text in texts]
    found = mean_states(model, config, texts)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, want, atol=2e-5 * np.abs(want).max())


def test_an_embedding_does_not_depend_on_the_texts_beside_it(model):
    config, rng = hf.read_config(model), np.random.default_rng(1)
    texts = [rng.integers(0, config.vocab_size, 1 + i % 20).tolist() for i in range(70)]  # three batches
    found = mean_states(model, config, [*texts, []])
    order = rng.permutation(70)
    again = mean_states(model, config, [texts[i] for i in order])
    np.testing.assert_allclose(again, found[order], atol=1e-5)
    assert not found[70].any()
