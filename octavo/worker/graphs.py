"""Captured decode steps: from the gather of inputs to the sampled token in one replay, for a few batch sizes."""

import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from octavo.logger import get_logger

logger = get_logger(__name__)


class DecodeOutput(NamedTuple):
    """What a decode step leaves in place, valid until the next step of the same size."""

    logits: torch.Tensor  # [size, vocab]
    token_ids: torch.Tensor  # [size] int32
    is_bad: torch.Tensor  # [size] bool


class DecodeGraphs:
    """One CUDA graph a batch size. `step(n)` is the captured work for n requests."""

    def __init__(self, step: Callable[[int], DecodeOutput], sizes: Iterable[int]):
        self._step = step
        self.sizes = sorted(set(sizes))
        self.max_size = self.sizes[-1] if self.sizes else 0
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, DecodeOutput]] = {}
        self._pool: Any = None
        # The smallest captured size that holds each count.
        self._size_for: list[int] = []
        for size in self.sizes:
            self._size_for += [size] * (size + 1 - len(self._size_for))

    def size_for(self, count: int) -> int:
        """The captured size that serves `count` requests."""
        return self._size_for[count]

    @torch.inference_mode()
    def find_wait(self) -> str | None:
        """The line of a step that waits for the device, which a capture forbids; None: there is none."""
        size = self.max_size
        self._step(size)  # what is slow the first time may wait
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it does not notice every wait; the capture does
            torch.cuda.set_sync_debug_mode("error")
        try:
            self._step(size)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            last = traceback.extract_tb(error.__traceback__)[-1]
            return f"{last.filename}:{last.lineno}: {last.line}"
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return None

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, the largest first so that the others fit into its memory."""
        started = time.perf_counter()
        stream = torch.cuda.Stream()
        for size in reversed(self.sizes):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(size)  # compiles kernels and fills workspaces, which capture must not do
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                output = self._step(size)
            self._pool = graph.pool()
            self._graphs[size] = (graph, output)
        torch.cuda.synchronize()
        logger.info("captured %d decode graphs in %.1f s", len(self.sizes), time.perf_counter() - started)

    def replay(self, size: int, wants_tokens: bool = True) -> DecodeOutput:
        """Run one step. Sampling is part of the graph, so it is done whether or not its tokens are wanted."""
        graph, output = self._graphs[size]
        graph.replay()
        return output
