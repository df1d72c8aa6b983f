"""`batch_invariant`: the same bits for a request alone and among others, whatever the engine does meanwhile."""

import random

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError

SETTINGS = {"block_size": 16, "max_model_len": 128, "batch_invariant": True, "disable_log_stats": False}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=5, prompt_logprobs=2)
RANDOM = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=3, max_tokens=20, ignore_eos=True, logprobs=5)


def prompt(length: int, seed: int) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {"prompt_token_ids": [rng.randrange(3, 500) for _ in range(length)]}


WATCHED = [(prompt(1, 0), GREEDY), (prompt(16, 1), RANDOM), (prompt(45, 2), GREEDY), (prompt(40, 3), RANDOM)]
NUM_OTHERS = 10


def neighbours(count: int) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Other requests of all lengths and kinds."""
    rng = random.Random(count)
    prompts = [prompt(rng.randrange(1, 40), 1000 + i) for i in range(count)]
    params = [
        SamplingParams(
            temperature=i % 3 / 2, seed=i, max_tokens=1 + 7 * i % 20, ignore_eos=True, logprobs=i % 2 or None
        )
        for i in range(count)
    ]
    return prompts, params


def facts(output) -> tuple:
    """All numbers of an answer, as they are."""
    answer = output.outputs[0]
    positions = [*(output.prompt_logprobs or []), *answer.logprobs]
    return answer.token_ids, [
        [(token_id, entry.logprob, entry.rank) for token_id, entry in entries.items()]
        for entries in positions
        if entries
    ]


def run(model, requests, params, **options) -> list[tuple]:
    """The facts of the requests, given at once and in this order."""
    with LLM(str(model), **(SETTINGS | options)) as llm:
        outputs = llm.generate(requests, params, use_tqdm=False)
        if options.get("num_gpu_blocks_override"):
            metrics = {metric.name: metric for metric in llm.get_metrics()}
            assert metrics["vllm:num_preemptions"].value > 0
    return [facts(output) if output.outputs[0].logprobs else None for output in outputs]


def alone(model, **options) -> list[tuple]:
    """Each watched request by itself, greedy and at random."""
    with LLM(str(model), **(SETTINGS | options)) as llm:
        return [facts(llm.generate(request, params, use_tqdm=False)[0]) for request, params in WATCHED]


def among(model, count: int, *, order: int, **options) -> list[tuple]:
    """The same requests shuffled among `count` others."""
    prompts, params = neighbours(count)
    requests = [*WATCHED, *zip(prompts, params, strict=True)]
    places = list(range(len(requests)))
    random.Random(order).shuffle(places)
    mixed = [requests[place] for place in places]
    found = run(model, [p for p, _ in mixed], [p for _, p in mixed], max_num_seqs=len(requests), **options)
    return [found[places.index(i)] for i in range(len(WATCHED))]


VARIANTS = {
    "among others": {},
    "in another order, in small chunks": {"order": 1, "max_num_batched_tokens": 48, "long_prefill_token_threshold": 7},
    "preempted": {"num_gpu_blocks_override": 14, "block_size": 8, "max_model_len": 72},
    "in flight, without prefix cache": {"async_scheduling": True, "enable_prefix_caching": False},
    "without graphs": {"enforce_eager": True},
    "8-bit cache": {"kv_cache_dtype": "fp8"},
}


@pytest.fixture(scope="module")
def expected(tiny_llama_dir):
    """What the requests get alone, by engine options."""
    known: dict[str, list[tuple]] = {}

    def get(**options) -> list[tuple]:
        key = repr(sorted(options.items()))
        if key not in known:
            known[key] = alone(tiny_llama_dir, **options)
        return known[key]

    return get


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "bfloat16") for name in VARIANTS), ("in another order, in small chunks", "float32")]
)
def test_same_bits_alone_and(name, dtype, tiny_llama_dir, expected):
    options = VARIANTS[name] | {"dtype": dtype}
    order = options.pop("order", 0)
    numbers = {key: options[key] for key in ("dtype", "kv_cache_dtype", "max_model_len") if key in options}
    assert among(tiny_llama_dir, NUM_OTHERS, order=order, **options) == expected(**numbers)


def test_without_it_bits_depend_on_the_neighbours(tiny_llama_dir):
    """Else the test above would show nothing."""
    options = {"dtype": "bfloat16", "batch_invariant": False}
    assert among(tiny_llama_dir, NUM_OTHERS, order=0, **options) != alone(tiny_llama_dir, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op_providers": {"linear": "torch"}}, "op_providers chooses others"),
        ({"attention_backend": "torch"}, "attention_backend=torch chooses another"),
        ({"model_impl": "transformers"}, "promise nothing"),
        ({"quantization": "fp8"}, "products in fp8 are chosen by the number of tokens"),
    ],
)
def test_what_cannot_hold_is_refused(options, message, tiny_llama_dir):
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_llama_dir), **SETTINGS, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_same_bits_alone_and_among_255_others_on_the_gpu(dtype, tiny_llama_dir):
    options = {"dtype": dtype, "device": "cuda", "max_num_batched_tokens": 512}
    assert torch.cuda.is_available()
    assert among(tiny_llama_dir, 256 - len(WATCHED), order=2, **options) == alone(tiny_llama_dir, **options)
