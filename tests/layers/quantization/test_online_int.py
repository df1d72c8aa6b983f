"""`quantization="int8"` and "int4": weights rounded while they load, near the model they were."""

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear
from octavo.layers.quantization.online_int import OnlineIntMethod
from octavo.ops.cpu.linear import is_available, pack_rounded
from octavo.ops.linear.packed import QuantKind, unpack
from tests.config.test_resolve import FakeCpu, FakeGpu, decide
from tests.fixtures.checkpoints import write_random_llama

needs_kernels = pytest.mark.skipif(not is_available(), reason="needs a C++ compiler")
PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 250 for i in range(n)]} for j, n in enumerate((3, 40, 17))]


def logits(path, **options):
    """The scores of all tokens after each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, detokenize=False)
    with LLM(
        str(path), max_model_len=128, max_num_seqs=4, logprobs_mode="raw_logits", max_logprobs=-1, **options
    ) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        return np.array([[e.logprob for _, e in sorted(o.outputs[0].logprobs[0].items())] for o in outputs])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "steps"), [(8, 254), (4, 15)])
def test_no_number_moves_by_more_than_a_step(dtype, bits, steps):
    weight = torch.randn(21, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3, 32:64] = 0
    groups = weight.float().unflatten(1, (-1, 32))
    packed = pack_rounded(weight, bits)
    error = (unpack(packed).unflatten(1, (-1, 32)) - groups).abs()
    spread = 2 * groups.abs().amax(-1) if bits == 8 else groups.amax(-1) - groups.amin(-1)
    # Four bits may give up the ends of a range for smaller steps in it: a tenth of the range at either end.
    assert (error <= spread[..., None] * (0.51 / steps if bits == 8 else 0.105 + 0.51 / steps)).all()
    assert float((error**2).mean()) < float(((spread / steps) ** 2).mean()) / 11  # uniform rounding: step^2 / 12
    assert packed.kind == (QuantKind.S8 if bits == 8 else QuantKind.U4)


@needs_kernels
@pytest.mark.parametrize("tied", [False, True])
def test_scores_stay_near(tmp_path, tied):
    path = write_random_llama(tmp_path / "m", tie_word_embeddings=tied)
    exact = logits(path, dtype="float32")
    eight, four = (np.std(logits(path, quantization=q) - exact) / np.std(exact) for q in ("int8", "int4"))
    assert 0 < eight < 0.06
    assert eight < four < 0.4


@needs_kernels
def test_every_matrix_is_packed_and_odd_ones_are_left(tmp_path, caplog):
    path = write_random_llama(tmp_path / "m", intermediate_size=72)
    with LLM(str(path), max_model_len=64, quantization="int4") as llm:
        kinds = llm.apply_model(
            lambda m: {
                name.rpartition(".")[2]: [piece.kind for piece in getattr(layer.weight, "pieces", {}).values()]
                for name, layer in m.named_modules()
                if isinstance(layer, (Linear, Embedding))
            }
        )[0]
    four, eight = QuantKind.U4, QuantKind.S8
    assert kinds == {
        "embed_tokens": [eight],
        "lm_head": [eight],
        "qkv_proj": [four] * 3,
        "o_proj": [four],
        "gate_up_proj": [four] * 2,
        "down_proj": [],
    }
    assert "mlp.down_proj keeps its data type: 72 columns" in caplog.text


def test_where_it_is_refused(monkeypatch):
    made = decide(FakeCpu(), quantization="int4").config
    assert (made.load.quantization, made.model.dtype, made.cache.kv_cache_dtype) == ("int4", "float32", "float16")
    for platform, options, why in (
        (FakeGpu(), {}, "for CPUs"),
        (FakeCpu(), {"load_format": "dummy"}, "dummy"),
        (FakeCpu(), {"dtype": "bfloat16"}, "dtype=bfloat16"),
        (FakeCpu(), {"model_impl": "transformers"}, "transformers"),
    ):
        with pytest.raises(ConfigError, match=f"quantization=int8 is not supported here: .*{why}"):
            decide(platform, quantization="int8", **options)
    monkeypatch.setattr(OnlineIntMethod, "is_supported", staticmethod(lambda: False))
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler"):
        OnlineIntMethod(8)
