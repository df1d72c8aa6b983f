"""Reasoning and tools on a real engine, in a process of its own, that can be made to say anything.

FC-070 to 072, 076, 083, 086, 088, 090: forced tokens, grammars, budgets and stop strings together.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.fixtures.checkpoints import write_random_llama
from tests.fixtures.tokenizers import IM_END
from tests.server.test_real_engine import PATIENCE, Server, start, stop

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "ping"}},
]
WEATHER_CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}</tool_call>'
CALLS = WEATHER_CALL + '<tool_call>{"name": "ping"}</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_random_llama(tmp_path_factory.mktemp("rand"), max_position_embeddings=1024)
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    try:
        running = start(
            model,
            *("--served-model-name", "tiny", "--logits-processors", "tests.server.forced_tokens:ForcedTokens"),
            *("--tool-call-parser", "hermes", "--enable-auto-tool-choice", "--reasoning-parser", "deepseek_r1"),
        )
    finally:
        del os.environ["PYTHONPATH"]
    try:
        yield running
    finally:
        stop(running)


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client


def encode(client: httpx.Client, text: str) -> list[int]:
    return client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]


def ask(
    client: httpx.Client, say: str | None, *, ends: bool = True, stops_early: bool = False, **fields: object
) -> tuple[dict, dict]:
    """(the whole answer, its usage); the same is streamed and compared. `say` is forced, then the end if it `ends`.

    `stops_early`: the server stops the engine, which may be a few tokens ahead.
    """
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, **fields}
    if say is not None:
        body["vllm_xargs"] = {"force": encode(client, say) + ([IM_END] if ends else [])}
    whole = client.post(CHAT, json=body)
    assert whole.status_code == 200, whole.text
    response = client.post(CHAT, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    chunks = [json.loads(block[6:]) for block in response.text.split("\n\n") if block.startswith("data: {")]
    if not stops_early:
        assert chunks[-1]["usage"] == whole.json()["usage"]
    for choice in whole.json()["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert fold(parts) == simplified(choice)
    return whole.json()["choices"][0], whole.json()["usage"]


def simplified(choice: dict) -> tuple:
    message = choice["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    return (
        message.get("reasoning") or "",
        message["content"] or "",
        calls,
        choice["finish_reason"],
        choice["stop_reason"],
    )


def fold(parts: list[dict]) -> tuple:
    reasoning = "".join(part["delta"].get("reasoning", "") for part in parts)
    content = "".join(part["delta"].get("content", "") for part in parts)
    calls: list[list[str]] = []
    for piece in (piece for part in parts for piece in part["delta"].get("tool_calls", [])):
        if "id" in piece:
            calls.append([piece["function"]["name"], ""])
        calls[piece["index"]][1] += piece["function"]["arguments"]
    return reasoning, content, [tuple(call) for call in calls], parts[-1]["finish_reason"], parts[-1].get("stop_reason")


def test_reasoning_then_calls(client: httpx.Client) -> None:
    choice, usage = ask(client, f"why\n</think>\n\nWell. {CALLS}", tools=TOOLS)
    assert simplified(choice)[:2] == ("why", "Well.")
    assert [name for name, _ in simplified(choice)[2]] == ["get_weather", "ping"]
    assert choice["finish_reason"] == "tool_calls"
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


def test_official_client(server: Server, client: httpx.Client) -> None:
    force = {"force": [*encode(client, f"why</think>{CALLS}"), IM_END]}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", _strict_response_validation=True) as official:
        stream = official.beta.chat.completions.stream(
            model="tiny",
            messages=[{"role": "user", "content": "Hi"}],
            tools=TOOLS,
            extra_body={"vllm_xargs": force},
        )
        with stream as events:
            message = events.get_final_completion().choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["get_weather", "ping"]
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo", "days": 3}


def test_cut_anywhere(client: httpx.Client) -> None:
    """FC-071."""
    text = f"y</think>{CALLS}"
    num_tokens = len(encode(client, text))
    for limit in range(1, num_tokens, 29):
        choice, _ = ask(client, text, tools=TOOLS, max_tokens=limit)
        reasoning, content, _, finish, _ = simplified(choice)
        assert (content, finish) == ("", "length") and "y".startswith(reasoning)


def test_one_call_only(client: httpx.Client) -> None:
    """FC-076"""
    choice, _ = ask(client, f"</think>{CALLS}", tools=TOOLS, parallel_tool_calls=False, stops_early=True)
    assert [name for name, _ in simplified(choice)[2]] == ["get_weather"] and choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stop", ["Wel", "hy"])
def test_stop_strings(client: httpx.Client, stop: str) -> None:
    """FC-088: they act on all that is generated; what came before is kept, and no piece of a mark shows."""
    choice, _ = ask(client, "because why</think>All Well.", stop=[stop])
    expected = {"Wel": ("because why", "All "), "hy": ("because w", "")}[stop]
    assert simplified(choice)[:2] == expected
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("seed", range(5))
def test_a_call_is_required(client: httpx.Client, seed: int) -> None:
    """FC-072: whatever the model likes, the calls follow their schemas, streamed and whole."""
    fields = {"tools": TOOLS, "tool_choice": "required", "temperature": 1, "seed": seed, "max_tokens": 400}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    choice, _ = ask(client, None, **fields, **off, parallel_tool_calls=False)
    (call,) = simplified(choice)[2]
    arguments = json.loads(call[1])
    assert choice["finish_reason"] == "tool_calls" and simplified(choice)[:2] == ("", "")
    assert call[0] == "ping" or (arguments["city"] in ("Oslo", "Rome") and 1 <= arguments["days"] <= 9)


@pytest.mark.parametrize("seed", range(3))
def test_strict_calls(client: httpx.Client, seed: int) -> None:
    """FC-082: behind the opening mark nothing can go wrong, whatever the model likes."""
    strict = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}
    fields = {"tools": [strict], "temperature": 1, "seed": seed, "parallel_tool_calls": False}
    choice, _ = ask(client, "why</think>Well. <tool_call>", ends=False, stops_early=True, **fields)
    reasoning, content, ((name, arguments),), finish, _ = simplified(choice)
    assert (reasoning, content, name, finish) == ("why", "Well.", "get_weather", "tool_calls")
    assert set(json.loads(arguments)) == {"city", "days"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "ping"}}, "auto"])
def test_a_tool_without_parameters(client: httpx.Client, choice: object) -> None:
    """FC-074: `{}` however the call comes about."""
    say = '</think><tool_call>{"name": "ping"}</tool_call>' if choice == "auto" else "</think>"
    fields = {"tools": TOOLS[1:], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 60}
    answer, _ = ask(client, say, ends=choice == "auto", stops_early=True, **fields)
    ((name, arguments),) = simplified(answer)[2]
    assert name == "ping" and json.loads(arguments) == {}


def test_one_tool_is_required(client: httpx.Client) -> None:
    """FC-070, behind reasoning: the grammar begins where the section ends."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice, _ = ask(client, "I think", ends=False, tools=TOOLS, tool_choice=named, thinking_token_budget=8)
    reasoning, content, ((name, arguments),), finish, _ = simplified(choice)
    assert reasoning.startswith("I think") and (content, name, finish) == ("", "get_weather", "stop")
    assert set(json.loads(arguments)) == {"city", "days"}


@pytest.mark.parametrize("budget", [0, 1, 8])
def test_a_budget_ends_thinking(client: httpx.Client, budget: int) -> None:
    """FC-090: for every choice, alone and before a grammar."""
    mark = len(encode(client, "</think>"))
    fields = {"thinking_token_budget": budget, "n": 2, "temperature": 1, "seed": 3}
    _, usage = ask(client, None, **fields, max_tokens=30, ignore_eos=True)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 2 * (budget + mark)
    assert usage["completion_tokens"] == 60
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    choice, _ = ask(client, None, **fields, max_tokens=200, response_format=form)
    assert set(json.loads(choice["message"]["content"])) == {"city", "days"}
