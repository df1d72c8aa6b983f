"""Profiles: what a trace holds, when it begins and ends, and what Nsight Systems would be told."""

import gzip
import json

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ClientError, ConfigError, ConflictError
from octavo.worker.profiler import add_layer_ranges
from tests.fixtures.checkpoints import write_random_llama

OPTIONS = {"max_num_seqs": 4, "num_gpu_blocks_override": 40, "skip_tokenizer_init": True, "enforce_eager": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_random_llama(tmp_path_factory.mktemp("model") / "rand", tokenizer=False))


def generate(llm: LLM, num_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [5, 6]}], params, use_tqdm=False)


def read(file: str) -> list[str]:
    """Names of a trace's events."""
    with gzip.open(file) as stream:
        return [event.get("name", "") for event in json.load(stream)["traceEvents"]]


def test_traces_hold_steps_by_name(folder, tmp_path):
    config = {"torch_profiler_dir": str(tmp_path / "traces"), "torch_profiler_with_stack": False}
    with LLM(folder, **OPTIONS, profiler_config=config) as llm:
        with pytest.raises(ConflictError, match="start"):
            llm.stop_profile()
        llm.start_profile("mine")
        with pytest.raises(ConflictError, match="stop"):
            llm.start_profile()
        generate(llm, 4)
        [file] = llm.stop_profile()
        names = read(file)
        assert file.startswith(str(tmp_path / "traces" / "mine-")) and file.endswith(".json.gz")
        assert [names.count(f"octavo: {call}") for call in ("execute", "update")] == [4, 4]
        assert "octavo: schedule" in names and "aten::linear" in names
        # Two steps after a wait of one, then nothing more is recorded.
        llm.start_profile(delay_iterations=1, max_iterations=2)
        generate(llm, 6)
        [file] = llm.stop_profile()
        assert read(file).count("octavo: update") == 2
        for prefix in ("../up", "a/b", ""):
            with pytest.raises(ClientError, match="file name"):
                llm.start_profile(prefix)


def test_without_a_folder_there_is_no_profiler_and_no_range(folder):
    with LLM(folder, **OPTIONS) as llm:
        with pytest.raises(ConfigError, match="profiler_config"):
            llm.start_profile()
        scheduler = llm.llm_engine._client._core._scheduler
        assert "schedule" not in vars(scheduler)  # the class's own method, unwrapped


def test_layers_show_as_nested_ranges(monkeypatch):
    told = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: told.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("end"))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    add_layer_ranges(model)
    model(torch.ones(1, 2))
    assert told == ["Sequential", "0", "end", "1", "end", "end"]
    del told[:]
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert told.count("end") == len(told) / 2  # a step that fails leaves no range open
