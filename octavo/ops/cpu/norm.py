"""The C++ kernel of RMSNorm, with and without a residual."""

import ctypes

import torch

from octavo.ops.cpu.runtime import call, count, empty, is_available, runtime
from octavo.ops.cpu.structs import NormArgs
from octavo.ops.norm import add_norm, rms_norm


def _reads(*tensors: torch.Tensor) -> bool:
    return all(t.dtype == torch.float32 and not t.is_cuda and t.is_contiguous() for t in tensors)


def _accepts_norm(x, weight, eps) -> bool:
    return x.dim() == 2 and len(x) > 0 and x.shape[1] % runtime().lanes == 0 and _reads(x, weight)


def _accepts_add(x, weight, eps, residual) -> bool:
    return _accepts_norm(x, weight, eps) and _reads(residual)


@rms_norm.register("cpu", supported=is_available, accepts=_accepts_norm)
def _rms_norm_cpu(x, weight, eps):
    return _normalise(x, weight, eps, None)


@add_norm.register("cpu", supported=is_available, accepts=_accepts_add)
def _add_norm_cpu(x, weight, eps, residual):
    return _normalise(x, weight, eps, residual)


def _normalise(x, weight, eps, residual):
    rows = count(x.shape[0])
    out = empty(tuple(x.shape))
    args = NormArgs(
        x=x.data_ptr(),
        rows=ctypes.addressof(rows),
        width=x.shape[1],
        weight=weight.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        out=out.data_ptr(),
        eps=eps,
    )
    call("rms_norm", args, rows, weight)
    return out
