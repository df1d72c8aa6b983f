"""Text, stop strings, log probabilities, n answers and statistics, from scripted core outputs."""

import random

import msgspec
import pytest

from octavo.engine.input_processor import InputProcessor
from octavo.engine.open_request import OpenRequest
from octavo.engine.output_processor import OutputProcessor
from octavo.errors import EngineDeadError, QueueFullError, RequestFailedError
from octavo.types.outputs import EngineOutput, EngineOutputs, FinishReason, TokenLogprobs
from octavo.types.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.fakes import EOS, make_config

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


class Front:
    """A processor with one request in it, fed by hand."""

    def __init__(self, tokenizer, *, stream_interval=1, prompt="abc", **params):
        config = make_config()
        self.inputs = InputProcessor(config.model, config.scheduler, tokenizer)
        self.processor = OutputProcessor(tokenizer, stream_interval)
        self.request = self.open(prompt, **params)

    def open(self, prompt="abc", request_id="r", **params) -> OpenRequest:
        self.params = SamplingParams(**({"max_tokens": 100} | params))
        read, self.engine_requests = self.inputs.process(request_id, prompt, self.params, arrival_time=100.0)
        return self.processor.add(request_id, read.text, self.engine_requests)

    def feed(self, token_ids, *, index=0, time=101.0, **output):
        engine_id = self.engine_requests[index].request_id
        return self.processor.process(EngineOutputs([EngineOutput(engine_id, token_ids, **output)], timestamp=time))

    def take(self):
        return self.request.take() if self.request.has_news else None


def collect(outputs, kind) -> str:
    """The text of a stream of one choice."""
    texts = [choice.text for output in outputs for choice in output.outputs]
    return "".join(texts) if kind is DELTA else texts[-1]


def test_the_three_kinds_of_output(tokenizer, spell):
    seen = {}
    for kind in RequestOutputKind:
        front = Front(tokenizer, output_kind=kind)
        outputs = []
        for i, token_id in enumerate(spell("word")):
            front.feed([token_id], finish_reason=FinishReason.LENGTH if i == 3 else None)
            outputs.append(front.take())
        seen[kind] = [o and (o.outputs[0].text, o.outputs[0].token_ids, o.finished) for o in outputs]
    ids = spell("word")
    assert seen[CUMULATIVE] == [("word"[: i + 1], ids[: i + 1], i == 3) for i in range(4)]
    assert seen[DELTA] == [("word"[i], [ids[i]], i == 3) for i in range(4)]
    assert seen[FINAL_ONLY] == [None, None, None, ("word", ids, True)]


def test_a_slow_reader_gets_merged_deltas(tokenizer, spell):
    front = Front(tokenizer, output_kind=DELTA, logprobs=0)
    for token_id in spell("merged"):
        front.feed([token_id], logprobs=[TokenLogprobs([token_id], [-1.0], 1)])
    first = front.take().outputs[0]
    assert (first.text, first.token_ids, len(first.logprobs)) == ("merged", spell("merged"), 6)
    assert front.take() is None
    front.feed(spell("!"), logprobs=[TokenLogprobs(spell("!"), [-1.0], 1)], finish_reason=FinishReason.LENGTH)
    second = front.take().outputs[0]
    assert (second.text, len(second.logprobs), second.finish_reason) == ("!", 1, "length")
    assert second.cumulative_logprob == -7.0


def test_an_earlier_output_does_not_change_afterwards(tokenizer, spell):
    front = Front(tokenizer, output_kind=CUMULATIVE, logprobs=0)
    front.feed(spell("a"), logprobs=[TokenLogprobs(spell("a"), [-1.0], 1)])
    early = front.take().outputs[0]
    front.feed(spell("b"), logprobs=[TokenLogprobs(spell("b"), [-1.0], 1)])
    assert (early.token_ids, len(early.logprobs)) == (spell("a"), 1)
    assert len(front.take().outputs[0].logprobs) == 2


def test_the_stream_interval_gathers_tokens_but_not_the_first_or_the_last(tokenizer, spell):
    front = Front(tokenizer, output_kind=DELTA, stream_interval=3)
    texts = []
    for i, token_id in enumerate(spell("abcdefgh")):
        front.feed([token_id], finish_reason=FinishReason.LENGTH if i == 7 else None)
        output = front.take()
        texts.append(output.outputs[0].text if output else None)
    assert texts == ["a", None, None, "bcd", None, None, "efg", "h"]


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_a_stop_string_over_several_tokens_is_never_shown(tokenizer, spell, kind):
    front = Front(tokenizer, output_kind=kind, stop=["DEFGHIJ"])
    outputs, aborts = [], []
    for token_id in spell("xDEyDEFGHIJtail"):
        processed = front.feed([token_id])
        aborts += processed.aborts
        if front.request.has_news:
            outputs.append(front.request.take())
    for output in outputs[:-1]:
        assert "DEF" not in collect([output], kind)
    last = outputs[-1].outputs[0]
    assert collect(outputs, kind) == "xDEy"
    assert (last.finish_reason, last.stop_reason, outputs[-1].finished) == ("stop", "DEFGHIJ", True)
    assert aborts == [front.engine_requests[0].request_id]


def test_a_stop_inside_one_token_keeps_what_is_before_it(tokenizer):
    token_id = tokenizer.encode("et")[0]
    assert tokenizer.decode([token_id]) == "et"
    for stop, text in (("t", "e"), ("e", "")):
        front = Front(tokenizer, stop=[stop], logprobs=0)
        front.feed([token_id], logprobs=[TokenLogprobs([token_id], [-1.0], 1)])
        answer = front.take().outputs[0]
        assert (answer.text, answer.token_ids, len(answer.logprobs)) == (text, [token_id], 1)


@pytest.mark.parametrize("stop", [["GH"], ["GH", "H"], ["XY", "GH"]])
def test_an_included_stop_string_ends_the_text(tokenizer, spell, stop):
    front = Front(tokenizer, stop=stop, include_stop_str_in_output=True)
    front.feed(spell("abGHcd"))
    answer = front.take().outputs[0]
    assert (answer.text, answer.stop_reason, answer.token_ids) == ("abGH", "GH", spell("abGH"))


def test_stop_reasons_of_token_and_eos(tokenizer, spell):
    front = Front(tokenizer, stop_token_ids=spell("Z"))
    front.feed(spell("abZ"), finish_reason=FinishReason.STOP, stop_reason=spell("Z")[0])
    answer = front.take().outputs[0]
    assert (answer.text, answer.token_ids, answer.stop_reason) == ("ab", spell("abZ"), spell("Z")[0])
    front = Front(tokenizer)
    front.feed([*spell("ab"), EOS], finish_reason=FinishReason.STOP)
    answer = front.take().outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("ab", "stop", None)


def test_a_stop_before_min_tokens_does_not_count_then_or_later(tokenizer, spell):
    front = Front(tokenizer, stop=["GH"], min_tokens=6)
    for token_id in spell("aGHbcdeGHx"):
        front.feed([token_id])
    answer = front.take().outputs[0]
    assert (answer.text, len(answer.token_ids)) == ("aGHbcde", 9)


def test_half_a_character_at_the_end_becomes_one_replacement(tokenizer, spell):
    emoji = spell("🌶")
    assert len(emoji) == 4
    front = Front(tokenizer, output_kind=DELTA)
    texts = []
    for token_id in [*spell("a"), *emoji, *emoji[:2]]:
        front.feed([token_id])
        texts.append(front.take().outputs[0].text)
    front.feed([], finish_reason=FinishReason.LENGTH)
    assert [*texts, front.take().outputs[0].text] == ["a", "", "", "", "🌶", "", "", "�"]


def test_text_does_not_depend_on_how_tokens_and_reads_fall(tokenizer, spell):
    """Whatever the core groups and whenever the reader looks: the same text, tokens and log probabilities."""
    rng = random.Random(0)
    token_ids = spell("ab🌶STabcSTOPHEREtail")
    results = set()
    for kind in (CUMULATIVE, DELTA) * 20:
        front = Front(tokenizer, output_kind=kind, stop=["STOPHERE", "PHEx"])
        outputs, at = [], 0
        while not front.request.is_finished:
            size = rng.randint(1, 4)
            front.feed(token_ids[at : at + size])
            at += size
            if front.request.has_news and (rng.random() < 0.5 or front.request.is_finished):
                outputs.append(front.request.take())
        counts = [token_id for output in outputs for token_id in output.outputs[0].token_ids]
        results.add((collect(outputs, kind), tuple(counts if kind is DELTA else outputs[-1].outputs[0].token_ids)))
    assert results == {("ab🌶STabc", tuple(spell("ab🌶STabcSTOPHERE")))}


def test_logprobs_hold_the_chosen_token_first_and_once(tokenizer, spell):
    a, b, c = spell("abc")
    front = Front(tokenizer, logprobs=2)
    front.feed([a], logprobs=[TokenLogprobs([a, b, a], [-0.7, -0.5, -0.7], 2)])
    front.feed([c], logprobs=[TokenLogprobs([c, a, b], [-9.0, -0.1, -2.0], 77)], finish_reason=FinishReason.LENGTH)
    answer = front.take().outputs[0]
    first, second = answer.logprobs
    assert [(i, entry.rank, entry.decoded_token) for i, entry in first.items()] == [(a, 2, "a"), (b, 1, "b")]
    assert [(i, entry.logprob, entry.rank) for i, entry in second.items()] == [
        (c, -9.0, 77),
        (a, -0.1, 1),
        (b, -2.0, 2),
    ]
    assert answer.cumulative_logprob == pytest.approx(-9.7)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_prompt_logprobs_arrive_in_pieces(tokenizer, spell, kind):
    a, b, c, d = spell("abcd")
    front = Front(tokenizer, prompt="abcd", prompt_logprobs=0, output_kind=kind)
    outputs = []
    for output in (
        {"token_ids": [], "prompt_logprobs": [TokenLogprobs([b], [-1.0], 1), TokenLogprobs([c], [-2.0], 1)]},
        {"token_ids": [a], "prompt_logprobs": [TokenLogprobs([d], [-3.0], 1)]},
        {"token_ids": [b], "finish_reason": FinishReason.LENGTH},
    ):
        front.feed(**output)
        outputs.append(front.take())
    assert outputs[0] is None  # nothing to show while the prompt is computed
    with_scores = [output for output in outputs if output is not None and output.prompt_logprobs is not None]
    scores = with_scores[0].prompt_logprobs
    assert scores[0] is None
    assert [list(position) for position in scores[1:]] == [[b], [c], [d]]
    assert len(with_scores) == {CUMULATIVE: 2, DELTA: 1, FINAL_ONLY: 1}[kind]


def test_n_answers_come_as_one_request(tokenizer, spell):
    front = Front(tokenizer, n=2, output_kind=CUMULATIVE)
    assert [r.request_id[:2] for r in front.engine_requests] == ["0_", "1_"]
    front.feed(spell("x"), index=1)
    output = front.take()
    assert [(c.index, c.text) for c in output.outputs] == [(0, ""), (1, "x")]
    front.feed(spell("y"), index=1, finish_reason=FinishReason.LENGTH)
    assert not front.take().finished
    front.feed(spell("z"), index=0, finish_reason=FinishReason.LENGTH)
    output = front.take()
    assert output.finished and [c.text for c in output.outputs] == ["z", "xy"]
    assert front.processor.num_unfinished == 0


def test_deltas_show_only_the_answers_with_news(tokenizer, spell):
    front = Front(tokenizer, n=2, output_kind=DELTA)
    front.feed(spell("x"), index=1, finish_reason=FinishReason.LENGTH)
    assert [(c.index, c.text, c.finish_reason) for c in front.take().outputs] == [(1, "x", "length")]
    front.feed(spell("y"), index=0)
    assert [(c.index, c.finish_reason) for c in front.take().outputs] == [(0, None)]


def test_an_error_fails_the_request_and_ends_its_other_answers(tokenizer, spell):
    front = Front(tokenizer, n=3)
    front.feed(spell("a"), index=2)
    processed = front.feed([], index=1, finish_reason=FinishReason.ERROR, error="NaN in the logits")
    ids = [r.request_id for r in front.engine_requests]
    assert sorted(processed.aborts) == sorted(ids)
    assert isinstance(front.request.error, RequestFailedError)
    output = front.take()
    assert output.finished and output.error == "NaN in the logits"
    assert [c.finish_reason for c in output.outputs] == ["error"] * 3
    assert front.processor.num_unfinished == 0


def test_a_fault_in_one_answers_text_stays_there(tokenizer, spell, monkeypatch):
    front = Front(tokenizer)
    [good_id] = [r.request_id for r in front.engine_requests]
    good = front.request
    bad = front.open(request_id="bad", n=2)

    def fail(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr(bad.choices[0]._text, "update", fail)
    outputs = [EngineOutput(r.request_id, spell("x")) for r in front.engine_requests]
    processed = front.processor.process(EngineOutputs([*outputs, EngineOutput(good_id, spell("y"))]))
    assert isinstance(bad.error, RequestFailedError) and "ZeroDivisionError" in str(bad.error)
    assert sorted(processed.aborts) == sorted(r.request_id for r in front.engine_requests)
    assert good.take().outputs[0].text == "y" and front.processor.num_unfinished == 1


def test_a_refusal_keeps_its_class(tokenizer):
    front = Front(tokenizer)
    front.feed([], finish_reason=FinishReason.ERROR, error="too many wait", error_kind="QueueFullError")
    assert isinstance(front.request.error, QueueFullError)


def test_abort_by_name_ends_all_of_that_name_and_is_heard_once(tokenizer, spell):
    front = Front(tokenizer, stop=["GHI"])
    other = front.open("xyz", n=2)  # the same caller's id
    front.feed(spell("GH"), index=0)
    processed = front.processor.abort(["r", "unknown"])
    assert len(processed.aborts) == 3
    assert front.take().outputs[0].finish_reason == "abort"
    assert other.take().outputs[0].text == "GH"  # what was held back for a stop string comes out
    assert front.processor.abort(["r"]).aborts == []
    late = front.feed(spell("more"), index=0)  # what the core sent before it heard
    assert (late.aborts, late.finished, late.stats.num_generation_tokens) == ([], [], 0)


async def test_readers_of_a_dead_core_get_the_error(tokenizer):
    front = Front(tokenizer)
    front.processor.fail_all(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        await front.request.wait()


def test_statistics_of_a_request_from_arrival_to_end(tokenizer, spell):
    front = Front(tokenizer, prompt=spell("abcd"), n=2)
    first = front.feed(spell("x"), time=103.0, queued_time=101.0, num_cached_tokens=2)
    assert (first.stats.num_prompt_tokens, first.stats.num_cached_tokens, first.stats.num_generation_tokens) == (
        4,
        2,
        1,
    )
    assert first.stats.time_to_first_token == [3.0]
    sibling = front.feed(spell("x"), index=1, time=103.0, queued_time=101.0, num_cached_tokens=2)
    assert sibling.stats.num_prompt_tokens == 0  # counted once for all answers
    second = front.feed(spell("yz"), time=107.0, finish_reason=FinishReason.LENGTH, num_preemptions=1)
    assert second.stats.inter_token_latency == [4.0]
    done = second.stats.finished[0]
    assert (done.finish_reason, done.index, done.n, done.num_generation_tokens) == ("length", 0, 2, 3)
    assert (done.queue_seconds, done.prefill_seconds, done.decode_seconds, done.e2e_seconds) == (1.0, 2.0, 4.0, 7.0)
    assert (done.seconds_per_output_token, done.num_preemptions, done.num_cached_tokens) == (2.0, 1, 2)
    metrics = front.take().metrics
    assert (metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time) == (100.0, 101.0, 103.0)
    assert (metrics.last_token_time, metrics.num_generation_tokens) == (107.0, 4)


def test_tokens_behind_a_stop_string_are_counted_nowhere(tokenizer, spell):
    front = Front(tokenizer, stop=["b"])
    processed = front.feed(spell("abcd"))
    assert processed.stats.num_generation_tokens == 2 == processed.stats.finished[0].num_generation_tokens


def test_aborted_requests_are_counted(tokenizer, spell):
    front = Front(tokenizer)
    front.feed(spell("ab"))
    processed = front.processor.abort_request(front.request)
    assert [(f.finish_reason, f.num_generation_tokens) for f in processed.stats.finished] == [("abort", 2)]
    assert front.processor.abort_request(front.request).stats.finished == []


def test_without_detokenizing_there_is_no_text(tokenizer, spell):
    front = Front(tokenizer, detokenize=False)
    front.feed(spell("ab"), finish_reason=FinishReason.LENGTH)
    answer = front.take().outputs[0]
    assert (answer.text, answer.token_ids) == ("", spell("ab"))


def test_an_open_request_keeps_what_another_core_would_need(tokenizer, spell):
    front = Front(tokenizer, output_kind=DELTA, temperature=1.0)
    front.feed(spell("ab"))
    front.take()
    choice = front.request.choices[0]
    resumed = msgspec.structs.replace(choice.request, output_token_ids=choice.token_ids)
    assert resumed.output_token_ids == spell("ab")
    assert resumed.sampling_params.seed is not None
