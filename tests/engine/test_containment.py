"""Promise 3: a fault inside a step fails the requests of that step; everybody else gets the answer they would have got.

Faults are injected into a real worker with a small model, at each stage of a step. The invariants of scheduler and cache
are checked after every step.
"""

import random

import pytest
import torch

from octavo.config.args import EngineArgs
from octavo.engine.llm_engine import LLMEngine
from octavo.errors import EngineDeadError
from octavo.types.outputs import RequestOutput
from octavo.types.sampling_params import RequestOutputKind, SamplingParams
from octavo.worker.logits_processors import LogitsProcessor

STAGES = {
    "apply": lambda worker: (worker.rows, "fill"),
    "forward": lambda worker: (worker.runner, "forward"),
    "sample": lambda worker: (worker.runner.sampler, "sample"),
    "result": lambda worker: (worker.runner, "_hand_over"),
}


@pytest.fixture(autouse=True)
def _check_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CHECK_INVARIANTS", "1")


@pytest.fixture
def make_engine(tiny_llama_dir):
    engines = []

    def make(**options) -> LLMEngine:
        options = {
            "dtype": "float32",
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "num_gpu_blocks_override": 40,
            "block_size": 16,
            "enforce_eager": True,
        } | options
        engines.append(LLMEngine.from_engine_args(EngineArgs(model=str(tiny_llama_dir), **options)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


def requests() -> dict[str, tuple[list[int], SamplingParams]]:
    """More than run at once; several share a prefix of two blocks."""
    rng = random.Random(1)
    shared = [rng.randrange(3, 500) for _ in range(33)]
    found = {}
    for index in range(9):
        prompt = [*shared, 5 + index] if index % 2 else [rng.randrange(3, 500) for _ in range(5 + 4 * index)]
        params = SamplingParams(
            temperature=0.0 if index % 3 else 1.0,
            seed=index,
            max_tokens=12,
            ignore_eos=True,
            logprobs=1 if index == 4 else None,
            repetition_penalty=1.2 if index == 5 else 1.0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        found[str(index)] = (prompt, params)
    return found


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Answer `requests()` to the end; every block must be back."""
    for request_id, (prompt, params) in requests().items():
        engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    while engine._client.has_work:
        engine.step()
    assert engine.reset_prefix_cache()
    return outputs


def tokens(outputs: dict[str, RequestOutput]) -> dict[str, list[int]]:
    return {request_id: output.outputs[0].token_ids for request_id, output in outputs.items()}


class Fault:
    """Makes one call of a stage raise, and notes who was in the step that it hit."""

    def __init__(self, engine: LLMEngine, stage: str, at: int, monkeypatch: pytest.MonkeyPatch):
        self.victims: set[str] | None = None
        self._at = at
        self._num_calls = 0
        self._names: dict[int, str] = {}
        self._step: list[str] = []
        executor = engine._client._core._executor
        owner, name = STAGES[stage](executor.worker)
        original, execute = getattr(owner, name), executor.execute

        def watched(step):
            self._names |= {new.row: new.request_id for new in step.new_rows}
            self._step = [self._names[row] for row in step.rows]
            return execute(step)

        def faulty(*args, **kwargs):
            self._num_calls += 1
            if self._num_calls == self._at:
                self.victims = {engine_id.rpartition("-")[0] for engine_id in self._step}
                if stage != "result":
                    raise RuntimeError("injected")
            result = original(*args, **kwargs)
            if self._num_calls == self._at:
                monkeypatch.setattr(result, "_finish", _raise)
            return result

        monkeypatch.setattr(executor, "execute", watched)
        monkeypatch.setattr(owner, name, faulty)


def _raise():
    raise RuntimeError("injected")


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_step_fails_its_own_requests_alone(make_engine, monkeypatch, stage, at, async_scheduling):
    want = tokens(run(make_engine(async_scheduling=async_scheduling)))
    engine = make_engine(async_scheduling=async_scheduling)
    with monkeypatch.context() as patch:
        fault = Fault(engine, stage, at, patch)
        outputs = run(engine)
    assert fault.victims, "the fault did not happen"
    failed = {request_id for request_id, output in outputs.items() if output.error}
    assert failed == fault.victims
    assert all("injected" in outputs[request_id].error for request_id in failed)
    assert {i: t for i, t in tokens(outputs).items() if i not in failed} == {
        i: t for i, t in want.items() if i not in failed
    }
    # The engine is as good as new.
    assert tokens(run(engine)) == want


class Bad(LogitsProcessor):
    """Raises, writes NaN or forbids everything for the requests that ask for `seed` 7."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how

    def add_row(self, row, new):
        if new.sampling_params.seed == 7:
            if self.how == "refuse":
                raise ValueError("injected")
            self.rows.add(row)

    def apply(self, logits, step):
        if self.how == "raise":
            raise ValueError("injected")
        for index, row in enumerate(step.rows_cpu):
            if row in self.rows:
                logits[index] = {"nan": float("nan"), "forbid": -float("inf"), "infinite": float("inf")}[self.how]


@pytest.mark.parametrize("how", ["refuse", "raise", "nan", "forbid", "infinite"])
def test_a_bad_logits_processor_fails_its_users_alone(make_engine, how):
    want = tokens(run(make_engine()))
    engine = make_engine()
    chain = engine._client._core._executor.worker.runner.sampler.chain
    bad = Bad(how)
    chain.processors.append(bad)
    outputs = run(engine)
    assert {request_id for request_id, output in outputs.items() if output.error} == {"7"}
    assert {**tokens(outputs), "7": want["7"]} == want
    chain.processors.remove(bad)
    assert tokens(run(engine)) == want


def test_nan_in_one_row_of_the_cache_stays_there(make_engine):
    """Its keys and values are NaN from some layer on; neighbours, later users of the blocks and of the row do not mind."""
    want = tokens(run(make_engine()))
    engine = make_engine()
    worker = engine._client._core._executor.worker
    embed = worker.model.get_submodule("model.embed_tokens")
    poison = next(i for i in range(500, 512) if not any(i in token_ids for token_ids in want.values()))
    with torch.no_grad():
        before = embed.weight[poison].clone()
        embed.weight[poison] = float("nan")
    engine.add_request("bad", {"prompt_token_ids": [poison] * 40}, SamplingParams(max_tokens=5))
    outputs = run(engine)
    assert outputs["bad"].error and "NaN" in outputs["bad"].error
    del outputs["bad"]
    assert tokens(outputs) == want
    with torch.no_grad():
        embed.weight[poison] = before


def test_a_core_in_this_process_says_that_nobody_restarts_it(make_engine, monkeypatch):
    engine = make_engine(max_num_seqs=1)
    monkeypatch.setattr(engine._client._core._executor.worker.runner, "forward", lambda *args: _raise())
    with pytest.raises(EngineDeadError, match=r"3 steps in a row failed.*use AsyncLLM or the server"):
        run(engine)
    with pytest.raises(EngineDeadError, match="make a new LLM"):
        engine.step()
