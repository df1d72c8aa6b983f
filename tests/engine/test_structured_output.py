"""Answers that follow grammars, in a whole engine with a small random model.

The answer to a request is the same however it is computed: lock step or overlapped, in chunks, after preemption, from the
prefix cache, next to others, by another core that takes over in the middle.
"""

import json
import threading

import jsonschema
import pytest

from octavo.config.args import EngineArgs
from octavo.engine.llm_engine import LLMEngine
from octavo.errors import ClientError
from octavo.structured_output.llguidance_backend import LLGuidance
from octavo.types.outputs import RequestOutput
from octavo.types.sampling_params import ReasoningSection, RequestOutputKind, SamplingParams
from octavo.types.structured_outputs import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", "🌶"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = [7, 301, 44, 98] * 10


@pytest.fixture(autouse=True)
def _check_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CHECK_INVARIANTS", "1")


@pytest.fixture
def make_engine(tiny_llama_dir):
    engines = []

    def make(**options) -> LLMEngine:
        options = {"dtype": "float32", "max_num_seqs": 8, "block_size": 16, "num_gpu_blocks_override": 200} | options
        engines.append(LLMEngine.from_engine_args(EngineArgs(model=str(tiny_llama_dir), **options)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


def params(seed: int = 0, **fields) -> SamplingParams:
    options = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__}
    constraint = StructuredOutputsParams(**fields) if fields else None
    defaults = {"temperature": 1.0, "seed": seed, "max_tokens": 120, "output_kind": RequestOutputKind.FINAL_ONLY}
    return SamplingParams(**defaults | options, structured_outputs=constraint)


def run(engine: LLMEngine, requests: dict[str, SamplingParams], prompt=PROMPT) -> dict[str, RequestOutput]:
    for name, request in requests.items():
        engine.add_request(name, {"prompt_token_ids": list(prompt)}, request)
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step() if output.finished}
    return found


def mixed_requests() -> dict[str, SamplingParams]:
    requests = {f"json {seed}": params(seed, json=SCHEMA) for seed in range(4)}
    requests |= {f"plain {seed}": params(seed, max_tokens=30) for seed in range(3)}
    requests |= {f"greedy {kind}": params(temperature=0.0, **{kind: "[a-z]{5,30}!"}) for kind in ("regex",)}
    return requests | {
        "choice": params(5, choice=["yes", "yes, but", "no"]),
        "logprobs": params(6, json=SCHEMA, logprobs=2),
    }


def tokens(outputs: dict[str, RequestOutput]) -> dict[str, list[list[int]]]:
    return {name: [choice.token_ids for choice in output.outputs] for name, output in outputs.items()}


def test_answers_are_the_same_however_they_are_computed(make_engine):
    expected = run(make_engine(), mixed_requests())
    for name, output in expected.items():
        (choice,) = output.outputs
        if name.startswith(("json", "logprobs")):
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.text), SCHEMA)
    alone = make_engine()
    for name in ("json 1", "plain 1", "choice", "logprobs"):
        assert tokens(run(alone, {name: mixed_requests()[name]})) == {name: tokens(expected)[name]}, (
            f"{name} depends on the others"
        )
    for options in (
        {"async_scheduling": True},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 26, "async_scheduling": True},
        {"enable_prefix_caching": False, "enforce_eager": True},
    ):
        assert tokens(run(make_engine(**options), mixed_requests())) == tokens(expected), options


def test_preemption_keeps_the_place_in_the_grammar(make_engine):
    requests = {str(seed): params(seed, json=SCHEMA) for seed in range(8)}
    expected = tokens(run(make_engine(), requests))
    short = make_engine(num_gpu_blocks_override=20, async_scheduling=True)
    preemptions = []
    record = short._client._core._scheduler._preempt
    short._client._core._scheduler._preempt = lambda request: (preemptions.append(request.request_id), record(request))
    assert tokens(run(short, requests)) == expected
    assert preemptions, "the cache was to be too small"


def test_another_core_goes_on_in_the_middle(make_engine):
    (whole,) = tokens(run(make_engine(), {"x": params(3, json=SCHEMA)}))["x"]
    engine = make_engine()
    for cut in (1, len(whole) // 2, len(whole) - 1):
        prepared = engine.prepare("y", {"prompt_token_ids": PROMPT}, params(3, json=SCHEMA))
        prepared.engine_requests[0].output_token_ids = whole[:cut]
        engine.submit(prepared)
        rest = []
        while engine.has_unfinished_requests():
            rest += [output for output in engine.step() if output.finished]
        assert rest[0].outputs[0].token_ids == whole[cut:]


def test_n_answers_each_follow_the_grammar(make_engine):
    (output,) = run(make_engine(async_scheduling=True), {"x": params(json=SCHEMA, n=5)}).values()
    assert len({choice.text for choice in output.outputs}) == 5
    for choice in output.outputs:
        jsonschema.validate(json.loads(choice.text), SCHEMA)


def test_limits_and_stops(make_engine):
    engine = make_engine()
    outputs = run(
        engine,
        {
            "length": params(json=SCHEMA, max_tokens=10),
            "min": params(1, regex="[0-9]{4}", min_tokens=50),
            "open end": params(2, regex="[0-9]{4}x*", min_tokens=20, max_tokens=30),
            "ignore eos": params(3, regex="[0-9]{4}x*", ignore_eos=True, max_tokens=30),
            "complete": params(4, regex="[0-9]{4}", ignore_eos=True, max_tokens=30),
            "stop": params(5, json=SCHEMA, stop=['"age']),
            "exact": params(6, choice=["abc"], max_tokens=3),
        },
    )
    found = {name: (output.outputs[0].text, output.outputs[0].finish_reason) for name, output in outputs.items()}
    assert found["length"][1] == "length" and found["length"][0].startswith("{")  # FC-069: cut, not mended
    assert found["min"][1] == found["complete"][1] == "stop"
    assert len(found["min"][0]) == len(found["complete"][0]) == 4
    assert len(outputs["open end"].outputs[0].token_ids) >= 20
    assert found["ignore eos"][1] == "length"
    assert found["stop"][1] == "stop" and found["stop"][0].startswith("{") and '"age' not in found["stop"][0]
    assert found["exact"] == ("abc", "stop")


def test_a_model_that_likes_white_space_gets_to_the_end(make_engine):
    """FC-061."""
    engine = make_engine()
    whitespace = [engine.get_tokenizer().encode(text, add_special_tokens=False)[0] for text in (" ", "\n", "\t")]
    pair = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}
    schema = {
        "type": "object",
        "properties": {"a": pair, "b": pair},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    requests = {
        str(favourite): params(json=schema, temperature=0.0, max_tokens=200, logit_bias={favourite: 100})
        for favourite in whitespace
    }
    for output in run(engine, requests).values():
        json.loads(output.outputs[0].text)


def test_logprobs_report_the_masked_token_itself(make_engine):
    (output,) = run(make_engine(), {"x": params(json=SCHEMA, logprobs=3)}).values()
    (choice,) = output.outputs
    assert len(choice.logprobs) == len(choice.token_ids)
    for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True):
        assert position[token_id].logprob > -1e9


def test_the_grammar_begins_behind_the_reasoning(make_engine):
    engine = make_engine(async_scheduling=True)
    tokenizer = engine.get_tokenizer()
    mark = tokenizer.encode("</", add_special_tokens=False)
    request = params(json=SCHEMA, max_tokens=200)
    request.reasoning = ReasoningSection(True, "<", "</", tokenizer.encode("<", add_special_tokens=False), mark)
    request.logit_bias = {mark[0]: 6.0, mark[-1]: 3.0}
    (output,) = run(engine, {"x": request}).values()
    (choice,) = output.outputs
    before, found, behind = choice.text.partition("</")
    assert found and before, choice.text
    jsonschema.validate(json.loads(behind), SCHEMA)


def test_a_constraint_that_is_wrong_fails_its_request_alone(make_engine):
    engine = make_engine()
    with pytest.raises(ClientError, match=r"\$\.type"):
        engine.add_request("bad", {"prompt_token_ids": PROMPT}, params(json={"type": "strnig"}))
    outputs = run(engine, {"bad": params(regex="[a-"), "good": params(regex="[a-d]{3}")})
    assert "unclosed character class" in outputs["bad"].error
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert outputs["good"].outputs[0].finish_reason == "stop"


def test_who_waits_for_a_grammar_holds_nobody_up_and_can_be_aborted(make_engine, monkeypatch):
    gate = threading.Event()
    original = LLGuidance.compile
    monkeypatch.setattr(LLGuidance, "compile", lambda self, c: gate.wait(60) and original(self, c))
    engine = make_engine()
    scheduler = engine._client._core._scheduler
    engine.add_request("held", {"prompt_token_ids": PROMPT}, params(regex="a"))
    engine.add_request("plain", {"prompt_token_ids": PROMPT}, params(max_tokens=5))
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs = [output for output in engine.step() if output.finished]
    assert outputs[0].request_id == "plain"
    assert scheduler.num_compiling == scheduler.num_waiting == scheduler.stats().num_waiting == 1
    engine.abort_request(["held"])
    assert not engine.has_unfinished_requests() and scheduler.num_compiling == 0
    gate.set()
    assert run(engine, {"next": params(regex="ab")})["next"].outputs[0].text == "ab"


def test_a_grammar_that_grows_too_complex_fails_its_request_alone(make_engine, monkeypatch):
    original = LLGuidance.fill

    def fill(self, grammars, masks, rows):
        errors = original(self, grammars, masks, rows)
        return errors | {i: "too many states" for i, grammar in enumerate(grammars) if grammar.matcher in chosen}

    chosen: list = []
    monkeypatch.setattr(LLGuidance, "fill", fill)
    engine = make_engine(async_scheduling=True)
    for name in ("bad", "good"):
        engine.add_request(name, {"prompt_token_ids": PROMPT}, params(json=SCHEMA))
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step() if output.finished}
        running = engine._client._core._scheduler._running
        chosen = [
            r.grammar.grammar.matcher for r in running if r.request_id.startswith("bad") and r.num_output_tokens > 3
        ]
    assert found["bad"].error == "its grammar cannot be followed any further: too many states"
    jsonschema.validate(json.loads(found["good"].outputs[0].text), SCHEMA)
