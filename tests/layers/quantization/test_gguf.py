"""A GGUF model computed from its blocks: near its decoded self, the same by programs as operator by operator."""

import dataclasses

import gguf
import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear, UnquantizedMethod
from octavo.layers.quantization import choose_method
from octavo.layers.quantization.gguf import BlockParameter, GGUFMethod
from octavo.ops.cpu import runtime
from octavo.ops.linear.packed import PackedMatrix
from tests.fixtures.checkpoints import llama_config, llama_shapes
from tests.loader.gguf_files import LLAMA_METADATA, interleave_rows, write_gguf

needs_kernels = pytest.mark.skipif(not runtime.is_available(), reason="needs a C++ compiler")

VOCAB = 512
METADATA = LLAMA_METADATA | {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)],
    "tokenizer.ggml.token_type": [1] * VOCAB,
    "tokenizer.ggml.merges": ["t 1"],
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
# q, k and v in three types: each shard has its own kernel.
TYPES = {
    "attn_q": "Q4_1",
    "attn_k": "Q5_0",
    "attn_v": "Q8_0",
    "ffn_gate": "Q5_1",
    "ffn_up": "Q4_0",
    "token_embd": "Q8_0",
}


def write_model(path, types=TYPES, tied=True):
    """A random Llama in blocks."""
    config = llama_config(vocab_size=VOCAB, tie_word_embeddings=tied)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in llama_shapes(config).items():
        module, _, ending = name.rpartition(".")
        parts = module.split(".")
        if parts[1:2] == ["layers"]:
            target = f"blk.{parts[2]}.{NAMES['.'.join(parts[3:])]}"
        else:
            target = NAMES[module]
        if len(shape) == 1:
            data = rng.normal(1, 0.1, shape)
        else:
            data = rng.normal(0, 2 / shape[1] ** 0.5, shape)
        data = data.astype(np.float32)
        if target.endswith("attn_q"):
            data = interleave_rows(data, 4)
        elif target.endswith("attn_k"):
            data = interleave_rows(data, 2)
        kind = types.get(target.rpartition(".")[2], "Q4_1")
        if len(shape) == 2 and kind != "F32":
            blocks = gguf.quants.quantize(data, gguf.GGMLQuantizationType[kind])
            tensors[f"{target}.{ending}"] = (blocks, kind)
        else:
            tensors[f"{target}.{ending}"] = data
    return write_gguf(path, "llama", METADATA, tensors)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("gguf") / "m.gguf")


PROMPTS = [[(7 * i + j) % 500 for i in range(n)] for j, n in enumerate((3, 40, 17, 64))]


def generate(path, params, **options):
    settings = {"skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 8, "block_size": 16}
    with LLM(str(path), **(settings | options)) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def greedy(num_tokens, **options):
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, **options)


@needs_kernels
@pytest.mark.parametrize("tied", [True, False])
def test_scores_are_near_those_of_the_decoded_model(tmp_path, tied):
    """The first token's scores differ by the rounding of activations to 8 bits, much less than among themselves."""
    path = write_model(tmp_path / "m.gguf", tied=tied)
    params = greedy(1, logprobs=20)
    packed, decoded = (generate(path, params, logprobs_mode="raw_logits", **o) for o in ({}, {"dtype": "float32"}))
    differences, all_scores = [], []
    for (_, ours), (_, exact) in zip(packed, decoded, strict=True):
        both = ours[0].keys() & exact[0].keys()
        assert len(both) >= 15  # of the 20 likeliest tokens
        differences += [ours[0][t].logprob - exact[0][t].logprob for t in both]
        all_scores += [exact[0][t].logprob for t in both]
    assert np.std(differences) < 0.2 * np.std(all_scores)
    assert np.std(differences) > 0  # it was another computation


@needs_kernels
def test_programs_give_what_operators_give(model):
    """Greedy, seeded, and with a processor: by recorded programs and operator by operator, in a batch that shrinks."""
    lengths = (5, 30, 17, 24)
    variants = ({}, {"temperature": 1.0, "top_p": 0.9, "seed": 3}, {"repetition_penalty": 1.3}, {"logprobs": 2})
    for extra in variants:
        params = [
            SamplingParams(**({"temperature": 0.0, "max_tokens": n, "ignore_eos": True, "detokenize": False} | extra))
            for n in lengths
        ]
        assert generate(model, params) == generate(model, params, enforce_eager=True)


@needs_kernels
@pytest.mark.parametrize("limits", [{"max_num_batched_tokens": 24}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 8}])
def test_programs_run_chunks_beside_decodes(model, limits):
    want = generate(model, greedy(12), enforce_eager=True)
    assert generate(model, greedy(12), **limits) == want


@needs_kernels
def test_two_steps_in_flight_and_preemption_change_nothing(model):
    want = generate(model, greedy(40))
    assert generate(model, greedy(40), async_scheduling=True) == want
    assert generate(model, greedy(40), num_gpu_blocks_override=14) == want


@needs_kernels
def test_plain_numbers_beside_blocks_are_computed_as_they_are(tmp_path):
    path = write_model(tmp_path / "m.gguf", TYPES | {"attn_k": "F32", "ffn_down": "F32", "token_embd": "F32"})
    assert len(generate(path, greedy(10))[0][0]) == 10


def test_without_kernels_blocks_are_decoded(model, monkeypatch):
    monkeypatch.setattr(GGUFMethod, "is_supported", staticmethod(lambda: False))
    exact = generate(model, greedy(10), dtype="float32")
    decoded = generate(model, greedy(10), kv_cache_dtype="float32")
    assert decoded == exact


@needs_kernels
def test_methods_follow_the_configuration(model):
    with LLM(str(model), skip_tokenizer_init=True, max_model_len=64) as llm:
        load = llm.llm_engine.config.load
        kinds = llm.apply_model(
            lambda m: {
                name: [type(piece) for piece in layer.weight.pieces.values()]
                for name, layer in m.named_modules()
                if isinstance(layer, (Linear, Embedding))
            }
        )[0]
        assert set(map(tuple, kinds.values())) == {(PackedMatrix,) * n for n in (1, 2, 3)}
    assert isinstance(choose_method(load), GGUFMethod)
    assert isinstance(choose_method(dataclasses.replace(load, quantization=None)), UnquantizedMethod)


def test_a_piece_must_have_the_shape_of_its_place():
    place = BlockParameter.make((4, 8), 32)
    place.keep(torch.zeros(8, 32), 1)
    with pytest.raises(ValueError, match=r"expects shape \[4, 32\], the checkpoint has \[8, 32\]"):
        place.keep(torch.zeros(8, 32), 0)
