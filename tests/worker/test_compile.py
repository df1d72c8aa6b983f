"""Compiled blocks and captured steps: the same answers, one piece of code for layers that are alike."""

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.worker.graphs import DecodeGraphs
from tests.models.harness import random_checkpoint

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 6, 7], [9, 8] * 20, [11, 12])]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
OPTIONS = {"max_num_seqs": 4, "num_gpu_blocks_override": 40, "skip_tokenizer_init": True, "max_model_len": 128}

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, and the compiler's


def answers(folder, **options) -> list[list[int]]:
    with LLM(str(folder), **{**OPTIONS, **options}) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture
def counters():
    """What the compiler counts, from nothing."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.fixture
def without_inductor(monkeypatch):
    """Blocks are traced as always, and the graphs run as they are: kernels take a minute to build."""
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: compile_module(self, backend="eager", **options)
    )


def test_layers_of_transformers_share_two_graphs(tmp_path, counters, without_inductor):
    """One for a single token and one for more, with attention inside."""
    random_checkpoint("olmo2", {}, tmp_path / "model")
    expected = answers(tmp_path / "model", model_impl="transformers")
    assert not counters["stats"]
    assert answers(tmp_path / "model", model_impl="transformers", compile=True) == expected
    assert not counters["graph_break"], counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "gptj"])
def test_other_layers_are_traced_right(tmp_path, counters, without_inductor, model_type):
    """Windows and soft caps, sinks and experts, parallel blocks."""
    changes = {
        "gemma2": {"head_dim": 16, "sliding_window": 16},
        "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "sliding_window": 16},
        "gptj": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 8},
    }
    random_checkpoint(model_type, changes[model_type], tmp_path / "model")
    expected = answers(tmp_path / "model", model_impl="transformers")
    assert answers(tmp_path / "model", model_impl="transformers", compile=True) == expected
    assert counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3", "lfm2"])
def test_native_layers_are_traced_around_their_attention(tmp_path, counters, without_inductor, model_type):
    """And around recurrent mixers."""
    changes = {"layer_types": ["conv", "full_attention", "conv"]} if model_type == "lfm2" else {}
    random_checkpoint(model_type, changes, tmp_path / "model")
    expected = answers(tmp_path / "model")
    assert answers(tmp_path / "model", optimization_level=3) == expected
    assert counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_inductor_gives_the_same_answers_and_keeps_its_work(tmp_path, counters, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    random_checkpoint("olmo2", {}, tmp_path / "model")
    expected = answers(tmp_path / "model")
    assert answers(tmp_path / "model", compile=True) == expected
    assert counters["inductor"]["fxgraph_cache_miss"]
    # The next start finds all of it on disk.
    torch._dynamo.reset()
    counters.clear()
    assert answers(tmp_path / "model", compilation_config={"mode": 3}) == expected
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    assert hits >= 2 and not counters["inductor"]["fxgraph_cache_miss"]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("model_type", ["olmo2", "gemma2", "gpt2"])
def test_graphs_and_compiled_blocks_of_transformers_models_on_a_gpu(tmp_path, model_type):
    changes = {"olmo2": {}, "gemma2": {"head_dim": 32, "sliding_window": 16}, "gpt2": {"n_embd": 64, "n_head": 2}}
    random_checkpoint(model_type, changes[model_type], tmp_path / "model")
    options = {"dtype": "float32", "model_impl": "transformers"}
    expected = answers(tmp_path / "model", enforce_eager=True, **options)
    assert answers(tmp_path / "model", **options) == expected
    assert answers(tmp_path / "model", compile=True, **options) == expected
    assert (
        answers(tmp_path / "model", compile=True, compilation_config={"cudagraph_mode": "NONE"}, **options) == expected
    )


@pytest.mark.gpu
@needs_gpu
def test_code_that_waits_for_the_device_is_found_before_a_capture():
    numbers = torch.arange(4, device="cuda")
    waiting = DecodeGraphs(lambda size: numbers[: int(numbers.max())], [1, 2])
    found = waiting.find_wait()
    assert found is not None and "test_compile.py" in found and "numbers.max()" in found
    assert torch.cuda.get_sync_debug_mode() == 0
    assert DecodeGraphs(lambda size: numbers[:size] + 1, [1, 2]).find_wait() is None
