"""Weights and caches that go and come back: by storage, through `LLM` on a real model, and on a GPU."""

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from octavo import LLM, SamplingParams
from octavo.errors import ClientError, ConfigError, EngineAsleepError
from octavo.worker import sleep
from octavo.worker.sleep import HostWeights
from tests.fixtures.checkpoints import write_random_llama

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 6, 7], [9] * 40, [11, 12])]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
OPTIONS = {"max_num_seqs": 4, "num_gpu_blocks_override": 40, "enable_sleep_mode": True, "skip_tokenizer_init": True}


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_storages_come_back_under_every_name(monkeypatch):
    """Ties, views, odd sizes, and storages that lie across chunks."""
    monkeypatch.setattr(sleep, "CHUNK_BYTES", 64)
    model = nn.Module()
    model.a = nn.Parameter(torch.randn(5, 7))
    model.tied = model.a
    model.row = nn.Parameter(model.a.data[2])
    model.register_buffer("table", torch.arange(3, dtype=torch.int8), persistent=False)
    model.register_buffer("none", torch.empty(0))
    view = model.a.data.t()
    expected = {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    stored = HostWeights(model)
    assert stored.num_bytes == 5 * 7 * 4 + 3
    assert all(not tensor.untyped_storage().nbytes() for tensor in (model.a, model.table, view))
    stored.restore()
    for name, tensor in expected.items():
        assert torch.equal(getattr(model, name), tensor), name
    assert model.tied is model.a and torch.equal(view, expected["a"].t())
    assert model.row.data_ptr() == model.a[2].data_ptr()


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True, "async_scheduling": True}, {"quantization": "fp8"}])
def test_answers_are_the_same_after_every_kind_of_sleep(tmp_path, options):
    folder = write_random_llama(tmp_path / "model", tokenizer=False)
    with LLM(str(folder), **OPTIONS, **options) as llm:
        expected = answers(llm)
        for level in (0, 1, 2):
            llm.sleep(level)
            with pytest.raises(EngineAsleepError, match=f"level {level}"):
                answers(llm)
            llm.wake_up()
            assert answers(llm) == expected
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        assert llm.apply_model(lambda model: sum(1 for _ in model.parameters()))[0] > 0
        with pytest.raises(EngineAsleepError):
            answers(llm)
        llm.wake_up(tags=["kv_cache"])
        assert answers(llm) == expected


def test_weights_changed_before_the_cache_wakes_are_served(tmp_path):
    """The order that reinforcement learning needs: weights, update, cache."""
    folder = write_random_llama(tmp_path / "model", tokenizer=False)
    other = write_random_llama(tmp_path / "other", seed=1, tokenizer=False)
    with LLM(str(other), **OPTIONS) as llm:
        expected = answers(llm)
        state = llm.apply_model(lambda model: {name: p.clone() for name, p in model.named_parameters()})[0]
    with LLM(str(folder), **OPTIONS) as llm:
        before = answers(llm)
        llm.sleep(level=1)
        llm.wake_up(tags=["weights"])
        llm.apply_model(lambda model: [p.data.copy_(state[name]) for name, p in model.named_parameters()] and None)
        llm.wake_up(tags=["kv_cache"])
        assert answers(llm) == expected != before
        with pytest.raises(ConfigError, match="sleeping"):
            llm.collective_rpc("reload_weights")
        llm.sleep(level=1)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")  # those of the disk
        llm.wake_up(tags=["kv_cache"])
        assert answers(llm) == before


def test_memory_falls_and_the_prefix_cache_is_empty(tmp_path):
    folder = write_random_llama(
        tmp_path / "model", tokenizer=False, hidden_size=1024, intermediate_size=4096, num_attention_heads=64
    )
    with LLM(str(folder), disable_log_stats=False, **{**OPTIONS, "num_gpu_blocks_override": 8000}) as llm:
        expected = answers(llm)
        [weights, cache] = llm.collective_rpc(sizes)[0]
        assert weights > 50 << 20 and cache > 100 << 20
        touch_cache(llm)
        awake = resident_bytes()
        llm.sleep(level=1)
        light = resident_bytes()
        assert awake - light > 0.9 * cache
        llm.wake_up()
        llm.sleep(level=2)
        assert light - resident_bytes() > 0.9 * weights
        llm.wake_up()
        hits = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:prefix_cache_hits"]
        assert answers(llm) == expected
        assert [metric.value for metric in llm.get_metrics() if metric.name == "vllm:prefix_cache_hits"] == hits


def sizes(worker) -> list[int]:
    parameters = sum(p.nbytes for p in worker.model.parameters())
    return [parameters, worker._kv.total_bytes]


def touch_cache(llm: LLM) -> None:
    """Have the system back the whole cache with memory, as a served engine's is after a while."""

    @torch.inference_mode()
    def touch(worker):
        for module in worker.model.modules():
            if hasattr(module, "kv_cache"):
                module.kv_cache.zero_()

    llm.collective_rpc(touch)


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_enqueued_requests(tmp_path):
    folder = write_random_llama(tmp_path / "model", tokenizer=False)
    with LLM(str(folder), **OPTIONS) as llm:
        expected = answers(llm)
        for mode, wanted in (("keep", expected), ("wait", expected), ("abort", [])):
            llm.enqueue(PROMPTS, GREEDY)
            llm.sleep(level=2, mode=mode)
            llm.wake_up()
            got = [output.outputs[0].token_ids for output in llm.wait_for_completion(use_tqdm=False)]
            assert got == wanted, mode
        with pytest.raises(ClientError, match="mode"):
            llm.sleep(mode="soon")


def test_it_has_to_be_asked_for(tmp_path):
    folder = write_random_llama(tmp_path / "model", tokenizer=False)
    with LLM(str(folder), **{**OPTIONS, "enable_sleep_mode": False}) as llm:
        llm.enqueue(PROMPTS, GREEDY)
        with pytest.raises(ClientError, match="enable_sleep_mode"):
            llm.sleep()
        assert len(llm.wait_for_completion(use_tqdm=False)) == 3


def test_weights_that_are_gone_from_disk_leave_it_asleep(tmp_path):
    folder = write_random_llama(tmp_path / "model", tokenizer=False)
    with LLM(str(folder), **OPTIONS) as llm:
        expected = answers(llm)
        llm.sleep(level=2)
        (folder / "model.safetensors").rename(tmp_path / "away")
        with pytest.raises(Exception, match="safetensors"):
            llm.wake_up()
        with pytest.raises(EngineAsleepError):
            answers(llm)
        (tmp_path / "away").rename(folder / "model.safetensors")
        llm.wake_up()
        assert answers(llm) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("level", [1, 2])
def test_graphs_are_right_after_waking_on_a_gpu(tmp_path, level):
    folder = write_random_llama(
        tmp_path / "model",
        tokenizer=False,
        hidden_size=1024,
        intermediate_size=65536,  # what libraries hold must not count beside the weights
        num_attention_heads=16,
        head_dim=64,
        dtype="bfloat16",
    )
    options = {**OPTIONS, "num_gpu_blocks_override": None, "kv_cache_memory_bytes": 4 << 30}
    with LLM(str(folder), **options) as llm:
        expected = answers(llm)
        held = torch.cuda.memory_reserved()
        for _ in range(2):
            llm.sleep(level)
            assert torch.cuda.memory_reserved() < 0.1 * held
            llm.wake_up()
            assert answers(llm) == expected
