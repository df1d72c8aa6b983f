"""Compiling beside the loop: who waits for whom, what is kept, what is given up."""

import threading

import pytest

from octavo.config.engine import StructuredOutputsConfig
from octavo.errors import ClientError, RequestFailedError
from octavo.structured_output import manager as manager_module
from octavo.structured_output.llguidance_backend import LLGuidance
from octavo.structured_output.manager import GrammarManager, PendingGrammar
from octavo.types.request import EngineRequest
from octavo.types.sampling_params import SamplingParams
from octavo.types.structured_outputs import StructuredOutputsParams
from tests.structured_output.bytes_vocabulary import END, bytes_vocabulary


@pytest.fixture
def make_manager():
    managers = []

    def make(**options) -> GrammarManager:
        managers.append(GrammarManager(StructuredOutputsConfig(**options), bytes_vocabulary, 4))
        return managers[-1]

    yield make
    for manager in managers:
        manager.shutdown()


def request(output=(), **fields) -> EngineRequest:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    return EngineRequest("r", [1], params, eos_token_ids=[END], output_token_ids=list(output))


def wait_for(pending: PendingGrammar):
    pending.future.exception(timeout=60)
    return pending.poll()


def test_equal_constraints_are_compiled_once(make_manager, monkeypatch):
    compiled = []
    original = LLGuidance.compile
    monkeypatch.setattr(LLGuidance, "compile", lambda self, c: compiled.append(c) or original(self, c))
    manager = make_manager()
    schema = {"type": "object", "title": "A"}
    pending = [manager.start(request(json=schema)) for _ in range(6)]
    pending += [
        manager.start(request(json='{"title": "B", "type": "object"}')),
        manager.start(request(json_object=True)),
    ]
    grammars = [wait_for(p) for p in pending]
    assert len(compiled) == 1, "annotations make no difference"
    assert len({id(grammar.grammar) for grammar in grammars}) == 8, "places are not shared"


def test_the_cache_lets_go_of_what_was_used_longest_ago(make_manager, monkeypatch):
    monkeypatch.setattr(manager_module, "MAX_CACHE_BYTES", 1 << 20)
    compiled = []
    original = LLGuidance.compile
    monkeypatch.setattr(LLGuidance, "compile", lambda self, c: compiled.append(c.text) or original(self, c))
    manager = make_manager()
    for regex in ("a", "b", "c", "a", "d", "e", "a", "b"):
        wait_for(manager.start(request(regex=regex)))
    assert compiled == ["a", "b", "c", "d", "e", "b"]


def test_a_request_that_goes_on_is_where_it_was(make_manager):
    grammar = wait_for(make_manager().start(request(b"ab", regex="abc")))
    assert grammar.follow(b"c") == 1 and grammar.is_terminated


def test_auto_takes_the_first_engine_that_can_and_a_chosen_one_is_the_only_one(make_manager):
    pytest.importorskip("xgrammar")
    auto = make_manager()
    assert type(wait_for(auto.start(request(regex="a"))).backend).__name__ == "LLGuidance"
    chosen = make_manager(backend="xgrammar")
    assert type(wait_for(chosen.start(request(regex="a"))).backend).__name__ == "XGrammar"
    with pytest.raises(ClientError, match=r"\$\.format is not supported by xgrammar"):
        wait_for(chosen.start(request(json={"type": "string", "format": "email"})))
    assert wait_for(auto.start(request(json={"type": "string", "format": "email"})))
    with pytest.raises(ClientError, match="look-around"):
        wait_for(auto.start(request(regex="(?<=x)y")))


def test_what_is_wrong_is_told_and_not_kept(make_manager):
    manager = make_manager()
    for _ in range(2):
        with pytest.raises(ClientError, match="unclosed"):
            wait_for(manager.start(request(regex="[a-")))


def test_a_fault_of_ours_is_no_client_error(make_manager, monkeypatch):
    monkeypatch.setattr(LLGuidance, "compile", lambda self, c: 1 / 0)
    with pytest.raises(RequestFailedError, match="ZeroDivisionError"):
        wait_for(make_manager().start(request(regex="a")))


def test_a_grammar_that_takes_too_long_is_given_up(make_manager, monkeypatch):
    gate = threading.Event()
    original = LLGuidance.compile
    monkeypatch.setattr(LLGuidance, "compile", lambda self, c: gate.wait(60) and original(self, c))
    manager = make_manager(compile_timeout=1e-6)
    pending = manager.start(request(regex="a"))
    with pytest.raises(ClientError, match="not ready after 1e-06 s"):
        pending.poll()
    gate.set()


def test_the_defaults_of_the_engine(make_manager):
    compact = make_manager(disable_any_whitespace=True, disable_additional_properties=True)
    grammar = wait_for(compact.start(request(json={"properties": {"a": {"type": "integer"}}, "type": "object"})))
    with pytest.raises(Exception, match="does not follow"):
        grammar.follow(b'{ "a"')
    other = wait_for(compact.start(request(json={"properties": {"a": {"type": "integer"}}, "type": "object"})))
    with pytest.raises(Exception, match="does not follow"):
        other.follow(b'{"b"')


def test_masks_of_a_step(make_manager):
    manager = make_manager()
    first, second = (wait_for(manager.start(request(regex=regex))) for regex in ("ab", "xy"))
    masks = manager.fill([second, first])
    assert [int(masks[row].view("uint32").sum()) for row in (0, 1)] == [1 << ord("x") % 32, 1 << ord("a") % 32]
    assert len(manager.fill([first])) == 1


def test_a_mask_that_cannot_be_made_is_the_requests_own_fault(make_manager, monkeypatch):
    manager = make_manager()
    first, second = (wait_for(manager.start(request(regex=regex))) for regex in ("ab", "xy"))
    monkeypatch.setattr(LLGuidance, "fill", lambda self, grammars, masks, rows: {1: "too complex"})
    masks = manager.fill([first, second])
    assert not masks[1].any() and second.error.endswith("too complex") and first.error is None
