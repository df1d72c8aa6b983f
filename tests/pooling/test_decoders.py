"""Decoders that make vectors and classes: native models with other heads, in chunks and with cached prefixes."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from octavo import LLM
from octavo.types.pooling_params import PoolingParams
from tests.pooling.checkpoints import SIZES, write

PROMPTS = [[7, 8, 9], [5] * 40, [3], list(range(4, 60))]
CHUNKS = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 16}


def config_of(model_type, **changes):
    sizes = {**SIZES, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 2}
    return transformers.CONFIG_MAPPING[model_type](**{**sizes, **changes})


def run(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]))


@pytest.mark.parametrize("options", [{"block_size": 16}, CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_hidden_states_of_a_bare_model_equal(pooling, options, tmp_path):
    oracle = write(config_of("qwen3", head_dim=8), tmp_path, "AutoModel")
    with LLM(
        str(tmp_path),
        skip_tokenizer_init=True,
        dtype="float32",
        pooler_config={"pooling_type": pooling.upper()},
        **options,
    ) as llm:
        vectors = llm.embed(PROMPTS, use_tqdm=False)
        again = llm.embed(PROMPTS, use_tqdm=False)
        tokens = llm.encode(PROMPTS, PoolingParams(use_activation=False), pooling_task="token_embed", use_tqdm=False)
    reduce = {"last": lambda h: h[-1], "mean": lambda h: h.mean(0), "cls": lambda h: h[0]}[pooling]
    for ids, vector, repeated, rows in zip(PROMPTS, vectors, again, tokens, strict=True):
        hidden = run(oracle, ids).last_hidden_state[0]
        expected = torch.nn.functional.normalize(reduce(hidden), dim=0).numpy()
        np.testing.assert_allclose(vector.outputs.embedding, expected, atol=2e-5)
        np.testing.assert_allclose(repeated.outputs.embedding, expected, atol=2e-5)
        np.testing.assert_allclose(rows.outputs.data, hidden.numpy(), atol=1e-4)
    assert (again[3].num_cached_tokens > 0) is (pooling == "last")


@pytest.mark.parametrize("options", [{"block_size": 16}, CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize(("model_type", "num_labels"), [("llama", 3), ("qwen2", 1), ("gemma", 2)])
def test_classes_equal(model_type, num_labels, options, tmp_path):
    config = config_of(model_type, num_labels=num_labels, head_dim=8, hidden_activation="gelu_pytorch_tanh")
    oracle = write(config, tmp_path, "AutoModelForSequenceClassification")
    with LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", **options) as llm:
        outputs = llm.classify(PROMPTS, use_tqdm=False)
        raw = llm.classify(PROMPTS[0], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)[0]
    for ids, output in zip(PROMPTS, outputs, strict=True):
        logits = run(oracle, ids).logits[0]
        expected = logits.sigmoid() if num_labels == 1 else logits.softmax(-1)
        np.testing.assert_allclose(output.outputs.probs, expected, atol=1e-5)
    np.testing.assert_allclose(raw.outputs.probs, run(oracle, PROMPTS[0]).logits[0], atol=1e-4)


def test_classes_of_tokens_equal(tmp_path):
    oracle = write(config_of("llama", num_labels=4), tmp_path, "AutoModelForTokenClassification")
    chosen = PoolingParams(returned_token_ids=[2, 0], use_activation=False)
    with LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", **CHUNKS) as llm:
        outputs = llm.encode(PROMPTS, chosen, pooling_task="token_classify", use_tqdm=False)
    for ids, output in zip(PROMPTS, outputs, strict=True):
        np.testing.assert_allclose(output.outputs.data, run(oracle, ids).logits[0][:, [2, 0]], atol=1e-4)


@pytest.mark.parametrize("architecture", ["Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"])
def test_rewards(architecture, tmp_path):
    """A score for each token, or one at the end of each step."""
    oracle = write(config_of("qwen2"), tmp_path, "AutoModel")
    is_process = architecture.startswith("Qwen2ForProcess")
    num_labels = 2 if is_process else 1
    generator = torch.Generator().manual_seed(3)
    hidden = oracle.config.hidden_size
    score = {
        "score.0.weight": torch.randn(hidden, hidden, generator=generator),
        "score.0.bias": torch.randn(hidden, generator=generator),
        "score.2.weight": torch.randn(num_labels, hidden, generator=generator),
        "score.2.bias": torch.randn(num_labels, generator=generator),
    }
    weights = {f"model.{name}": tensor for name, tensor in oracle.state_dict().items()}
    save_file(weights | score, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    labels = {"id2label": {str(i): str(i) for i in range(num_labels)}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **labels, "architectures": [architecture]}))
    options = {"pooler_config": {"step_tag_id": 9}} if is_process else {}
    with LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", **options) as llm:
        output = llm.reward([[7, 9, 8, 9, 4]], use_tqdm=False)[0].outputs.data
    states = run(oracle, [7, 9, 8, 9, 4]).last_hidden_state[0]
    first = torch.relu(states @ score["score.0.weight"].T + score["score.0.bias"])
    expected = first @ score["score.2.weight"].T + score["score.2.bias"]
    if is_process:
        expected = expected[[1, 3]].softmax(-1)
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-4)


def test_a_gemma_that_looks_both_ways(tmp_path):
    """EmbeddingGemma: windowed and full layers in both directions, projections behind the mean, cut embeddings."""
    config = config_of(
        "gemma3_text",
        head_dim=8,
        num_key_value_heads=1,
        query_pre_attn_scalar=8,
        sliding_window=12,
        use_bidirectional_attention=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    oracle = write(config, tmp_path, "AutoModel")
    dense = write_modules(tmp_path, "mean", [(32, 24, "Identity"), (24, 16, "Tanh")])
    options = {"hf_overrides": {"is_matryoshka": True}}
    with LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", **options) as llm:
        vectors = llm.embed(PROMPTS, use_tqdm=False)
        cut = llm.embed(PROMPTS[1], pooling_params=PoolingParams(dimensions=8), use_tqdm=False)[0].outputs
        with pytest.raises(ValueError, match="more than the 16"):
            llm.embed(PROMPTS[1], pooling_params=PoolingParams(dimensions=17))
    with (
        LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32") as llm,
        pytest.raises(ValueError, match="128, 256, 512, 768"),
    ):
        llm.embed(PROMPTS[1], pooling_params=PoolingParams(dimensions=8))
    expected = []
    for ids in PROMPTS:
        x = run(oracle, ids).last_hidden_state[0].mean(0)
        for (weight, bias), activation in zip(dense, (lambda y: y, torch.tanh), strict=True):
            x = activation(x @ weight.T + bias)
        expected.append(x)
    for vector, x in zip(vectors, expected, strict=True):
        np.testing.assert_allclose(vector.outputs.embedding, torch.nn.functional.normalize(x, dim=0), atol=2e-5)
    assert cut.hidden_size == 8
    np.testing.assert_allclose(cut.embedding, torch.nn.functional.normalize(expected[1][:8], dim=0), atol=2e-5)


def write_modules(folder, pooling, dense):
    """The files of sentence-transformers around a model; returns the projections' weights."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), "Normalize"]
    paths = ["", "1_Pooling", *[f"{i}_Dense" for i in range(2, 2 + len(dense))], "9_Normalize"]
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in zip(paths, kinds, strict=True)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}_tokens": True}))
    generator = torch.Generator().manual_seed(5)
    made = []
    for path, (width, out, activation) in zip(paths[2:], dense, strict=False):
        weight, bias = (torch.randn(*shape, generator=generator) / 4 for shape in ((out, width), (out,)))
        (folder / path).mkdir()
        told = {"in_features": width, "out_features": out, "bias": True}
        told["activation_function"] = f"torch.nn.modules.linear.{activation}"
        (folder / path / "config.json").write_text(json.dumps(told))
        save_file({"linear.weight": weight, "linear.bias": bias}, folder / path / "model.safetensors")
        made.append((weight, bias))
    return made
