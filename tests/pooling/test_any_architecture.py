"""Architectures without a file of Octavo's own make vectors and classes through transformers' modules."""

import numpy as np
import pytest
import torch

from octavo import LLM
from tests.pooling.checkpoints import write_encoder

PROMPTS = [[7, 8, 9], [5] * 40, [3]]
ALBERT = {"embedding_size": 16}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "bos_token_id": 0, "eos_token_id": 2}


def run(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)))


@pytest.mark.parametrize(("model_type", "changes"), [("albert", ALBERT), ("deberta-v2", DEBERTA), ("gpt2", GPT2)])
def test_hidden_states_and_classes_equal(model_type, changes, tmp_path):
    oracle = write_encoder(model_type, tmp_path / "model", "AutoModel", **changes)
    with LLM(str(tmp_path / "model"), skip_tokenizer_init=True, dtype="float32") as llm:
        rows = llm.encode(PROMPTS, pooling_task="token_embed", use_tqdm=False)
    for ids, output in zip(PROMPTS, rows, strict=True):
        expected = torch.nn.functional.normalize(run(oracle, ids).last_hidden_state[0], dim=-1)
        np.testing.assert_allclose(output.outputs.data, expected, atol=2e-5)

    classes = {**changes, "num_labels": 3}
    oracle = write_encoder(model_type, tmp_path / "classes", "AutoModelForSequenceClassification", **classes)
    with LLM(str(tmp_path / "classes"), skip_tokenizer_init=True, dtype="float32") as llm:
        outputs = llm.classify(PROMPTS, use_tqdm=False)
    for ids, output in zip(PROMPTS, outputs, strict=True):
        np.testing.assert_allclose(output.outputs.probs, run(oracle, ids).logits[0].softmax(-1), atol=1e-5)
