"""Users' logits processors: vLLM's interface over permanent rows, faults, and the engine around them."""

import random
from importlib.metadata import EntryPoint

import pytest
import torch

from octavo import (
    LLM,
    AdapterLogitsProcessor,
    AsyncLLM,
    BatchUpdate,
    EngineArgs,
    LogitsProcessor,
    SamplingParams,
    plugins,
)
from octavo.errors import ClientError, ConfigError
from octavo.utils.class_names import class_name, load_class
from octavo.worker.custom_logits import CustomProcessor, MoveDirectionality, process_dict_updates
from tests.worker.custom_processors import BatchBias, ForceToken, KeepTwo
from tests.worker.test_sampler import CPU, VOCAB, Rig, ladder

FORCE, BIAS = class_name(ForceToken), class_name(BatchBias)
FLAT = torch.zeros(1, VOCAB)


def rig_with(cls: type[LogitsProcessor]) -> tuple[Rig, LogitsProcessor]:
    inner = cls(None, CPU, False)
    return Rig(processors=[CustomProcessor(inner)]), inner


def test_requests_without_a_function_keep_the_short_path():
    rig, _ = rig_with(ForceToken)
    rig.add(0)
    rig.add(1, extra_args={"force": 7})
    assert rig.sampler.is_plain([0])
    assert not rig.sampler.is_plain([0, 1])
    assert rig.tokens(ladder(2, 5), 0, 1) == [5, 7]
    rig.remove(1)
    assert rig.sampler.is_plain([0, 1])


def test_functions_see_prompt_and_growing_output():
    rig, _ = rig_with(ForceToken)
    rig.add(3, prompt=(1, 2, 3), extra_args={"count_up": 1})
    assert [rig.tokens(FLAT, 3)[0] for _ in range(4)] == [3, 6, 12, 24]
    # Resumed after preemption: the output so far comes with the request.
    rig.remove(3)
    rig.add(5, prompt=(1, 2, 3), output=(3, 6), extra_args={"count_up": 1})
    assert rig.tokens(FLAT, 5) == [12]


def test_batches_of_any_order_are_told_truthfully():
    """Rows come, go, pause and change places; each request's own bias must always hit."""
    rng = random.Random(3)
    rig, inner = rig_with(BatchBias)
    favourites: dict[int, int] = {}
    outputs: dict[int, list[int]] = {}
    for _ in range(300):
        for row in range(8):
            if row in favourites and rng.random() < 0.15:
                rig.remove(row)
                del favourites[row]
            if row not in favourites and rng.random() < 0.4:
                favourites[row], outputs[row] = rng.randrange(VOCAB), []
                rig.add(row, prompt=(row, 2), extra_args={"favourite": favourites[row]})
        rows = [row for row in favourites if rng.random() < 0.8 and rig.lengths[row] < 60]
        rng.shuffle(rows)
        if not rows:
            continue
        assert rig.tokens(torch.zeros(len(rows), VOCAB), *rows) == [favourites[row] for row in rows]
        for index, row in enumerate(rows):
            favourite, prompt_ids, output_ids = inner.batch[index]
            assert (favourite, prompt_ids[0], output_ids) == (favourites[row], row, outputs[row])
            outputs[row].append(favourite)


def test_an_unchanged_batch_is_not_told_again(monkeypatch):
    rig, inner = rig_with(BatchBias)
    told = []
    update_state = inner.update_state
    monkeypatch.setattr(inner, "update_state", lambda update: (told.append(update), update_state(update)))
    rig.add(1)
    rig.add(2)
    for rows in ((1, 2), (1, 2), (2, 1), (2,)):
        rig.step(torch.zeros(len(rows), VOCAB), *rows)
    assert [update and (update.batch_size, list(update.removed), len(update.added)) for update in told] == [
        (2, [], 2),
        None,
        (2, [], 0),
        (1, [1], 0),
    ]
    assert told[2].moved == [(1, 0, MoveDirectionality.SWAP)]


def test_a_fault_of_one_function_is_its_requests_alone():
    rig, _ = rig_with(ForceToken)
    rig.add(0, extra_args={"force": 7})
    rig.add(1, extra_args={"boom": 1})
    rig.add(2)
    rig.add(4, extra_args={"refuse": True})
    output = rig.step(ladder(4, 5), 1, 0, 2, 4)
    assert output.sampled_token_ids == [[5], [7], [5], []]
    assert list(output.errors) == [3] and "cannot take this one" in output.errors[3]
    output = rig.step(ladder(3, 5), 2, 1, 0)
    assert output.sampled_token_ids == [[5], [], [7]]
    assert list(output.errors) == [1] and "boom" in output.errors[1]


def test_a_fault_of_a_batch_processor_fails_the_step_that_used_it():
    rig, _ = rig_with(BatchBias)
    rig.add(0, extra_args={"favourite": -2})
    rig.add(1)
    assert [rig.step(ladder(2, 5), 0, 1).errors for _ in range(2)] == [None, None]
    output = rig.step(ladder(2, 5), 0, 1)
    assert set(output.errors) == {0, 1} and "batch broken" in output.errors[0]
    rig.remove(0)
    rig.remove(1)
    rig.add(1)
    assert rig.tokens(ladder(1, 5), 1) == [5]


def test_wrong_shapes_are_refused():
    class Shrink(KeepTwo):
        def is_argmax_invariant(self):
            return False

        def apply(self, logits):
            return logits[:, :5]

    rig, _ = rig_with(Shrink)
    rig.add(0)
    assert "must return logits of shape (1, 96), not (1, 5)" in rig.step(FLAT, 0).errors[0]


def test_argmax_invariant_processors_see_scaled_logits_of_random_requests_only():
    rig, inner = rig_with(KeepTwo)
    rig.add(0)
    rig.add(1, temperature=0.5, seed=1)
    logits = ladder(2, 5, 6, 7)
    tokens = {tuple(rig.tokens(logits, 0, 1)) for _ in range(20)}
    assert tokens <= {(5, 5), (5, 6)}
    assert all(torch.equal(seen, logits[1:] / 0.5) for seen in inner.seen)
    assert rig.sampler.is_plain([0])


def test_dictionary_updates():
    state = {0: "a", 1: "b", 2: "c"}
    make = lambda params, prompt, output: params and f"new-{params}"  # noqa: E731
    assert not process_dict_updates(state, None, make)
    update = BatchUpdate(
        3,
        [0],
        [(0, None, [], []), (3, "x", [], [])],
        [(3, 0, MoveDirectionality.UNIDIRECTIONAL), (1, 2, MoveDirectionality.SWAP)],
    )
    assert process_dict_updates(state, update, make)
    assert state == {0: "new-x", 1: "c", 2: "b"}


def test_names_of_classes():
    class Local:
        pass

    assert FORCE == "tests.worker.custom_processors:ForceToken"
    assert load_class(class_name(Local)) is Local
    for name in ("nothing", ":X", "m:"):
        with pytest.raises(ValueError, match="module:Class"):
            load_class(name)


class _Echo(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        return None


def test_the_engine_around_them(tiny_llama_dir):
    with LLM(str(tiny_llama_dir), logits_processors=[ForceToken, _Echo], max_num_seqs=4) as llm:
        params = [
            SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, extra_args=args)
            for args in (None, {"force": 65}, {"boom": 2}, {"force": 66})
        ]
        plain, a, boom, b = llm.generate([[1, 2, 3]] * 4, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in (a, b)] == [[65] * 3, [66] * 3]
        assert "boom" in boom.error and plain.error is None
        with pytest.raises(ClientError, match="must be a token id"):
            llm.generate([[1]], SamplingParams(extra_args={"force": "x"}), use_tqdm=False)
        assert (
            llm.generate([[1, 2, 3]], params[0], use_tqdm=False)[0].outputs[0].token_ids == plain.outputs[0].token_ids
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["nowhere:Thing"], "nowhere:Thing cannot be loaded"),
        (["tests.worker.custom_processors:Missing"], "Missing cannot be loaded"),
        (["octavo.llm:LLM"], "not a subclass"),
        ([LogitsProcessor], "cannot be made"),
    ],
)
def test_processors_that_cannot_be_had_stop_the_start(tiny_llama_dir, given, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_llama_dir), logits_processors=given)


def test_a_core_of_its_own_process_takes_importable_classes_only(tiny_llama_dir):
    class Local(_Echo):
        pass

    with pytest.raises(ConfigError, match="cannot import; move it to a module"):
        AsyncLLM.from_engine_args(EngineArgs(model=str(tiny_llama_dir), logits_processors=[Local]))
    with pytest.raises(ConfigError, match="leave async_scheduling out"):
        LLM(str(tiny_llama_dir), logits_processors=[ForceToken], async_scheduling=True)


async def test_a_core_of_its_own_process_calls_them(tiny_llama_dir):
    engine = AsyncLLM.from_engine_args(EngineArgs(model=str(tiny_llama_dir), logits_processors=[ForceToken]))
    try:
        params = SamplingParams(max_tokens=3, ignore_eos=True, extra_args={"force": 65})
        outputs = [output async for output in engine.generate([1, 2], params, "a")]
        assert outputs[-1].outputs[0].token_ids == [65] * 3
        with pytest.raises(ClientError, match="must be a token id"):
            async for _ in engine.generate([1, 2], SamplingParams(extra_args={"force": "x"}), "b"):
                pass
    finally:
        engine.shutdown()


def test_plugins_bring_processors(tiny_llama_dir, monkeypatch):
    point = EntryPoint("force", FORCE, plugins.LOGITS_PROCESSORS)
    monkeypatch.setattr(plugins, "find", lambda group: [point] if group == plugins.LOGITS_PROCESSORS else [])
    with LLM(str(tiny_llama_dir), logits_processors=[FORCE]) as llm:
        assert llm.llm_engine.model_config.logits_processors == [FORCE]
        params = SamplingParams(max_tokens=2, ignore_eos=True, extra_args={"force": 65})
        assert llm.generate([[1]], params, use_tqdm=False)[0].outputs[0].token_ids == [65, 65]


def test_arguments_for_nobody_are_refused(tiny_llama_dir):
    with LLM(str(tiny_llama_dir)) as llm, pytest.raises(ClientError, match="has no taker"):
        llm.generate([[1]], SamplingParams(extra_args={"force": 65}), use_tqdm=False)
