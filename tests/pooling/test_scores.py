"""Pairs of texts: cross-encoders with token types or a template, bi-encoders, and late interaction."""

import json

import numpy as np
import pytest
import torch
import transformers

from octavo import LLM
from octavo.types.pooling_params import PoolingParams
from tests.pooling.checkpoints import SIZES, TEXTS, write, write_encoder, write_tokenizer


def pair(folder, first, second, **options):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer(first, second, return_tensors="pt", return_token_type_ids=True, **options)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "deberta-v2"])
def test_a_cross_encoder_equals_transformers(model_type, tmp_path):
    changes = {"type_vocab_size": 2} if model_type == "deberta-v2" else {}
    oracle = write_encoder(model_type, tmp_path, "AutoModelForSequenceClassification", num_labels=1, **changes)
    write_tokenizer(tmp_path, pair_types=model_type != "roberta")
    with LLM(str(tmp_path), dtype="float32") as llm:
        outputs = llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
        cut = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False, pooling_params=PoolingParams(truncate_prompt_tokens=10))[0]
        raw = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False, pooling_params=PoolingParams(use_activation=False))[0]
    with torch.no_grad():
        for text, output in zip(TEXTS[1:], outputs, strict=True):
            expected = oracle(**pair(tmp_path, TEXTS[0], text)).logits[0, 0]
            assert output.outputs.score == pytest.approx(float(expected.sigmoid()), abs=1e-5)
        expected = oracle(**pair(tmp_path, TEXTS[0], TEXTS[1], truncation=True, max_length=10)).logits[0, 0]
        assert len(cut.prompt_token_ids) == 10
        assert cut.outputs.score == pytest.approx(float(expected.sigmoid()), abs=1e-5)
        whole = oracle(**pair(tmp_path, TEXTS[0], TEXTS[1])).logits[0, 0]
        assert raw.outputs.score == pytest.approx(float(whole), abs=1e-4)


@pytest.mark.parametrize("lengths", [(3, 9), (9, 3), (9, 9), (20, 1), (1, 20), (8, 7)])
@pytest.mark.parametrize("room", [5, 8, 12, 30])
def test_pairs_are_cut_as_transformers_does(lengths, room, tmp_path):
    write_tokenizer(tmp_path)
    from octavo.config.engine import TokenizerConfig
    from octavo.tokenizer import get_tokenizer

    first, second = ("a " * length for length in lengths)
    ids, start = get_tokenizer(TokenizerConfig(str(tmp_path))).encode_fitting(first, second, True, room)
    expected = pair(tmp_path, first, second, truncation=True, max_length=room)
    assert ids == expected["input_ids"][0].tolist()
    assert start == expected["token_type_ids"][0].tolist().index(1)


def test_a_cross_encoder_keeps_its_own_activation(tmp_path):
    """MS MARCO's cross-encoders are read as logits: sentence-transformers says so in config.json."""
    oracle = write_encoder("bert", tmp_path, "AutoModelForSequenceClassification", num_labels=1)
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["sbert_ce_default_activation_function"] = "torch.nn.modules.linear.Identity"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(str(tmp_path), dtype="float32") as llm:
        score = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)[0].outputs.score
    with torch.no_grad():
        assert score == pytest.approx(float(oracle(**pair(tmp_path, TEXTS[0], TEXTS[1])).logits), abs=1e-4)


def test_vectors_give_cosines_and_token_vectors_maxsim(tmp_path):
    oracle = write_encoder("bert", tmp_path, "AutoModel")
    write_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        states = [oracle(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in TEXTS]
    with LLM(str(tmp_path), dtype="float32") as llm:
        cosines = [o.outputs.score for o in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
        pairwise = [o.outputs.score for o in llm.score(TEXTS[:2], TEXTS[2:], use_tqdm=False)]
        with pytest.raises(ValueError, match="cannot be paired"):
            llm.score(TEXTS[:2], TEXTS[:3])
    first = [state[0] for state in states]
    expected = [float(torch.cosine_similarity(first[0], other, dim=0)) for other in first[1:]]
    assert cosines == pytest.approx(expected, abs=1e-5)
    expected = [float(torch.cosine_similarity(first[i], first[i + 2], dim=0)) for i in range(2)]
    assert pairwise == pytest.approx(expected, abs=1e-5)

    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"], "dim": 12}))
    linear = torch.randn(12, 32, generator=torch.Generator().manual_seed(1))
    from safetensors.torch import save_file

    weights = {f"bert.{name}": tensor for name, tensor in oracle.state_dict().items()}
    save_file({**weights, "linear.weight": linear}, tmp_path / "model.safetensors")
    with LLM(str(tmp_path), dtype="float32") as llm:
        scores = [o.outputs.score for o in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
    rows = [torch.nn.functional.normalize(state @ linear.T, dim=-1) for state in states]
    expected = [float((rows[0] @ other.T).max(dim=1).values.sum()) for other in rows[1:]]
    assert scores == pytest.approx(expected, abs=1e-4)


def test_a_language_model_judges_by_yes_and_no(tmp_path):
    """Qwen3-Reranker: the score is the softmax of two tokens' logits behind a template."""
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 0, "eos_token_id": 2}
    config = transformers.CONFIG_MAPPING["qwen3"](**sizes, tie_word_embeddings=True)
    oracle = write(config, tmp_path, "AutoModelForCausalLM")
    write_tokenizer(tmp_path)
    template = "{{ instruction | default('how') }} {{ messages[0].content }} do {{ messages[1].content }}"
    options = {"hf_overrides": {"classifier_from_token": ["cake", "login"]}, "convert": "classify"}
    with LLM(str(tmp_path), chat_template=template, dtype="float32", **options) as llm:
        score = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)[0]
    with LLM(str(tmp_path), dtype="float32", **options) as llm:
        built_in = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(f"how {TEXTS[0]} do {TEXTS[1]}", add_special_tokens=False)["input_ids"]
    assert score.prompt_token_ids == ids
    with torch.no_grad():
        logits = oracle(input_ids=torch.tensor([ids])).logits[0, -1]
    no, yes = tokenizer.convert_tokens_to_ids(["cake", "login"])
    assert score.outputs.score == pytest.approx(float(logits[[no, yes]].softmax(-1)[1]), abs=1e-5)
    assert len(built_in.prompt_token_ids) > 40 and np.isfinite(built_in.outputs.score)
