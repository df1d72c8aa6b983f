"""Encoders and their heads, through the whole engine in float32, against transformers' own on the same random weights."""

import numpy as np
import pytest
import torch

from octavo import LLM
from tests.pooling.checkpoints import write_encoder

FAMILIES = ["bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet", "modernbert"]
PROMPTS = [[7, 8, 9], [5] * 40, [3], list(range(4, 30))]


def states(model, token_ids, **more):
    with torch.no_grad():
        return model(input_ids=torch.tensor([token_ids]), attention_mask=torch.ones(1, len(token_ids)), **more)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return request.param, tmp_path_factory.mktemp(request.param)


def test_hidden_states_equal(family):
    name, folder = family
    oracle = write_encoder(name, folder / "model", "AutoModel")
    with LLM(str(folder / "model"), skip_tokenizer_init=True, dtype="float32") as llm:
        outputs = llm.encode(PROMPTS, pooling_task="token_embed", use_tqdm=False)
        alone = llm.encode(PROMPTS[1], pooling_task="token_embed", use_tqdm=False)[0]
        vectors = llm.embed(PROMPTS, use_tqdm=False)
    for ids, output, vector in zip(PROMPTS, outputs, vectors, strict=True):
        expected = states(oracle, ids).last_hidden_state[0]
        expected = torch.nn.functional.normalize(expected, dim=-1).numpy()
        np.testing.assert_allclose(output.outputs.data, expected, atol=2e-5)
        np.testing.assert_allclose(vector.outputs.embedding, expected[0], atol=2e-5)
    np.testing.assert_allclose(alone.outputs.data, outputs[1].outputs.data, atol=1e-6)


def test_classes_equal(family):
    name, folder = family
    oracle = write_encoder(name, folder / "classifier", "AutoModelForSequenceClassification", num_labels=3)
    with LLM(str(folder / "classifier"), skip_tokenizer_init=True, dtype="float32") as llm:
        outputs = llm.classify(PROMPTS, use_tqdm=False)
    for ids, output in zip(PROMPTS, outputs, strict=True):
        np.testing.assert_allclose(output.outputs.probs, states(oracle, ids).logits[0].softmax(-1), atol=1e-5)


def test_classes_of_tokens_equal(family):
    name, folder = family
    oracle = write_encoder(name, folder / "tagger", "AutoModelForTokenClassification", num_labels=5)
    with LLM(str(folder / "tagger"), skip_tokenizer_init=True, dtype="float32") as llm:
        outputs = llm.encode(PROMPTS, pooling_task="token_classify", use_tqdm=False)
    for ids, output in zip(PROMPTS, outputs, strict=True):
        np.testing.assert_allclose(output.outputs.data, states(oracle, ids).logits[0].softmax(-1), atol=1e-5)
