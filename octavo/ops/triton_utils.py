"""What the Triton providers share on the host: launching, programmatic dependent launch, scratch memory, tuned tables.

Nothing here imports Triton, so any module may import this one.

Programmatic dependent launch (PDL, compute capability 9 and up) lets a kernel start while its predecessor still runs: it
asks for its weights and waits (`gdc_wait`) before it touches what the predecessor made. The rules that keep this safe:

* a kernel launched with PDL waits in at least one program, so "complete" stays transitive along the chain;
* before the wait it reads only weights, the step's metadata (lengths, positions, block tables) and KV of earlier steps;
* whatever prepares a step's metadata is launched without PDL, or followed by a kernel that waits before it lets its own
  successors start (`embedding` does);
* it writes only after the wait.

Neighbours without PDL (vendor libraries, torch) need nothing: they begin and end as whole kernels.
"""

import contextlib
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_TUNED_DIR = Path(__file__).parent / "tuned"
_NUM_COUNTERS = 1 << 16

_pdl_override: bool | None = None
_recorded: list["Launch"] | None = None
_scratch: dict[tuple[str, torch.device], torch.Tensor] = {}
_retired: list[torch.Tensor] = []
_device_name_override: str | None = None


@functools.cache
def _device_has_pdl() -> bool:
    return torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)


def uses_pdl() -> bool:
    """Whether kernels are launched as programmatic dependents here."""
    return _device_has_pdl() if _pdl_override is None else _pdl_override


@contextlib.contextmanager
def override_pdl(value: bool) -> Iterator[None]:
    """Force PDL on or off: for measurements, and for compiling ahead on a machine without a GPU."""
    global _pdl_override
    previous, _pdl_override = _pdl_override, value
    try:
        yield
    finally:
        _pdl_override = previous


@dataclass(frozen=True)
class NotedTensor:
    """Stands for a tensor in a noted launch: all that a kernel is compiled for, as Triton asks it."""

    dtype: torch.dtype
    is_aligned: bool  # to 16 bytes

    def data_ptr(self) -> int:
        """An address of the same alignment."""
        return 0 if self.is_aligned else 4


def _note(value: Any) -> Any:
    return NotedTensor(value.dtype, value.data_ptr() % 16 == 0) if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class Launch:
    """A launch that was noted instead of made."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, pdl: bool | None = None, **constants: Any
) -> None:
    """Launch a kernel, as a programmatic dependent where it has a constexpr PDL; inside `record_launches` only note it."""
    options: dict[str, Any] = {**constants, "num_warps": num_warps}
    if "PDL" in kernel.arg_names:
        options["PDL"] = uses_pdl() if pdl is None else pdl
        if options["PDL"]:
            options["launch_pdl"] = True
    if _recorded is not None:
        _recorded.append(Launch(kernel, tuple(map(_note, args)), options))
        return
    settle_hashes(kernel.fn.__module__)
    kernel[grid](*args, **options)


@functools.cache
def settle_hashes(module: str) -> None:
    """Give the kernels of a module the hashes, by which Triton's cache knows them, that they have in every other process.

    Triton counts the globals of a helper into its caller's hash only where the helper was hashed before, so it depends on
    what was launched first. Here helpers come first: their modules before those that import them, then in order of definition.
    """
    for value in list(vars(sys.modules[module]).values()):
        if hasattr(value, "used_global_vals"):
            if value.fn.__module__ != module:
                settle_hashes(value.fn.__module__)
            _ = value.cache_key


@contextlib.contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Collect every launch instead of running it: the list of what to compile ahead."""
    global _recorded
    previous, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = previous


def is_recording() -> bool:
    """Whether launches are only noted (`record_launches`)."""
    return _recorded is not None


def scratch(name: str, numel: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Uninitialised memory that persists under `name`; kernels that run one after another share it.

    Outgrown buffers stay alive: a captured graph may hold their address.
    """
    found = _scratch.get((name, device))
    if found is None or found.numel() < numel:
        if found is not None:
            _retired.append(found)
        found = torch.empty(max(1 << (numel - 1).bit_length(), 1 << 12), dtype=dtype, device=device)
        _scratch[name, device] = found
    return found


def counters(numel: int, device: torch.device) -> torch.Tensor:
    """Zeroed int32 arrival counters, which every kernel leaves at zero again.

    One set serves all kernels of a stream. They must exist before a graph is captured: zeroing recorded in a graph would not
    have happened for the launches before its first replay.
    """
    if numel > _NUM_COUNTERS:
        raise ValueError(f"{numel} arrival counters asked for; there are {_NUM_COUNTERS}")
    found = _scratch.get(("counters", device))
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("run a kernel once before capturing it: its counters must be zeroed outside the graph")
        found = torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)
        _scratch["counters", device] = found
    return found


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def table_name(device_name: str) -> str:
    """File name of a device's tuned table: "NVIDIA H200" becomes "nvidia_h200"."""
    return re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_")


@functools.cache
def tuned_table(section: str) -> dict[str, Any]:
    """The measured choices of `section` for this device; empty where nobody has measured, and the heuristics then decide."""
    name = _device_name_override
    if name is None:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    path = _TUNED_DIR / f"{table_name(name)}.json"
    if not name or not path.is_file():
        return {}
    return json.loads(path.read_text()).get(section, {})


_forget: list[Callable[[], None]] = [tuned_table.cache_clear]


def forget_choices_with(cache_clear: Callable[[], None]) -> None:
    """Register the cache of something that depends on the tuned table."""
    _forget.append(cache_clear)


@contextlib.contextmanager
def override_device_name(name: str) -> Iterator[None]:
    """Use another device's tuned table: for compiling ahead."""
    global _device_name_override
    previous, _device_name_override = _device_name_override, name
    forget_choices()
    try:
        yield
    finally:
        _device_name_override = previous
        forget_choices()


def forget_choices() -> None:
    """Drop every cached choice, after the tuned table changed."""
    for clear in _forget:
        clear()
