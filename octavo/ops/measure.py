"""How fast each provider of an operator is, beside what the machine can do. Used by `octavo bench kernels`.

A time is the median of many calls on the same operands, which stay in the caches that hold them: a rate above the copy
bandwidth means that they fit. On a GPU calls are queued back to back between two events, so that launch overhead counts as
far as it is not hidden, as in a step without a graph.
"""

import importlib
import pkgutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import octavo.ops
from octavo.ops.registry import REGISTRY, Op, describe_call

REPEATS = 5
_COPY_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
_MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True)
class Ceilings:
    """What a device reaches at best on plain work."""

    copy_bytes_per_second: float  # read and written
    matmul_flops_per_second: float


@dataclass(frozen=True)
class Measurement:
    """One provider on one call."""

    op: str
    provider: str
    call: str  # shapes and dtypes
    seconds: float
    num_bytes: int
    flops: int


def load_operators() -> dict[str, Op]:
    """Every operator with every provider this machine may use."""
    for module in pkgutil.walk_packages(octavo.ops.__path__, "octavo.ops."):
        # Kernels are registered below, where they can run; the rest of the names define operators.
        if not any(word in module.name for word in ("triton", "fa3", ".cpu", ".measure")):
            importlib.import_module(module.name)
    octavo.ops.load_providers()
    return REGISTRY


def measure_ceilings(dtype: torch.dtype, device: str, seconds: float) -> Ceilings:
    """Copy bandwidth, and arithmetic of a large matrix product in `dtype`."""
    kind = torch.device(device).type
    source = torch.ones(_COPY_BYTES[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    size = _MATMUL_SIZE[kind]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return Ceilings(
        2 * source.numel() / time_call(lambda: target.copy_(source), device, seconds, min),
        2 * size**3 / time_call(lambda: a @ b, device, seconds, min),
    )


def measure_op(
    op: Op, dtype: torch.dtype, device: str, seconds: float, only: Sequence[str] = ()
) -> Iterator[Measurement]:
    """Each provider (of `only`, when given) that accepts it, the reference last, on each of the benchmark inputs."""
    make = op.bench_inputs or op.inputs
    if make is None:
        return
    providers: list[tuple[str, Callable[..., bool], Callable[..., Any]]] = [
        (provider.name, provider.accepts, provider.fn) for provider in op.providers if provider.is_available()
    ]
    providers.append(("torch", lambda *arguments: True, op.reference))
    if only:
        providers = [entry for entry in providers if entry[0] in only]
    for arguments in make(torch.Generator().manual_seed(0), dtype, device):
        call = describe_call(arguments, {})
        for name, accepts, fn in providers:
            if not accepts(*arguments):
                continue
            num_bytes, flops = estimate(op, arguments, fn(*arguments))
            spent = time_call(lambda fn=fn, arguments=arguments: fn(*arguments), device, seconds)  # type: ignore[misc]
            yield Measurement(op.name, name, call, spent, num_bytes, flops)


def estimate(op: Op, arguments: tuple[Any, ...], result: Any) -> tuple[int, int]:
    """(bytes, floating-point operations) of a call: the operator's own estimate, or its tensors' bytes and no operations."""
    if op.bytes_and_flops is not None:
        return op.bytes_and_flops(*arguments)
    # A result that is one of the arguments, changed in place, is read and written: it counts twice.
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors([*arguments, result])), 0


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def time_call(
    call: Callable[[], object],
    device: str,
    seconds: float,
    choose: Callable[[Iterable[float]], float] = statistics.median,
) -> float:
    """Seconds of `call`, chosen among REPEATS series that take about `seconds` together."""
    measure = _time_on_gpu if torch.device(device).type == "cuda" else _time_on_cpu
    call()
    once = measure(call, 1)
    num = max(1, int(seconds / REPEATS / max(once, 1e-7)))
    return choose([measure(call, num) for _ in range(REPEATS)])


def _time_on_cpu(call: Callable[[], object], num: int) -> float:
    started = time.perf_counter()
    for _ in range(num):
        call()
    return (time.perf_counter() - started) / num


def _time_on_gpu(call: Callable[[], object], num: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(num):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / num
