"""`kv_cache_dtype=fp8`: half the bytes, scales from the checkpoint, and answers that no feature changes.

E4M3 keeps four bits of a number, so keys and values are off by up to 6 % each, and by 2 % on average. On RAND log
probabilities of what the float32 cache says move by less than 0.1 on average; the greatest difference allowed is 0.6.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.errors import LoadError
from tests.test_invariance import GREEDY, VARIANTS, prompts

SETTINGS = {"dtype": "float32", "block_size": 16, "max_model_len": 128, "max_num_seqs": 8}
MEAN_DIFFERENCE, GREATEST_DIFFERENCE = 0.1, 0.6


def scores(model: Path, **options) -> torch.Tensor:
    """Log probability of every token of every prompt but the first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(model), **(SETTINGS | options)) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
    return torch.tensor(
        [
            entries[token_id].logprob
            for prompt, output in zip(prompts(), outputs, strict=True)
            for token_id, entries in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        ]
    )


def tokens(model: Path, **options) -> list[list[int]]:
    with LLM(str(model), **(SETTINGS | options)) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def exact(tiny_llama_dir):
    return scores(tiny_llama_dir)


@pytest.fixture(scope="module")
def plain_tokens(tiny_llama_dir):
    return tokens(tiny_llama_dir, kv_cache_dtype="fp8")


@pytest.fixture(scope="module")
def small_values(tiny_llama_dir, tmp_path_factory):
    """RAND with values too small for E4M3, and an output projection that makes up for it; a function that stores scales."""

    def write(scales: dict[str, float | list[float]]) -> Path:
        folder = tmp_path_factory.mktemp("small-values")
        for file in tiny_llama_dir.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        weights = load_file(folder / "model.safetensors")
        for name in weights:
            if "v_proj" in name:
                weights[name] = weights[name] / 4096
            elif "o_proj" in name:
                weights[name] = weights[name] * 4096
        attention = [name.partition("v_proj")[0] for name in weights if "v_proj" in name]
        weights |= {prefix + key: torch.tensor(value) for prefix in attention for key, value in scales.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    return write


def test_log_probabilities_stay_close(tiny_llama_dir, exact):
    difference = (scores(tiny_llama_dir, kv_cache_dtype="fp8") - exact).abs()
    assert 0 < difference.mean() < MEAN_DIFFERENCE and difference.max() < GREATEST_DIFFERENCE


@pytest.mark.parametrize(
    "names",
    [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("k_proj.output_scale", "v_proj.output_scale")],
    ids=lambda names: names[0],
)
def test_scales_of_the_checkpoint_are_used(names, small_values, exact):
    stored = small_values(dict(zip(names, (0.5, 1 / 4096), strict=True)))
    difference = (scores(stored, kv_cache_dtype="fp8") - exact).abs()
    assert difference.mean() < MEAN_DIFFERENCE and difference.max() < GREATEST_DIFFERENCE
    torch.testing.assert_close(scores(stored), exact, rtol=0, atol=1e-3)  # a float32 cache has no use for them


def test_without_scales_small_values_are_lost(small_values, exact):
    difference = (scores(small_values({}), kv_cache_dtype="fp8") - exact).abs()
    assert difference.mean() > 10 * MEAN_DIFFERENCE


@pytest.mark.parametrize(
    ("scale", "message"), [([1.0, 2.0], r"one scale for all heads.*\[2\]"), (0.0, "is positive, the checkpoint has 0")]
)
def test_scales_that_cannot_be_used_are_named(scale, message, small_values):
    with pytest.raises(LoadError, match=message):
        LLM(str(small_values({"k_scale": scale, "v_scale": 1.0})), **SETTINGS)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("plain", "block size 64")])
def test_greedy_tokens_do_not_change(name, tiny_llama_dir, plain_tokens):
    assert tokens(tiny_llama_dir, kv_cache_dtype="fp8", **VARIANTS[name]) == plain_tokens


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"max_num_batched_tokens": 16}, {"batch_invariant": True}], ids=str
)
def test_log_probabilities_stay_close_on_the_gpu(options, tiny_llama_dir, exact):
    difference = (scores(tiny_llama_dir, kv_cache_dtype="fp8", device="cuda", **options) - exact).abs()
    assert 0 < difference.mean() < MEAN_DIFFERENCE and difference.max() < GREATEST_DIFFERENCE


def test_the_same_memory_holds_four_times_the_blocks_of_float32(tiny_llama_dir):
    counts = []
    for dtype in ("auto", "fp8"):
        settings = SETTINGS | {"max_num_seqs": 64, "kv_cache_dtype": dtype, "kv_cache_memory_bytes": 1 << 18}
        with LLM(str(tiny_llama_dir), **settings) as llm:
            counts.append(llm.llm_engine.report.num_blocks)
    assert counts[1] == 4 * counts[0]
