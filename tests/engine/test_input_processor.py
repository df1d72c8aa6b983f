"""Everything a caller may pass, and everything that is refused at the door."""

import numpy
import pytest

from octavo.engine.input_processor import InputProcessor, mix_seed
from octavo.errors import ClientError, ContextLengthError
from octavo.types.sampling_params import SamplingParams, StructuredOutputsParams
from tests.engine.fakes import EOS, VOCAB_SIZE, make_config

LIMIT = 32


@pytest.fixture
def processor(tokenizer) -> InputProcessor:
    return make_processor(tokenizer)


def make_processor(tokenizer, **options) -> InputProcessor:
    config = make_config(max_model_len=LIMIT, **options)
    return InputProcessor(config.model, config.scheduler, tokenizer)


def process(processor, prompt, priority=0, tokenization_kwargs=None, **params):
    return processor.process(
        "r", prompt, SamplingParams(**params), priority=priority, tokenization_kwargs=tokenization_kwargs
    )


@pytest.mark.parametrize(
    "prompt",
    ["hello there", {"prompt": "hello there"}],
)
def test_text_is_tokenised(processor, tokenizer, prompt):
    read, [request] = process(processor, prompt)
    assert read.text == "hello there"
    assert request.prompt_token_ids == tokenizer.encode("hello there")
    assert request.eos_token_ids == [EOS]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([5, 6], None),
        ((5, 6), None),
        ({"prompt_token_ids": [5, 6]}, None),
        ({"prompt_token_ids": [5, 6], "prompt": "x"}, "x"),
    ],
)
def test_token_ids_are_taken_as_they_are(processor, prompt, text):
    read, [request] = process(processor, prompt)
    assert (read.text, request.prompt_token_ids) == (text, [5, 6])


def test_the_callers_list_is_not_kept(processor):
    ids = [5, 6]
    _, [request] = process(processor, ids)
    ids.append(7)
    assert request.prompt_token_ids == [5, 6]


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}])
def test_empty_prompts_are_refused(processor, prompt):
    with pytest.raises(ClientError, match="empty"):
        process(processor, prompt)


@pytest.mark.parametrize(
    ("ids", "bad"), [([5, 999999], "999999"), ([-1, 5], "-1"), ([1.5], "1.5"), ([True, 5], "True"), (["a"], "'a'")]
)
def test_ids_outside_the_vocabulary_are_named(processor, ids, bad):
    with pytest.raises(ClientError, match=rf"{bad} is not allowed.*0 to {VOCAB_SIZE - 1}"):
        process(processor, ids)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        7,
        b"bytes",
        {"prompt": 7},
        {},
        {"prompt": "x", "multi_modal_data": {}},
        {"prompt_token_ids": "abc"},
        {"prompt_token_ids": 5},
        numpy.array([1, 2]),
    ],
)
def test_other_prompts_are_refused(processor, prompt):
    with pytest.raises(ClientError):
        process(processor, prompt)


def test_a_prompt_as_long_as_the_context(processor):
    _, [request] = process(processor, [5] * (LIMIT - 1), max_tokens=1)
    assert request.sampling_params.max_tokens == 1
    for length in (LIMIT, LIMIT + 1):
        with pytest.raises(ContextLengthError, match=f"{LIMIT} tokens.*{length} input tokens") as caught:
            process(processor, [5] * length, max_tokens=1)
        assert caught.value.code == "context_length_exceeded"
    _, [scoring] = process(processor, [5] * LIMIT, max_tokens=0, prompt_logprobs=0)
    assert scoring.sampling_params.max_tokens == 0
    with pytest.raises(ContextLengthError):
        process(processor, [5] * (LIMIT + 1), max_tokens=0)


@pytest.mark.parametrize(("max_tokens", "want"), [(None, LIMIT - 4), (3, 3), (LIMIT, LIMIT - 4)])
def test_max_tokens_is_lowered_to_what_fits(processor, max_tokens, want):
    _, [request] = process(processor, [5] * 4, max_tokens=max_tokens)
    assert request.sampling_params.max_tokens == want


def test_max_tokens_beyond_the_context_is_refused(processor):
    with pytest.raises(ContextLengthError, match=f"max_tokens={LIMIT + 1}.*{LIMIT}"):
        process(processor, [5], max_tokens=LIMIT + 1)


def test_min_tokens_follows_a_lowered_max_tokens(processor):
    _, [request] = process(processor, [5] * (LIMIT - 4), max_tokens=20, min_tokens=10)
    assert (request.sampling_params.max_tokens, request.sampling_params.min_tokens) == (4, 4)


@pytest.mark.parametrize(
    ("truncate", "max_tokens", "want"),
    [
        (3, 16, 3),
        (-1, 16, LIMIT - 16),
        (-1, 0, LIMIT),
        (-1, None, LIMIT - 1),
        (-1, LIMIT, LIMIT - 1),
        (LIMIT, 0, LIMIT),
    ],
)
def test_truncation_keeps_the_end(processor, truncate, max_tokens, want):
    ids = list(range(3, 103))
    _, [request] = process(processor, ids, truncate_prompt_tokens=truncate, max_tokens=max_tokens)
    assert request.prompt_token_ids == ids[-want:]
    read, _ = process(processor, ids, max_tokens=max_tokens, tokenization_kwargs={"truncate_prompt_tokens": truncate})
    assert read.token_ids == ids[-want:]


def test_truncation_beyond_the_context_is_refused(processor):
    with pytest.raises(ClientError, match="truncate_prompt_tokens=33"):
        process(processor, [5], truncate_prompt_tokens=LIMIT + 1)


def test_unknown_tokenization_options_are_refused(processor):
    with pytest.raises(ClientError, match="padding"):
        process(processor, "x", tokenization_kwargs={"padding": True})


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"structured_outputs": StructuredOutputsParams(json={"type": "strnig"})}, "structured_outputs"),
        ({"extra_args": {"a": 1}}, "extra_args"),
        ({"priority": 1}, "priority"),
        ({"bad_words": [digit * 300 for digit in "12345"]}, "bad_words"),
    ],
)
def test_parameters_are_checked_against_the_engine(processor, params, param):
    with pytest.raises(ClientError) as caught:
        process(processor, "x", **params)
    assert caught.value.param == param


def test_priority_needs_its_policy(tokenizer):
    _, [request] = process(make_processor(tokenizer, policy="priority"), "x", priority=-3)
    assert request.priority == -3


def test_bad_words_are_spelled_with_and_without_a_space(processor, tokenizer):
    _, [request] = process(processor, "x", bad_words=[" cat", "dog"])
    assert request.sampling_params.bad_words_token_ids == [tokenizer.encode(w) for w in ("cat", " cat", "dog", " dog")]


def test_ignore_eos_leaves_no_end_id(processor):
    _, [request] = process(processor, "x", ignore_eos=True)
    assert request.eos_token_ids == []


@pytest.mark.parametrize("salt", ["a", "x" * 128])
def test_a_salt_is_passed_on(processor, salt):
    _, [request] = process(processor, {"prompt": "x", "cache_salt": salt})
    assert request.cache_salt == salt


@pytest.mark.parametrize("salt", ["", "x" * 129, "a@b", "a/b", "a\\b", "a\0b", 7])
def test_odd_salts_are_refused(processor, salt):
    with pytest.raises(ClientError, match="cache_salt"):
        process(processor, {"prompt": "x", "cache_salt": salt})


def test_seeds_of_the_answers(tokenizer):
    _, requests = process(make_processor(tokenizer), "x", n=3, seed=11, prompt_logprobs=1)
    seeds = [r.sampling_params.seed for r in requests]
    assert seeds[0] == 11 and len(set(seeds)) == 3
    assert seeds == [mix_seed(11, i) for i in range(3)]
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert [r.index for r in requests] == [0, 1, 2]
    # Scores of the one prompt are computed once.
    assert [r.sampling_params.prompt_logprobs for r in requests] == [1, None, None]


def test_seeds_are_drawn_from_the_engines(tokenizer):
    one, two = make_processor(tokenizer), make_processor(tokenizer)
    drawn = [process(one, "x")[1][0].sampling_params.seed for _ in range(3)]
    assert len(set(drawn)) == 3
    assert drawn == [process(two, "x")[1][0].sampling_params.seed for _ in range(3)]


def test_the_callers_parameters_stay_as_they_are(processor):
    params = SamplingParams(max_tokens=None, bad_words=["a"])
    processor.process("r", "x", params)
    assert (params.max_tokens, params.seed, params.bad_words_token_ids) == (None, None, None)


def test_ids_stay_unique_when_the_caller_repeats_one(processor):
    ids = [r.request_id for _ in range(2) for r in process(processor, "x", n=2)[1]]
    assert len(set(ids)) == 4


def test_without_a_tokenizer():
    processor = make_processor(None)
    _, [request] = process(processor, [5], detokenize=False)
    assert request.prompt_token_ids == [5]
    with pytest.raises(ClientError, match="detokenize=False"):
        process(processor, [5])
    with pytest.raises(ClientError, match="without a tokenizer"):
        process(processor, "text", detokenize=False)
