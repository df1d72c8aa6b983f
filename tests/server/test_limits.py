"""Every field of every body has a limit that is written down and held (FC-176)."""

import msgspec
import pytest

from octavo.engine.input_processor import MAX_CACHE_SALT, MAX_PRIORITY
from octavo.server.field_limits import BODIES, FIELDS, limit_of
from octavo.server.limits import MAX_ANSWERS, MAX_EXTRA_ARGS_BYTES, MAX_SCORES, check_extra_args
from octavo.server.openai.protocol import MAX_MESSAGES, MAX_PROMPTS
from octavo.server.prompts import MAX_DETOKENIZED, MAX_TOKEN_CHARACTERS
from octavo.types.sampling_params import (
    INT32_MAX,
    MAX_BAD_WORDS,
    MAX_CHARACTERS,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from tests.fixtures.tokenizers import VOCAB_SIZE
from tests.server.fake_engine import FakeEngine, make_config
from tests.server.http import chat_body, client_of, error_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTEXT = 128  # of the scripted engine
HUGE = 2**70

# Field -> (allowed, refused) of both routes; a value that needs others beside it is a dictionary of fields.
COMMON = {
    "n": ([1, MAX_N], [0, -1, MAX_N + 1, HUGE]),
    "temperature": ([0, 2], [-0.1, 2.1, HUGE]),
    "top_p": ([0.001, 1], [0, 1.1, -HUGE]),
    "top_k": ([-1, 0, INT32_MAX], [-2, INT32_MAX + 1, HUGE]),
    "min_p": ([0, 1], [-0.1, 1.1]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1]),
    "repetition_penalty": ([0.01, 100], [0, 100.1]),
    "seed": ([-(2**63), 2**63 - 1], [2**63, -HUGE]),
    "stop": (
        [["x" * MAX_CHARACTERS], [f"x{i}" for i in range(MAX_STOP_STRINGS)]],
        [["x" * (MAX_CHARACTERS + 1)], ["x"] * (MAX_STOP_STRINGS + 1), [""]],
    ),
    "stop_token_ids": ([[7] * MAX_STOP_TOKEN_IDS], [[7] * (MAX_STOP_TOKEN_IDS + 1), [VOCAB_SIZE], [-1], [HUGE]]),
    "min_tokens": ([0, {"min_tokens": 1, "max_tokens": 1}], [-1, {"min_tokens": 2, "max_tokens": 1}, HUGE]),
    "truncate_prompt_tokens": ([-1, 5], [0, -2, INT32_MAX + 1, HUGE]),
    "stream_interval": ([1, INT32_MAX], [0, INT32_MAX + 1, HUGE]),
    "allowed_token_ids": ([[7, 8]], [[], [VOCAB_SIZE], [HUGE], [7] * (VOCAB_SIZE + 1)]),
    "bad_words": ([["x"] * MAX_BAD_WORDS], [["x"] * (MAX_BAD_WORDS + 1), ["x" * (MAX_CHARACTERS + 1)], [""]]),
    "logit_bias": (
        [{"logit_bias": {"7": 100, "8": -100}}],
        [
            {"logit_bias": {str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)}},
            {"logit_bias": {"7": 101}},
            {"logit_bias": {str(HUGE): 1}},
            {"logit_bias": {"-1": 1}},
        ],
    ),
    "prompt_logprobs": ([0, 20], [21, -2, HUGE]),
    "request_id": (["x" * 128], ["x" * 129, "", "a b"]),
    "vllm_xargs": (
        [],
        [{"vllm_xargs": {"a": HUGE}}, {"vllm_xargs": {"a": "x" * MAX_EXTRA_ARGS_BYTES}}],
    ),
    "length_penalty": ([], [2]),  # without beam search
}
OF_COMPLETIONS = {
    "logprobs": ([0, 20], [21, -2, HUGE]),
    "max_tokens": ([1, CONTEXT], [-1, 0, INT32_MAX + 1, HUGE]),
    "prompt": ([["x"] * 3], [["x"] * (MAX_PROMPTS + 1), "x" * (CONTEXT * MAX_TOKEN_CHARACTERS + 1), [VOCAB_SIZE]]),
}
LONG = "x" * (CONTEXT * MAX_TOKEN_CHARACTERS + 1)
OF_CHATS = {
    "top_logprobs": (
        [{"logprobs": True, "top_logprobs": 20, "max_tokens": 5}],
        [{"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}],
    ),
    "max_completion_tokens": ([1], [-1, 0, HUGE]),
    "messages": ([], [[{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1), [{"role": "user", "content": LONG}]]),
    "documents": ([], [[{"text": LONG}]]),
    "chat_template_kwargs": (
        [],
        [{"chat_template_kwargs": {"x": LONG}}, {"chat_template_kwargs": {"chat_template": "x"}}],
    ),
    "chat_template": ([], ["x"]),
}


def cases(*tables):
    for table in tables:
        for name, (allowed, refused) in table.items():
            for is_allowed, values in ((True, allowed), (False, refused)):
                for value in values:
                    yield is_allowed, value if isinstance(value, dict) else {name: value}


def test_every_field_has_its_limit_written_down():
    fields = {field.name for body in BODIES.values() for field in msgspec.structs.fields(body)}
    for route, body in BODIES.items():
        for field in msgspec.structs.fields(body):
            assert limit_of(route, field.name)
    named = {key if isinstance(key, str) else key[1] for key in FIELDS}
    assert named == fields, "limits of fields that do not exist"


@pytest.mark.parametrize(
    ("path", "own"), [(COMPLETIONS, OF_COMPLETIONS), (CHAT, OF_CHATS)], ids=["completions", "chat"]
)
async def test_limits_are_held(path, own):
    engine = FakeEngine()
    async with client_of(engine) as client:
        for is_allowed, fields in cases(COMMON, own):
            body = ({"prompt": "hi", "max_tokens": 2} if path == COMPLETIONS else chat_body(max_tokens=2)) | fields
            response = await client.post(path, json=body)
            shown = str(fields)[:200]
            if is_allowed:
                assert response.status_code == 200, (shown, response.text)
            else:
                assert len(error_of(response, 400)["message"]) <= 2001, shown
            assert engine.running == []


async def test_limits_of_the_tokenizer_routes():
    async with client_of() as client:
        for path, body in (
            ("/tokenize", {"prompt": LONG}),
            ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
            ("/detokenize", {"tokens": [7] * (MAX_DETOKENIZED + 1)}),
            ("/detokenize", {"tokens": [HUGE]}),
            ("/detokenize", {"tokens": [VOCAB_SIZE]}),
        ):
            error_of(await client.post(path, json=body), 400)


async def test_products_are_bounded():
    """FC-176: each field at its cap, together too much."""
    engine = FakeEngine(config=make_config(max_model_len=8192))
    async with client_of(engine) as client:
        largest = {"n": MAX_N, "logprobs": True, "top_logprobs": 20}
        for fields in (largest, {**largest, "max_tokens": 8000}):
            error = error_of(await client.post(CHAT, json=chat_body(**fields)), 400)
            assert error["param"] == "logprobs" and str(MAX_SCORES) in error["message"]
        many = {"prompt": ["x"] * 33, "n": MAX_N, "max_tokens": 1}
        error = error_of(await client.post(COMPLETIONS, json=many), 400)
        assert error["param"] == "n" and str(MAX_ANSWERS) in error["message"]
        assert engine.params == []
        assert (await client.post(CHAT, json=chat_body(**largest, max_tokens=2))).status_code == 200


def as_messages(count: int, tools: list[dict]) -> dict:
    tools = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in tools]
    return {"messages": [{"role": "user", "content": "x"}] * count, "tools": tools, "max_tokens": 2}


def as_items(count: int, tools: list[dict]) -> dict:
    tools = [{"type": "function", **tool} for tool in tools]
    return {"input": [{"role": "user", "content": "x"}] * count, "tools": tools, "max_output_tokens": 2}


def as_chat(count: int, tools: list[dict]) -> dict:
    tools = [{"type": "function", "function": tool} for tool in tools]
    return {"messages": [{"role": "user", "content": "x"}] * count, "tools": tools, "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "make"), [(CHAT, as_chat), ("/v1/messages", as_messages), ("/v1/responses", as_items)]
)
async def test_conversations_and_tools_are_bounded_on_every_api(path, make):
    """FC-176: many messages, many tools, a name of a megabyte: a quick 4xx, and nothing reaches the engine."""
    engine = FakeEngine()
    many = [{"name": f"f{i}", "parameters": {}} for i in range(10_000)]
    deep: dict = {}
    for _ in range(100):
        deep = {"properties": {"x": deep}}
    async with client_of(engine) as client:
        for count, tools in (
            (10_000, []),
            (1, many),
            (1, [{"name": "n" * (1 << 20), "parameters": {}}]),
            (1, [{"name": "f", "parameters": deep}]),
            (1, [{"name": "f", "parameters": {"enum": ["v" * (1 << 20)]}}]),
        ):
            response = await client.post(path, json=make(count, tools))
            assert 400 <= response.status_code < 500 and len(response.content) < 5000
    assert engine.params == []


async def test_errors_do_not_echo_a_megabyte():
    async with client_of() as client:
        for fields in ({"model": "m" * (1 << 20)}, {"stop": ["s" * (1 << 20)]}, {"chat_template": "t" * (1 << 20)}):
            response = await client.post(CHAT, json=chat_body(**fields))
            assert 400 <= response.status_code < 500 and len(response.content) < 5000


@pytest.mark.parametrize("priority", [MAX_PRIORITY + 1, -HUGE])
def test_priorities_and_salts_beyond_the_range_are_the_callers_mistake(priority, tiny_llama_dir):
    from octavo import LLM, SamplingParams

    with LLM(str(tiny_llama_dir), scheduling_policy="priority", num_gpu_blocks_override=20, max_num_seqs=2) as llm:
        with pytest.raises(ValueError, match="priority"):
            llm.generate([[5]], SamplingParams(max_tokens=1), priority=priority, use_tqdm=False)
        salted = {"prompt_token_ids": [5], "cache_salt": "s" * (MAX_CACHE_SALT + 1)}
        with pytest.raises(ValueError, match="cache_salt"):
            llm.generate([salted], SamplingParams(max_tokens=1), use_tqdm=False)


def test_extra_args_that_fit_pass():
    check_extra_args(None)
    check_extra_args({"a": [1, 2.5, "x", None, {"b": True}]})
