"""Promise 1: greedy float32 output equals transformers', whatever else happens in the engine."""

import random

import pytest
import torch
import transformers

from octavo import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=3)
RANDOM = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=40, ignore_eos=True)


def prompts() -> list[list[int]]:
    """Lengths around the block size, two of them with a common prefix of three blocks."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 500) for _ in range(48)]
    own = [[rng.randrange(3, 500) for _ in range(n)] for n in (1, 15, 16, 17, 70)]
    return [*own, shared, shared + own[1], shared + own[3]]


def run(model_dir, params: SamplingParams, **options) -> list[tuple[list[int], list]]:
    """Token ids and log probabilities of every prompt, all given at once."""
    settings = {
        "dtype": "float32",
        "block_size": 16,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "disable_log_stats": False,
    }
    with LLM(str(model_dir), **(settings | options)) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
        if options.get("num_gpu_blocks_override"):
            metrics = {metric.name: metric for metric in llm.get_metrics()}
            assert metrics["vllm:num_preemptions"].value > 0
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.fixture(scope="module")
def expected(tiny_llama_dir):
    """What transformers says, one prompt at a time without a cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()
    answers = []
    with torch.inference_mode():
        for prompt in prompts():
            ids, logprobs = list(prompt), []
            for _ in range(GREEDY.max_tokens):
                scores = model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
                ids.append(int(scores.argmax()))
                logprobs.append(float(scores.max()))
            answers.append((ids[len(prompt) :], logprobs))
    return answers


VARIANTS = {
    "plain": {},
    "chunks of 7": {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 7},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    "no prefix cache": {"enable_prefix_caching": False},
    "two steps in flight": {"async_scheduling": True},
    "one at a time": {"max_num_seqs": 1},
    "preempted": {"num_gpu_blocks_override": 14},
    "preempted, in flight": {"num_gpu_blocks_override": 14, "async_scheduling": True},
    "block size 64": {"block_size": 64},
    "reference operators": {"op_providers": {"*": "torch"}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_equals_transformers(name, tiny_llama_dir, expected):
    for (ids, logprobs), (want_ids, want_logprobs) in zip(
        run(tiny_llama_dir, GREEDY, **VARIANTS[name]), expected, strict=True
    ):
        assert ids == want_ids
        for token_id, entries, want in zip(ids, logprobs, want_logprobs, strict=True):
            assert entries[token_id].logprob == pytest.approx(want, abs=1e-3)
            assert entries[token_id].rank == 1


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "plain"])
def test_seeded_samples_do_not_change(name, tiny_llama_dir):
    plain = run(tiny_llama_dir, RANDOM)
    assert [ids for ids, _ in run(tiny_llama_dir, RANDOM, **VARIANTS[name])] == [ids for ids, _ in plain]


def test_prefix_cache_hits_are_whole_blocks_and_change_nothing(tiny_llama_dir):
    with LLM(str(tiny_llama_dir), dtype="float32", block_size=16, max_model_len=128, max_num_seqs=4) as llm:
        for length in (47, 48, 49):
            prompt = {"prompt_token_ids": [(7 * i) % 500 + 3 for i in range(length)]}
            first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
            assert first.outputs[0].token_ids == second.outputs[0].token_ids
            assert second.num_cached_tokens == (length - 1) // 16 * 16
            llm.reset_prefix_cache()


def test_n_answers_are_those_of_separate_requests(tiny_llama_dir):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    with LLM(str(tiny_llama_dir), dtype="float32", max_model_len=128, max_num_seqs=8) as llm:
        prompt = {"prompt_token_ids": [9, 8, 7, 6]}
        alone = llm.generate(prompt, params, use_tqdm=False)[0]
        crowd = llm.generate([prompt, *({"prompt_token_ids": p} for p in prompts())], params, use_tqdm=False)[0]
    texts = [c.token_ids for c in alone.outputs]
    assert len({tuple(t) for t in texts}) == 3
    assert texts == [c.token_ids for c in crowd.outputs]
