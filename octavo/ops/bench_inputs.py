"""Calls of the sizes of a model of eight billion parameters, for operators whose test inputs are too small to be timed.

Loaded by `octavo bench kernels` alone. A CPU gets batches that it would be given.
"""

from typing import Any

import torch

from octavo.ops.activation import gated_activation
from octavo.ops.attention import decode_attention
from octavo.ops.cpu.runtime import is_available, runtime
from octavo.ops.embedding import embedding
from octavo.ops.inputs import prepare_inputs, store_sampled
from octavo.ops.linear.gguf_linear import gguf_embedding, gguf_linear
from octavo.ops.linear.packed import PackedMatrix, QuantKind, random_matrix
from octavo.ops.logits import top_logprobs
from octavo.ops.rope import qkv_rope_write, write_kv
from octavo.ops.sampling import sample
from octavo.ops.ssm.conv import short_conv
from octavo.ops.ssm.delta import gated_delta_rule
from octavo.ops.ssm.mamba import state_space_dual
from octavo.ops.ssm.requests import Requests, make_requests

HIDDEN, INTERMEDIATE, VOCAB = 4096, 14336, 128256
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, CONTEXT = 32, 8, 128, 64, 1024


def _batches(device: str) -> tuple[int, ...]:
    return (1, 8) if device == "cpu" else (1, 16, 256)


def _cache(num_tokens: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.ones(num_tokens // BLOCK_SIZE + 1, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype, device=device)


def _qkv(rng: torch.Generator, tokens: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, generator=rng).to(device, dtype)


def _cos_sin(rng: torch.Generator, device: str) -> torch.Tensor:
    angles = torch.rand(CONTEXT, HEAD_DIM // 2, generator=rng)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def _decode_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    width = CONTEXT // BLOCK_SIZE
    for num in _batches(device):
        table = torch.arange(1, num * width + 1, dtype=torch.int32, device=device).view(num, width)
        last = torch.full((num,), CONTEXT - 1, device=device)
        slots = table[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1
        lens = torch.full((num,), CONTEXT, dtype=torch.int32, device=device)
        cache = _cache(num * CONTEXT, dtype, device)
        shape = (CONTEXT, HEADS, KV_HEADS, HEAD_DIM**-0.5)
        yield _qkv(rng, num, dtype, device), last, _cos_sin(rng, device), cache, slots, table, lens, *shape


def _decode_work(qkv, positions, cos_sin, kv_cache, slots, table, seq_lens, max_len, num_heads, num_kv_heads, *rest):
    """The projections, the results, and each request's keys and values; the two products."""
    num_keys, head_dim = int(seq_lens.sum()), kv_cache.shape[-1]
    elements = qkv.numel() + len(qkv) * num_heads * head_dim
    kv_bytes = 2 * num_keys * num_kv_heads * head_dim * kv_cache.element_size()
    return elements * qkv.element_size() + kv_bytes, 4 * num_keys * num_heads * head_dim


def _rope_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for tokens in (*_batches(device), CONTEXT):
        positions = torch.arange(tokens, device=device)
        cache = _cache(CONTEXT, dtype, device)
        yield (
            _qkv(rng, tokens, dtype, device),
            positions,
            _cos_sin(rng, device),
            cache,
            positions + BLOCK_SIZE,
            HEADS,
            KV_HEADS,
        )


def _write_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for tokens in (*_batches(device), CONTEXT):
        k, v = torch.randn(2, tokens, KV_HEADS, HEAD_DIM, generator=rng).to(device, dtype)
        yield k, v, _cache(CONTEXT, dtype, device), torch.arange(BLOCK_SIZE, BLOCK_SIZE + tokens, device=device)


def _embedding_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    weight = torch.ones(VOCAB // 4, HIDDEN, dtype=dtype, device=device)
    for tokens in (*_batches(device), CONTEXT):
        yield torch.randint(0, len(weight), (tokens,), generator=rng).to(device), weight


def _activation_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for tokens in (*_batches(device), CONTEXT):
        yield torch.randn(tokens, 2 * INTERMEDIATE, generator=rng).to(device, dtype), "silu"


def _sample_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    """Greedy, drawn, and drawn from a filtered distribution."""
    for num in _batches(device):
        logits = (3 * torch.randn(num, VOCAB, generator=rng)).to(device, dtype)
        rows = torch.arange(num, dtype=torch.int32, device=device)
        ones = torch.ones(num, device=device)
        seeds = torch.arange(num, device=device)
        for all_greedy, any_filter in ((True, False), (False, False), (False, True)):
            top_k = torch.full((num,), 50 * any_filter, dtype=torch.int32, device=device)
            top_p = 0.9 * ones if any_filter else ones
            yield logits, rows, rows, ones * (not all_greedy), top_k, top_p, 0 * ones, seeds, all_greedy, any_filter


def _logprob_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for num in _batches(device):
        chosen = torch.randint(0, VOCAB, (num,), generator=rng, dtype=torch.int32).to(device)
        yield torch.randn(num, VOCAB, generator=rng).to(device, dtype), 20, chosen


def _step_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    """Rows of a decode step with 8192 tokens of context."""
    max_rows, max_len = 256, 8192
    for num in _batches(device):

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        tables, long = ints(max_rows + 1, max_len // BLOCK_SIZE), torch.int64
        arange = torch.arange(num, dtype=torch.int32, device=device)
        # No request advances, or the counters would run off the rows after some thousand calls.
        rows = (arange, arange, ints(num + 1), ints(max_rows + 1), ints(max_rows + 1, max_len))
        outputs = (ints(num, dtype=long), ints(num, dtype=long), ints(num), [ints(num, dtype=long)])
        yield *rows, [tables], [BLOCK_SIZE], *outputs, [ints(num, max_len // BLOCK_SIZE)]


def _step_work(rows, token_request, query_start_loc, num_computed, token_ids, block_tables, block_sizes, *outputs):
    """Each request's block table is copied; beside it, some forty bytes a request."""
    return len(rows) * (2 * block_tables[0].shape[1] * 4 + 40), 0


def _store_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for num in _batches(device):
        rows = torch.arange(num, dtype=torch.int32, device=device)
        yield rows, rows, rows, torch.zeros(num + 1, 8192, dtype=torch.int32, device=device)


def _packed(rng: torch.Generator) -> PackedMatrix:
    """The format of most weights in 4-bit files, in the layout of the machine at hand."""
    return random_matrix(rng, HIDDEN, HIDDEN, QuantKind.U4, 32, True, runtime().lanes if is_available() else 8)


def _gguf_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for tokens in (1, 8, 64):
        yield torch.randn(tokens, HIDDEN, generator=rng), (_packed(rng),)


def _gguf_work(x, shards, *rest):
    rows = sum(shard.rows for shard in shards)
    return x.nbytes + sum(shard.data.nbytes for shard in shards) + 4 * len(x) * rows, 2 * x.numel() * rows


def _gguf_embedding_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    for tokens in (1, 64):
        yield torch.randint(0, HIDDEN, (tokens,), generator=rng), _packed(rng)


def _recurrent_steps(device: str):
    """Decode steps, and one of a prompt."""
    yield from (make_requests(device, *[(CONTEXT, 1)] * num) for num in _batches(device))
    yield make_requests(device, (0, CONTEXT))


def _recurrent_work(*arguments: Any):
    """Every operand and a result like the first once; of the states, which are the last before `Requests`, both ways."""
    place = next(i for i, a in enumerate(arguments) if isinstance(a, Requests))
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    return sum(t.nbytes for t in (*tensors, arguments[place - 1], arguments[0])), 0


def _conv_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    channels, width = 8192, 4
    for requests in _recurrent_steps(device):
        x = torch.randn(int(requests.query_start_loc[-1]), channels, generator=rng).to(device, dtype)
        weight = torch.randn(channels, width, generator=rng).to(device, dtype)
        states = torch.zeros(len(requests.rows), width - 1, channels, dtype=dtype, device=device)
        yield x, weight, None, states, requests, "silu"


def _dual_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    """A layer of a Mamba 2 of three billion parameters."""
    heads, head_dim, size = 80, 64, 128
    for requests in _recurrent_steps(device):
        tokens = int(requests.query_start_loc[-1])
        xbc = torch.randn(tokens, heads * head_dim + 2 * size, generator=rng).to(device, dtype)
        dt = torch.randn(tokens, heads, generator=rng).to(device, dtype)
        states = torch.zeros(len(requests.rows), heads, head_dim, size, device=device)
        yield xbc, dt, *torch.zeros(3, heads, device=device), states, requests, (0.0, 1e9)


def _delta_inputs(rng: torch.Generator, dtype: torch.dtype, device: str):
    """A layer of Qwen3-Next of eighty billion parameters."""
    key_heads, heads, dim = 16, 32, 128
    for requests in _recurrent_steps(device):
        tokens = int(requests.query_start_loc[-1])
        qkv = torch.randn(tokens, (2 * key_heads + heads) * dim, generator=rng).to(device, dtype)
        b, a = torch.randn(2, tokens, heads, generator=rng).to(device, dtype)
        states = torch.zeros(len(requests.rows), heads, dim, dim, device=device)
        yield qkv, b, a, *torch.zeros(2, heads, device=device), states, requests, key_heads


decode_attention.bench_inputs, decode_attention.bytes_and_flops = _decode_inputs, _decode_work
qkv_rope_write.bench_inputs = _rope_inputs
qkv_rope_write.bytes_and_flops = lambda qkv, positions, *rest: (2 * qkv.nbytes + len(qkv) * (HEAD_DIM * 4 + 16), 0)
write_kv.bench_inputs = _write_inputs
write_kv.bytes_and_flops = lambda k, v, kv_cache, slots, *rest: (2 * (k.nbytes + v.nbytes) + slots.nbytes, 0)
embedding.bench_inputs = _embedding_inputs
embedding.bytes_and_flops = lambda ids, weight, *rest: (
    len(ids) * 2 * weight.shape[1] * weight.element_size() + ids.nbytes,
    0,
)
gated_activation.bench_inputs = _activation_inputs
sample.bench_inputs = _sample_inputs
top_logprobs.bench_inputs = _logprob_inputs
prepare_inputs.bench_inputs, prepare_inputs.bytes_and_flops = _step_inputs, _step_work
store_sampled.bench_inputs = _store_inputs
store_sampled.bytes_and_flops = lambda sampled, *rest: (16 * len(sampled), 0)
gguf_linear.bench_inputs, gguf_linear.bytes_and_flops = _gguf_inputs, _gguf_work
gguf_embedding.bench_inputs = _gguf_embedding_inputs
gguf_embedding.bytes_and_flops = lambda ids, table, *rest: (
    len(ids) * (table.data.nbytes // table.rows + 4 * table.cols),
    0,
)
short_conv.bench_inputs, short_conv.bytes_and_flops = _conv_inputs, _recurrent_work
state_space_dual.bench_inputs, state_space_dual.bytes_and_flops = _dual_inputs, _recurrent_work
gated_delta_rule.bench_inputs, gated_delta_rule.bytes_and_flops = _delta_inputs, _recurrent_work
