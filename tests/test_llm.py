"""`LLM`: prompts in, answers out, over the scripted executor."""

import io
import os
import signal
from dataclasses import replace

import pytest
from tqdm import tqdm

import octavo.engine.llm_engine
from octavo.config.args import EngineArgs
from octavo.errors import ClientError, ContextLengthError, EngineDeadError, ServerError
from octavo.llm import LLM
from octavo.metrics import Counter
from octavo.types.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.fakes import EOS, FAIL_ROW, RAISE, make_config
from tests.fixtures.tokenizers import write_byte_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def make_llm(tokenizer_dir, monkeypatch):
    """An LLM whose configuration is made by `make_config(**options)` instead of from a checkpoint."""

    def make(disable_log_stats=True, **options) -> LLM:
        config = make_config(**{"tokenizer": tokenizer_dir, **options})
        config = replace(config, observability=replace(config.observability, disable_log_stats=disable_log_stats))
        monkeypatch.setattr(octavo.engine.llm_engine, "create_engine_config", lambda args, usage: config)
        return LLM("fake")

    return make


@pytest.fixture
def llm(make_llm):
    with make_llm() as llm:
        yield llm


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "prompt", ["hello", [5, 6, 7], {"prompt": "hello"}, {"prompt_token_ids": [5, 6, 7], "prompt": "shown"}]
)
def test_one_prompt_or_a_list_of_them(llm, prompt):
    [one] = llm.generate(prompt, GREEDY, use_tqdm=False)
    [same, _] = llm.generate([prompt, "other"], GREEDY, use_tqdm=False)
    assert one.finished and len(one.outputs[0].token_ids) == 8
    assert (one.prompt, one.prompt_token_ids, ids([one])) == (same.prompt, same.prompt_token_ids, ids([same]))


def test_results_keep_the_order_of_the_prompts(make_llm):
    llm = make_llm(max_num_seqs=3)
    prompts = [[5] * (1 + i % 5) + [i + 3] for i in range(20)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + 7 * i % 11) for i in range(20)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [p.max_tokens for p in params]
    assert [ids(llm.generate([p], [q], use_tqdm=False))[0] for p, q in zip(prompts, params, strict=True)] == ids(
        outputs
    )


def test_no_prompts_no_answers(llm):
    assert llm.generate([], GREEDY) == []


def test_two_steps_in_flight_and_chunks_change_nothing(make_llm):
    prompts = [list(range(3, 3 + n)) for n in (1, 15, 16, 17, 40, 90)]
    params = SamplingParams(max_tokens=20, seed=5, logprobs=1, n=2)
    results = []
    for options in ({}, {"async_scheduling": True}, {"max_num_batched_tokens": 8}, {"num_blocks": 16}):
        outputs = make_llm(**options).generate(prompts, params, use_tqdm=False)
        results.append([[(c.token_ids, c.cumulative_logprob) for c in o.outputs] for o in outputs])
    assert results == [results[0]] * 4


def test_nothing_runs_when_one_request_is_wrong(llm):
    for prompts, params, kind in (
        (["good", ""], GREEDY, ClientError),
        (["good", [5] * 300], GREEDY, ContextLengthError),
        (["good", "good"], [GREEDY], ValueError),
        (["good"], ["not parameters"], ClientError),
        (["good", "good"], [GREEDY, SamplingParams(stop_token_ids=[9999])], ValueError),
    ):
        with pytest.raises(kind):
            llm.generate(prompts, params, use_tqdm=False)
    for options in ({"priority": 1}, {"priority": [0]}, {"lora_request": object()}, {"tokenization_kwargs": {"x": 1}}):
        with pytest.raises(ClientError):
            llm.generate(["good", "good"], GREEDY, use_tqdm=False, **options)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine._client._core._executor.steps == []


def test_priorities_are_one_a_prompt(make_llm):
    llm = make_llm(policy="priority", max_num_seqs=1)
    llm.generate([[5], [6], [7]], GREEDY, priority=[2, 0, 1], use_tqdm=False)
    steps = llm.llm_engine._client._core._executor.steps
    assert [new.token_ids for step in steps for new in step.new_rows] == [[6], [7], [5]]


def test_the_models_defaults_hold_without_parameters(make_llm):
    llm = make_llm(model={"default_sampling_params": {"temperature": 0.6, "top_k": 20, "max_tokens": 3}})
    default = llm.get_default_sampling_params()
    assert (default.temperature, default.top_k, default.max_tokens) == (0.6, 20, 3)
    [output] = llm.generate("x", use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


def test_the_callers_parameters_are_not_changed(llm):
    params = SamplingParams(max_tokens=2, output_kind=RequestOutputKind.DELTA)
    llm.generate("x", params, use_tqdm=False)
    assert params == SamplingParams(max_tokens=2, output_kind=RequestOutputKind.DELTA)


def test_chat_goes_through_the_template(make_llm, tokenizer_dir):
    llm = make_llm()
    tokenizer = llm.get_tokenizer()
    conversation = [{"role": "user", "content": "hi"}]
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    llm = make_llm(scripts={tuple(tokenizer.encode(prompt)): [*tokenizer.encode("hello"), EOS]})
    [one] = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert (one.prompt, texts([one]), one.outputs[0].finish_reason) == (prompt, ["hello"], "stop")
    assert texts(llm.chat([conversation, conversation], GREEDY, use_tqdm=False)) == ["hello"] * 2
    [continued] = llm.chat(
        [*conversation, {"role": "assistant", "content": "hel"}],
        GREEDY,
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert continued.prompt == prompt + "hel"
    [own] = llm.chat(conversation, GREEDY, use_tqdm=False, chat_template="[{{ messages[0]['content'] }}]")
    assert own.prompt == "[hi]"


def test_a_failed_request_is_marked_and_the_others_are_answered(make_llm):
    llm = make_llm()
    good, bad, also_good = llm.generate([[5], [FAIL_ROW], [6]], GREEDY, use_tqdm=False)
    assert (bad.finished, bad.outputs[0].finish_reason) == (True, "error")
    assert "told to fail" in bad.error
    assert good.error is None and len(good.outputs[0].token_ids) == len(also_good.outputs[0].token_ids) == 8


def test_a_dead_engine_says_so(make_llm):
    llm = make_llm(max_num_seqs=1)
    with pytest.raises(EngineDeadError, match=r"^the engine core failed: 3 steps in a row failed"):
        llm.generate([[RAISE]] * 3, GREEDY, use_tqdm=False)
    with pytest.raises(EngineDeadError, match="failed earlier"):
        llm.generate("x", GREEDY, use_tqdm=False)


def test_interrupt_leaves_a_usable_engine(make_llm, monkeypatch):
    """Ctrl-C in the middle of a step ends the call after that step, with every request aborted."""
    llm = make_llm(async_scheduling=True)
    [want] = ids(llm.generate([[5, 6]], GREEDY, use_tqdm=False))
    executor = llm.llm_engine._client._core._executor
    compute = executor._compute

    def interrupt_then_compute(*args):
        monkeypatch.setattr(executor, "_compute", compute)
        os.kill(os.getpid(), signal.SIGINT)
        compute(*args)

    monkeypatch.setattr(executor, "_compute", interrupt_then_compute)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6], [7]], SamplingParams(max_tokens=200, n=2), use_tqdm=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.reset_prefix_cache() is True
    assert ids(llm.generate([[5, 6]], GREEDY, use_tqdm=False)) == [want]


def test_enqueue_and_wait(llm):
    first = llm.enqueue([[5], [6]], GREEDY)
    second = llm.enqueue([7, 8], GREEDY)
    with pytest.raises(ServerError, match="wait_for_completion"):
        llm.generate("x", GREEDY)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [o.request_id for o in outputs] == [*first, *second]
    assert [o.prompt_token_ids for o in outputs] == [[5], [6], [7, 8]]
    assert llm.wait_for_completion() == []


def test_the_progress_bar_counts_requests(llm, capsys):
    llm.generate([[5], [6], [7]], GREEDY)
    assert "3/3" in capsys.readouterr().err
    llm.generate([[5]], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    stream = io.StringIO()
    llm.generate([[5]], GREEDY, use_tqdm=lambda **options: tqdm(file=stream, **options))
    assert "output" in stream.getvalue() and "tokens/s" in stream.getvalue()


def test_metrics_need_statistics(make_llm):
    with pytest.raises(ClientError, match="disable_log_stats=False"):
        make_llm().get_metrics()
    llm = make_llm(disable_log_stats=False)
    llm.generate([[5], [6, 7]], GREEDY, use_tqdm=False)
    counters = {m.name: m.value for m in llm.get_metrics() if isinstance(m, Counter) and len(m.labels) == 2}
    assert (counters["vllm:prompt_tokens"], counters["vllm:generation_tokens"]) == (3, 16)


def test_workers_can_be_reached(llm):
    assert llm.collective_rpc("echo", args=(1,)) == [[[1], {}]]
    assert llm.collective_rpc(lambda executor, x: x + 1, args=(1,)) == [2]
    assert llm.apply_model(lambda model: model.upper()) == ["THE MODEL"]
    assert llm.get_world_size() == 1
    with pytest.raises(ClientError):
        llm.reset_prefix_cache(reset_running_requests=True)


def test_leaving_the_context_lets_go_of_the_workers(make_llm):
    with make_llm() as llm:
        executor = llm.llm_engine._client._core._executor
    assert executor.is_shut_down


def test_without_a_tokenizer_ids_are_answered(make_llm):
    llm = make_llm(tokenizer=None)
    [output] = llm.generate([5, 6], SamplingParams(max_tokens=4, detokenize=False), use_tqdm=False)
    assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (4, "")
    with pytest.raises(ClientError, match="without a tokenizer"):
        llm.chat([{"role": "user", "content": "x"}])


def test_from_engine_args(make_llm):
    make_llm()  # puts the configuration in place
    llm = LLM.from_engine_args(EngineArgs(model="fake"))
    assert len(llm.generate([[5]], GREEDY, use_tqdm=False)) == 1


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="max_model_length"):
        LLM("fake", max_model_length=5)


def test_a_synchronous_engine_streams(make_llm):
    engine = make_llm().llm_engine
    engine.add_request("a", [5], SamplingParams(max_tokens=3, output_kind=RequestOutputKind.DELTA))
    engine.add_request("b", [6], SamplingParams(max_tokens=9))
    seen = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen.append((output.request_id, len(output.outputs[0].token_ids), output.finished))
            if seen[-1] == ("a", 1, True):
                engine.abort_request(["b"])
    assert [s for s in seen if s[0] == "a"] == [("a", 1, False), ("a", 1, False), ("a", 1, True)]
    assert [s for s in seen if s[0] == "b"] == [("b", 1, False), ("b", 2, False), ("b", 3, False)]
    assert engine.get_num_unfinished_requests() == 0
