"""Reasoning over HTTP (FC-085, 086, 088, 090): told apart, counted, hidden, limited."""

import pytest

from tests.server.fake_engine import FakeEngine, make_config, make_tokenizer, say
from tests.server.http import chat_body, client_of, error_of, events, strict_json

PATH = "/v1/chat/completions"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}:"
SWITCHED = (
    PLAIN
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)
ANSWER = "why\n</think>\n\nanswer"


def engine_saying(text: str, template: str = SWITCHED) -> FakeEngine:
    return FakeEngine(script=say(text), config=make_config(max_model_len=4096), texts=make_tokenizer(template))


async def ask(engine: FakeEngine, args: dict | None = None, **fields: object) -> tuple[dict, list[dict]]:
    """The whole answer's body and the chunks of a stream."""
    async with client_of(engine, **(args or {})) as client:
        whole = await client.post(PATH, json=chat_body(**fields))
        assert whole.status_code == 200, whole.text
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return strict_json(whole.content), events(await client.post(PATH, json=chat_body(**fields, **options)))


def joined(chunks: list[dict], name: str) -> str:
    return "".join(choice["delta"].get(name) or "" for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (ANSWER, "why", "answer"),
        ("<think>why</think>answer", "why", "answer"),
        ("why, I", "why, I", None),
        ("</think>answer", None, "answer"),
    ],
)
async def test_reasoning_and_content(text: str, reasoning: str | None, content: str | None) -> None:
    whole, chunks = await ask(engine_saying(text))
    message = whole["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)
    assert message.get("reasoning_content") == reasoning
    assert joined(chunks, "reasoning") == joined(chunks, "reasoning_content") == (reasoning or "")
    assert joined(chunks, "content") == (content or "")
    assert chunks[-1]["usage"] == whole["usage"]


async def test_tokens_are_counted() -> None:
    tokenizer = make_tokenizer()
    whole, _ = await ask(engine_saying(ANSWER))
    usage = whole["usage"]
    expected = len(tokenizer.encode("why\n</think>"))
    assert abs(usage["completion_tokens_details"]["reasoning_tokens"] - expected) <= 1
    assert usage["completion_tokens"] == len(tokenizer.encode(ANSWER)) + 1


@pytest.mark.parametrize("fields", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
async def test_thinking_off(fields: dict) -> None:
    """FC-085: all is content from the first token on, and nothing is said about reasoning."""
    engine = engine_saying('{"a": 1}')
    whole, chunks = await ask(engine, **fields)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": '{"a": 1}', "refusal": None}
    assert joined(chunks, "content") == '{"a": 1}' and joined(chunks, "reasoning") == ""
    assert engine.params[0].reasoning is None


async def test_the_engine_knows_where_reasoning_ends() -> None:
    """FC-086: what a grammar and a budget go by."""
    engine = engine_saying(ANSWER)
    await ask(engine, thinking_token_budget=8)
    params = engine.params[0]
    section = params.reasoning
    assert section.is_open and (section.start, section.end) == ("<think>", "</think>")
    assert make_tokenizer().decode(section.end_token_ids) == "</think>" and params.thinking_token_budget == 8
    engine = engine_saying("answer", PLAIN)
    await ask(engine, {"reasoning_parser": "glm45"})
    assert engine.params[0].reasoning.is_open is False
    engine = engine_saying("answer")
    await ask(engine, thinking_token_budget=8, chat_template_kwargs={"enable_thinking": False})
    assert engine.params[0].thinking_token_budget is None


async def test_hidden_means_hidden() -> None:
    """No field tells of it: text, tokens, log probabilities, streamed or whole. Only the counts do."""
    fields = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    shown, _ = await ask(engine_saying(ANSWER), **fields)
    whole, chunks = await ask(engine_saying(ANSWER), include_reasoning=False, **fields)
    assert whole["usage"] == shown["usage"] == chunks[-1]["usage"]
    choice = whole["choices"][0]
    assert "reasoning" not in choice["message"] and choice["message"]["content"] == "answer"
    assert joined(chunks, "reasoning") == joined(chunks, "reasoning_content") == ""
    tokens = "".join(entry["token"] for entry in choice["logprobs"]["content"])
    assert "why" not in tokens and "think" not in tokens and "answer" in tokens
    assert make_tokenizer().decode(choice["token_ids"]).strip() == "answer"
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    entries = [entry for part in parts for entry in (part.get("logprobs") or {}).get("content", [])]
    assert entries == choice["logprobs"]["content"]
    assert [i for part in parts for i in part.get("token_ids", [])] == choice["token_ids"]
    assert len(choice["token_ids"]) < len(shown["choices"][0]["token_ids"])


async def test_reasoning_of_earlier_turns_reaches_the_template() -> None:
    template = "{% for m in messages %}{{ m.content }}[{{ m.reasoning_content }}]{% endfor %}"
    for key in ("reasoning", "reasoning_content"):
        engine = engine_saying("x", template)
        messages = [{"role": "assistant", "content": "a", key: "because"}, {"role": "user", "content": "b"}]
        await ask(engine, messages=messages)
        assert "[because]" in make_tokenizer().decode(engine.prompts[0])


async def test_continued_reasoning() -> None:
    """What is continued is what was begun."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>\n"}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    whole, _ = await ask(engine_saying(ANSWER, template), {"reasoning_parser": "glm45"}, **fields)
    assert whole["choices"][0]["message"]["reasoning"] == "why"


async def test_a_budget_needs_a_format() -> None:
    async with client_of(engine_saying("x", PLAIN)) as client:
        assert (await client.post(PATH, json=chat_body(thinking_token_budget="8"))).status_code == 400
        error = error_of(await client.post(PATH, json=chat_body(thinking_token_budget=-2)), 400)
        assert error["param"] == "thinking_token_budget"


async def test_models_without_reasoning_say_nothing_of_it() -> None:
    whole, _ = await ask(engine_saying("<think>x</think>y", PLAIN))
    assert whole["choices"][0]["message"]["content"] == "<think>x</think>y"
    assert "completion_tokens_details" not in whole["usage"]


async def test_unknown_formats_stop_the_start() -> None:
    from octavo.errors import ConfigError

    for args in ({"reasoning_parser": "nobody"}, {"tool_call_parser": "nobody"}, {"enable_auto_tool_choice": True}):
        with pytest.raises(ConfigError, match=r"hermes|deepseek_r1|tool_call_parser"):
            async with client_of(engine_saying("x", PLAIN), **args):
                pass
