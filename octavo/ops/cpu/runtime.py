"""The loaded kernels and the thread team that runs them: `call(kernel, args)` runs one, `Program` a recorded list.

A kernel takes one argument structure (structs.py). While a `Recording` is open, every call is also written down, with the
memory it uses, so that the whole sequence can be repeated later by a single call into C: what a graph is on a GPU.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from octavo.logger import get_logger
from octavo.ops.cpu.build import BuildError, library_path
from octavo.ops.cpu.structs import STEP_BYTES, PackedWeight
from octavo.platforms.cpu import count_threads

logger = get_logger(__name__)

KERNELS = (
    "linear",
    "embedding",
    "rms_norm",
    "qkv_rope_write",
    "attention",
    "gather_decode",
    "argmax",
    "sample",
    "store_sampled",
)


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled kernels; None, with one line in the log, where they cannot be built."""
    try:
        library = ctypes.CDLL(str(library_path()))
    except (BuildError, OSError) as error:
        logger.warning("torch's operators serve on the CPU, many times slower: %s", error)
        return None
    library.octavo_pool_create.restype = ctypes.c_void_p
    library.octavo_pool_create.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.octavo_pool_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    library.octavo_pool_run.restype = None
    library.octavo_pool_destroy.argtypes = [ctypes.c_void_p]
    library.octavo_pool_destroy.restype = None
    library.octavo_prefer_large_pages.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.octavo_prefer_large_pages.restype = None
    library.octavo_instruction_set.restype = ctypes.c_char_p
    library.octavo_gguf_describe.restype = ctypes.c_int64
    library.octavo_gguf_describe.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    library.octavo_gguf_pack.argtypes = [ctypes.c_void_p, ctypes.c_char_p, *[ctypes.c_void_p] * 3]
    library.octavo_gguf_pack.restype = None
    library.octavo_linear_workspace.restype = ctypes.c_int64
    library.octavo_linear_workspace.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    library.octavo_attention_workspace.restype = ctypes.c_int64
    library.octavo_attention_workspace.argtypes = [ctypes.c_int] * 4
    return library


def is_available() -> bool:
    """Whether this machine has the kernels."""
    return load_library() is not None


class Runtime:
    """Library, thread team and workspace of this process."""

    def __init__(self, library: ctypes.CDLL, num_threads: int):
        self.library = library
        self.num_threads = num_threads
        self.pid = os.getpid()
        self.instruction_set = library.octavo_instruction_set().decode()
        self.lanes = library.octavo_lanes()
        self.signed_offset = library.octavo_signed_offset()
        self.kernels = {name: ctypes.c_size_t.in_dll(library, f"octavo_{name}").value for name in KERNELS}
        self._pool = library.octavo_pool_create(num_threads, _cpus_to_pin(num_threads))
        self._run = library.octavo_pool_run
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self.weights = WeightMemory(library)

    def close(self) -> None:
        """End the threads. Programs made on this runtime must not run afterwards."""
        self.library.octavo_pool_destroy(self._pool)

    def run(self, steps: Any, count: int) -> None:
        """Run `count` entries of a step array."""
        self._run(self._pool, steps, count)

    def workspace(self, num_bytes: int) -> torch.Tensor:
        """Scratch memory for one kernel; a recorded program keeps the tensor it was given."""
        if self._workspace.numel() < num_bytes:
            self._workspace = torch.empty(num_bytes + num_bytes // 2, dtype=torch.uint8)
        return self._workspace

    def describe(self, ggml_type: str, rows: int, cols: int) -> tuple[PackedWeight, int]:
        """How a weight of a GGUF type is packed, and its bytes; 0 bytes where there is no kernel for it."""
        weight = PackedWeight()
        size = self.library.octavo_gguf_describe(ggml_type.encode(), rows, cols, ctypes.addressof(weight))
        return weight, max(size, 0)

    def pack(self, ggml_type: str, blocks: torch.Tensor, data: torch.Tensor, weight: PackedWeight) -> None:
        """Pack blocks uint8 [rows, bytes a row] into `data`; completes `weight`."""
        self.library.octavo_gguf_pack(
            self._pool, ggml_type.encode(), blocks.data_ptr(), data.data_ptr(), ctypes.addressof(weight)
        )


class WeightMemory:
    """Memory for packed weights in large pages: a decode step reads all of it, and small pages cost it up to half its speed.

    Weights lie side by side in chunks; a chunk lives as long as one of its weights.
    """

    CHUNK_BYTES = 1 << 25

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        self._chunk: torch.Tensor | None = None
        self._used = 0

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Unset bytes, aligned to a cache line."""
        if self._chunk is None or self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = torch.empty(max(num_bytes, self.CHUNK_BYTES) + 64, dtype=torch.uint8), 0
            self._library.octavo_prefer_large_pages(self._chunk.data_ptr(), len(self._chunk))
            self._used = -self._chunk.data_ptr() % 64
        start, self._used = self._used, self._used + -(-num_bytes // 64) * 64
        return self._chunk[start : start + num_bytes]

    def close(self) -> None:
        """No more weights of this model: leave the last chunk to them."""
        self._chunk = None


def _cpus_to_pin(num_threads: int) -> Any:
    """The cores of the threads, when there is one for each; else they are left to the system."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cpus = sorted(os.sched_getaffinity(0))
    return (ctypes.c_int * num_threads)(*cpus) if len(cpus) == num_threads else None


_runtime: Runtime | None = None


def runtime() -> Runtime:
    """This process's runtime. A child of fork has none of its parent's threads, so it gets a new one."""
    global _runtime
    if _runtime is None or _runtime.pid != os.getpid():
        library = load_library()
        assert library is not None, "no provider calls this without kernels"
        _runtime = Runtime(library, min(count_threads(), torch.get_num_threads()))
        logger.info("CPU kernels: %s, %d threads", _runtime.instruction_set, _runtime.num_threads)
    return _runtime


class NotRecordableError(Exception):
    """Part of what should be recorded ran outside the kernels, or has a size that a program cannot change."""


class Count:
    """A number that each run of a program sets anew: of tokens, or of requests."""

    def __init__(self, recorded: int, most: int):
        self.recorded = recorded  # while the program was made
        self.most = most
        self.cell = ctypes.c_int64(recorded)


class Program:
    """A recorded sequence of kernels. Their arguments are fixed, apart from the counts."""

    def __init__(self, steps: list[tuple[int, ctypes.Structure]], kept: list[Any], counts: tuple[Count, ...]):
        self._kept = (steps, kept)  # what the raw pointers point to
        self._counts = counts
        self._num_steps = len(steps)
        words = [word for kernel, args in steps for word in (kernel, ctypes.addressof(args))]
        assert len(words) * 8 == STEP_BYTES * self._num_steps
        self._steps = (ctypes.c_void_p * len(words))(*words)
        self._runtime = runtime()

    def __len__(self) -> int:
        return self._num_steps

    def run(self, *values: int) -> None:
        """Repeat it with these counts, at most as many of each as was said when it was recorded."""
        for count, value in zip(self._counts, values, strict=True):
            assert 0 < value <= count.most
            count.cell.value = value
        self._runtime.run(self._steps, self._num_steps)


class Recording:
    """Writes kernel calls down and lends them memory; buffers return to the lender once no tensor uses them."""

    def __init__(self, buffers: "BufferPool", counts: tuple[Count, ...]):
        self.steps: list[tuple[int, ctypes.Structure]] = []
        self.kept: list[Any] = []
        self.buffers = buffers
        self.counts = counts

    def program(self) -> Program:
        """What was recorded."""
        return Program(self.steps, self.kept, self.counts)

    def count_of(self, number: int) -> Count:
        """The count that a leading dimension stands for. Counts are recorded with different numbers."""
        for count in self.counts:
            if count.recorded == number:
                return count
        raise NotRecordableError(f"an operator has {number} rows, which is no count of the program")


class BufferPool:
    """Memory that is lent out again and again: to the operators of a step, or to those of recorded programs.

    Programs of one pool share its memory, so they never run at the same time.
    """

    def __init__(self) -> None:
        self._storages: list[torch.Tensor] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An unset tensor in a buffer that no living tensor uses, the smallest that is large enough."""
        num_bytes = max(dtype.itemsize, dtype.itemsize * functools.reduce(lambda a, b: a * b, shape, 1))
        free = [s for s in self._storages if _num_users(s) == 1 and s.numel() >= num_bytes]
        if free:
            base = min(free, key=lambda s: s.numel())
        else:
            base = torch.empty(-(-num_bytes // 64) * 64, dtype=torch.uint8)
            self._storages.append(base)
        return base[:num_bytes].view(dtype).view(shape)

    def reopener(self, tensor: torch.Tensor) -> Callable[[int], torch.Tensor]:
        """A function that gives the first rows of the tensor again later. Holding it would keep its buffer from others."""
        base = next(s for s in self._storages if s.data_ptr() == tensor.data_ptr())
        shape, dtype, row_bytes = tensor.shape[1:], tensor.dtype, tensor[0].numel() * tensor.element_size()
        return lambda rows: base[: rows * row_bytes].view(dtype).view(rows, *shape)


def _num_users(tensor: torch.Tensor) -> int:
    """Tensors that share the storage of this one, itself included."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # less the storage object just made


_recording: Recording | None = None
# Results of operators that run by themselves. Apart from the programs' memory: these may live on while a program runs.
_results = BufferPool()


@contextmanager
def recording(buffers: BufferPool, *counts: Count) -> Iterator[Recording]:
    """Record the kernel calls of the block. They run as well, so that what follows sees their results.

    With `counts`, the leading dimension of every operator must be one of them, and its memory is made for the most.
    """
    global _recording
    assert _recording is None, "recordings do not nest"
    _recording = Recording(buffers, counts)
    try:
        yield _recording
    finally:
        _recording = None


def count(number: int) -> ctypes.c_int64:
    """A cell with a number of rows, for a kernel's arguments: the recorded program's own, where it has counts."""
    if _recording is None or not _recording.counts:
        return ctypes.c_int64(number)
    return _recording.count_of(number).cell


def most(number: int) -> int:
    """The most rows that `number` of them stand for."""
    return number if _recording is None or not _recording.counts else _recording.count_of(number).most


def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Memory for an operator's result. Large results are lent from a pool: the system would take fresh pages for each."""
    if _recording is None:
        return _results.empty(shape, dtype)
    return _recording.buffers.empty((most(shape[0]), *shape[1:]), dtype)[: shape[0]]


def call(name: str, args: ctypes.Structure, *kept: Any) -> None:
    """Run one kernel; a recording keeps `kept` alive, the objects behind the pointers in `args`.

    Results lent by a recording's pool need not be kept: the pool does that.
    """
    run_on = runtime()
    kernel = run_on.kernels[name]
    run_on.run((ctypes.c_void_p * 2)(kernel, ctypes.addressof(args)), 1)
    if _recording is not None:
        _recording.steps.append((kernel, args))
        _recording.kept.append(kept)
