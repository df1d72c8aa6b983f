"""Agents at work: the official clients against `octavo serve` on a real (tiny) model that is forced to say its part.

Words are forced token by token (`ForceText`), so the whole way is walked: template, engine, formats, events.
"""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import TypeAdapter

from tests.fixtures.checkpoints import write_random_llama
from tests.fixtures.tokenizers import IM_END, byte_tokenizer
from tests.server.test_anthropic import check_order
from tests.server.test_real_engine import PATIENCE, Server, start, stop

TEMPLATE = """
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call them as <tool_call>{"name": …, "arguments": …}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

PATH = {"path": {"type": "string"}}
TOOLS = [
    {"name": "read", "description": "Read a file.", "input_schema": {"type": "object", "properties": PATH}},
    {"name": "write", "input_schema": {"type": "object", "properties": {**PATH, "text": {"type": "string"}}}},
    {"name": "test", "input_schema": {"type": "object", "properties": {}}},
]
EVENT: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)
# Events as they are sent; the client adds some of its own.
WIRE = {
    *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
    *("message_delta", "message_stop"),
}
# Thinking, text, calls: what the model is made to say in turn.
TURNS: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("", "I read.", [("read", {"path": "a"})]),
    ("Two.", "Both.", [("read", {"path": "b"}), ("read", {"path": '"c"'})]),
    ("", "", [("write", {"path": "a", "text": "é\n🌶"}), ("test", {}), ("test", {})]),
    ("Well.", "Done.", []),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_random_llama(tmp_path_factory.mktemp("agent"), max_position_embeddings=32768)
    template = folder / "tools.jinja"
    template.write_text(TEMPLATE)
    running = start(
        folder,
        *("--served-model-name", "coder", "--chat-template", str(template), "--enable-prompt-tokens-details"),
        *("--logits-processors", "tests.worker.custom_processors:ForceText", "--responses-store-bytes", "1M"),
    )
    yield running
    stop(running)


def say(text: str) -> dict[str, Any]:
    """The part of a request body that makes the model say this."""
    return {"vllm_xargs": {"say": [*byte_tokenizer().encode(text).ids, IM_END]}}


def written(thinking: str, text: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """As the model writes it."""
    parts = [f"<think>\n{thinking}\n</think>\n\n"] if thinking else []
    parts += [text] if text else []
    parts += [
        f"\n<tool_call>\n{json.dumps({'name': n, 'arguments': a}, ensure_ascii=False)}\n</tool_call>" for n, a in calls
    ]
    return "".join(parts)


def use(name: str, arguments: dict[str, Any], files: dict[str, str]) -> dict[str, Any]:
    """What the agent's tools answer."""
    if name == "read":
        found = files.get(arguments["path"])
        return {"content": "no such file", "is_error": True} if found is None else {"content": found}
    if name == "write":
        files[arguments["path"]] = arguments["text"]
        return {"content": [{"type": "text", "text": "written"}]}
    return {}


def test_thirty_turns_of_a_coding_agent(server):
    """Streamed turns with thinking and parallel tools; every word, call, id, count and event is what it must be."""
    files = {"a": "x", '"c"': "y"}
    ids: set[str] = set()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Make the tests pass."}]
    cached = 0
    with anthropic.Anthropic(base_url=server.url, api_key="-", timeout=PATIENCE, max_retries=0) as client:
        for turn in range(30):
            thinking, text, calls = TURNS[turn % len(TURNS)]
            asked: dict[str, Any] = {
                "model": "coder",
                "system": [{"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}}],
                "tools": TOOLS,
                "messages": messages,
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            }
            counted = client.messages.count_tokens(**asked).input_tokens
            asked |= {"max_tokens": 2000, "extra_body": say(written(thinking, text, calls))}
            with client.messages.stream(**asked) as stream:
                events = [event.model_dump() for event in stream if event.type in WIRE]
                message = stream.get_final_message()
            for event in events:
                EVENT.validate_python(event)
            check_order(events)
            usage = message.usage
            assert usage.input_tokens + usage.cache_read_input_tokens == counted
            assert usage.cache_read_input_tokens >= cached
            cached = usage.cache_read_input_tokens
            assert message.stop_reason == ("tool_use" if calls else "end_turn")

            kinds = ["thinking"] * bool(thinking) + ["text"] * bool(text) + ["tool_use"] * len(calls)
            assert [block.type for block in message.content] == kinds
            blocks = iter(message.content)
            if thinking:
                block = next(blocks)
                assert block.thinking.strip() == thinking and block.signature
                assert 0 < usage.output_tokens_details.thinking_tokens < usage.output_tokens
            if text:
                assert next(blocks).text.strip() == text
            uses = list(blocks)
            assert [(block.name, block.input) for block in uses] == calls
            assert not ids & {block.id for block in uses} and len({block.id for block in uses}) == len(uses)
            ids |= {block.id for block in uses}

            if turn < len(TURNS):
                whole = client.messages.create(**asked)
                assert [block.model_dump(exclude={"id"}) for block in whole.content] == [
                    block.model_dump(exclude={"id", "parsed_output"}) for block in message.content
                ]
            messages.append(
                {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in message.content]}
            )
            results = [{"type": "tool_result", "tool_use_id": b.id, **use(b.name, b.input, files)} for b in uses]
            messages.append({"role": "user", "content": results or "And now the next one."})
    assert cached > 1000 and files["a"] == "é\n🌶"


def test_function_calls_of_responses(server):
    """FC-098's stream, and a chain of stored responses with reasoning, calls and their outputs."""
    tools = [{"type": "function", "name": t["name"], "parameters": t["input_schema"]} for t in TOOLS]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=PATIENCE, max_retries=0) as client:
        given: Any = "Make the tests pass."
        previous = None
        for thinking, text, calls in TURNS:
            asked = {"model": "coder", "input": given, "tools": tools, "previous_response_id": previous}
            with client.responses.stream(**asked, extra_body=say(written(thinking, text, calls))) as stream:
                types = [event.type for event in stream]
                response = stream.get_final_response()
            assert types[:2] == ["response.created", "response.in_progress"] and types[-1] == "response.completed"
            kinds = ["reasoning"] * bool(thinking) + ["message"] * bool(text) + ["function_call"] * len(calls)
            assert [item.type for item in response.output] == kinds
            uses = [item for item in response.output if item.type == "function_call"]
            assert [(item.name, json.loads(item.arguments)) for item in uses] == calls
            assert response.output_text.strip() == text
            if thinking:
                assert response.output[0].content[0].text.strip() == thinking
                assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
            previous = response.id
            given = [{"type": "function_call_output", "call_id": item.call_id, "output": "ok"} for item in uses]


def test_langchain_calls_tools(server):
    """A tool is bound, called, answered; streamed pieces add up to the same call."""
    langchain_openai = pytest.importorskip("langchain_openai", reason="needs langchain-openai")
    from langchain_core.messages import HumanMessage, ToolMessage

    def read(path: str) -> str:
        """Read a file."""
        return f"text of {path}"

    def model(text: str) -> Any:
        return langchain_openai.ChatOpenAI(
            model="coder",
            base_url=f"{server.url}/v1",
            api_key="-",
            timeout=PATIENCE,
            max_retries=0,
            extra_body=say(text),
        ).bind_tools([read])

    asked = [HumanMessage("Read a.")]
    calling = model(written("", "So.", [("read", {"path": "a"})]))
    called = calling.invoke(asked)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("read", {"path": "a"})
    pieces = list(calling.stream(asked))
    joined = pieces[0]
    for piece in pieces[1:]:
        joined += piece
    assert [(c["name"], c["args"]) for c in joined.tool_calls] == [("read", {"path": "a"})]
    assert joined.content == called.content
    done = model("Done.").invoke([*asked, called, ToolMessage(read(**call["args"]), tool_call_id=call["id"])])
    assert done.content == "Done." and not done.tool_calls


def test_schemas_hold_on_every_api(server):
    """FC-098: the words are the model's own (random) ones; whatever ends by itself is what the schema says."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }

    def check(text: str) -> None:
        value = json.loads(text)
        assert set(value) == {"a", "b"} and 0 <= value["a"] <= 99 and value["b"] in ("x", "y")

    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=PATIENCE, max_retries=0) as client,
        anthropic.Anthropic(base_url=server.url, api_key="-", timeout=PATIENCE, max_retries=0) as other,
    ):
        wanted = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        response = client.responses.create(model="coder", input="Hi", text=wanted, extra_body={"seed": 1, **off})
        assert response.status == "completed" and response.usage.output_tokens > 0
        check(response.output_text)
        with client.responses.stream(model="coder", input="Hi", text=wanted, extra_body={"seed": 1, **off}) as stream:
            events = list(stream)
        assert events[-1].type == "response.completed" and events[-1].response.usage.output_tokens > 0
        assert events[-1].response.output_text == response.output_text
        message = other.messages.create(
            model="coder",
            max_tokens=200,
            messages=[{"role": "user", "content": "Hi"}],
            thinking={"type": "disabled"},
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
        assert message.stop_reason == "end_turn"
        check(message.content[0].text)

        tools = [{"name": "answer", "input_schema": schema}]
        for choice in ({"type": "tool", "name": "answer"}, {"type": "any", "disable_parallel_tool_use": True}):
            with other.messages.stream(
                model="coder",
                max_tokens=400,
                messages=[{"role": "user", "content": "Hi"}],
                thinking={"type": "disabled"},
                tools=tools,
                tool_choice=choice,
            ) as stream:
                message = stream.get_final_message()
            (block,) = message.content
            assert (message.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "answer")
            check(json.dumps(block.input))
