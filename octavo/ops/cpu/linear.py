"""The C++ kernels of quantised weights: packing, products, embedding rows."""

import ctypes

import torch

from octavo.ops.cpu.runtime import call, count, empty, is_available, load_library, most, runtime
from octavo.ops.cpu.structs import ACTIVATIONS, MAX_SHARDS, EmbeddingArgs, LinearArgs, PackedWeight
from octavo.ops.linear.gguf_linear import gguf_embedding, gguf_linear
from octavo.ops.linear.packed import PackedMatrix, QuantKind


def pack_gguf(blocks: torch.Tensor, ggml_type: str) -> PackedMatrix | None:
    """Pack GGUF blocks [rows, bytes a row] uint8; None where there is no kernel for the type."""
    rows, cols = blocks.shape[0], _num_columns(blocks.shape[1], ggml_type)
    weight, size = runtime().describe(ggml_type, rows, cols)
    if size == 0:
        return None
    data = runtime().weights.empty(size)
    runtime().pack(ggml_type, blocks.contiguous(), data, weight)
    return PackedMatrix(
        data, rows, cols, QuantKind(weight.kind), weight.group, weight.zero, bool(weight.has_min), weight.gain,
        runtime().lanes,
    )  # fmt: skip


def pack_rounded(weight: torch.Tensor, bits: int) -> PackedMatrix:
    """Round a matrix of numbers to 8 bits (symmetric) or 4 bits (with a minimum) in groups of 32 columns, and pack it."""
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        weight = weight.float()
    name = f"int{bits} {str(weight.dtype).removeprefix('torch.')}"
    packed = pack_gguf(weight.contiguous().view(torch.uint8), name)
    assert packed is not None, name
    return packed


def finish_packing() -> None:
    """All weights of a model are packed."""
    runtime().weights.close()


def _num_columns(row_bytes: int, ggml_type: str) -> int:
    library = load_library()
    assert library is not None
    library.octavo_gguf_columns.restype = ctypes.c_int64
    return library.octavo_gguf_columns(ggml_type.encode(), ctypes.c_int64(row_bytes))


def _structure(matrix: PackedMatrix) -> PackedWeight:
    m = matrix
    return PackedWeight(m.data.data_ptr(), m.rows, m.cols, m.kind, m.group, m.zero, m.has_min, m.gain, 0)


def _has_own_layout(matrix: PackedMatrix) -> bool:
    """Whether the matrix is packed for this machine's instruction set."""
    run = runtime()
    return matrix.lanes == run.lanes and (not matrix.kind.is_signed or matrix.zero == run.signed_offset)


def _is_plain(x: torch.Tensor | None, width: int) -> bool:
    """Whether a kernel can read x [tokens, width]: float32 on the CPU, rows in one piece."""
    return x is None or (x.dtype == torch.float32 and not x.is_cuda and x.stride(-1) == 1 and x.shape[-1] == width)


def _accepts_linear(
    x, shards, bias=None, norm_weight=None, eps=0.0, activation=None, residual=None, scale=1.0, fine=False
) -> bool:  # fmt: skip
    rows = [shard.rows for shard in shards]
    width = rows[0] if activation is not None else sum(rows)
    return (
        x.dim() == 2
        and _is_plain(x, shards[0].cols)
        and _is_plain(bias, sum(rows))
        and _is_plain(norm_weight, shards[0].cols)
        and _is_plain(residual, width)
        and all(map(_has_own_layout, shards))
        and len(shards) <= MAX_SHARDS
        and (activation is None or (activation in ACTIVATIONS and len(rows) == 2 and rows[0] == rows[1]))
    )


@gguf_linear.register("cpu", supported=is_available, accepts=_accepts_linear)
def _gguf_linear_cpu(
    x, shards, bias=None, norm_weight=None, eps=0.0, activation=None, residual=None, scale=1.0, fine=False
):  # fmt: skip
    tokens, cols = x.shape
    width = shards[0].rows if activation is not None else sum(shard.rows for shard in shards)
    out = empty((tokens, width))
    if tokens == 0:
        return out
    run, num_tokens, terms = runtime(), count(tokens), 2 if fine else 1
    workspace = run.workspace(run.library.octavo_linear_workspace(most(tokens), cols, terms, run.num_threads))
    args = LinearArgs(
        x=x.data_ptr(),
        x_stride=x.stride(0),
        tokens=ctypes.addressof(num_tokens),
        cols=cols,
        num_shards=len(shards),
        activation=ACTIVATIONS[activation],
        terms=terms,
        bias=None if bias is None else bias.data_ptr(),
        norm_weight=None if norm_weight is None else norm_weight.data_ptr(),
        eps=eps,
        scale=scale,
        residual=None if residual is None else residual.data_ptr(),
        residual_stride=0 if residual is None else residual.stride(0),
        out=out.data_ptr(),
        out_stride=width,
        workspace=workspace.data_ptr(),
    )
    for i, shard in enumerate(shards):
        args.shards[i] = _structure(shard)
    call("linear", args, num_tokens, shards, bias, norm_weight, workspace)
    return out


def _accepts_embedding(input_ids, table, scale=1.0) -> bool:
    return (
        input_ids.dtype == torch.int64
        and input_ids.is_contiguous()
        and not input_ids.is_cuda
        and _has_own_layout(table)
    )


@gguf_embedding.register("cpu", supported=is_available, accepts=_accepts_embedding)
def _gguf_embedding_cpu(input_ids, table, scale=1.0):
    num_tokens = count(input_ids.shape[0])
    out = empty((input_ids.shape[0], table.cols))
    args = EmbeddingArgs(input_ids.data_ptr(), ctypes.addressof(num_tokens), _structure(table), scale, out.data_ptr())
    call("embedding", args, num_tokens, input_ids, table)
    return out
