"""Recorded decode steps on the CPU: the counterpart of `DecodeGraphs`.

The first step of a size runs the model's own code while every kernel call is written down; later ones repeat the list by a
single call into C. A list holds everything from gathering the inputs to storing the likeliest token. That is right only
if all the work went through kernels, so the recording watches torch and refuses when it computes anything itself.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from octavo.logger import get_logger
from octavo.ops.cpu.runtime import BufferPool, Program, is_available, recording
from octavo.worker.graphs import DecodeOutput
from octavo.worker.model_runner import ModelRunner

logger = get_logger(__name__)

# Functions that look at a tensor without reading its numbers. Those that return one must return a view.
_INERT = {
    "__get__",
    "__getitem__",
    "view",
    "flatten",
    "reshape",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "transpose",
    "split",
    "chunk",
    "unbind",
    "narrow",
    "select",
    "data_ptr",
    "untyped_storage",
    "numel",
    "element_size",
    "stride",
    "size",
    "dim",
    "is_contiguous",
    "__len__",
}


class NotRecordableError(Exception):
    """Part of the step ran outside the kernels."""


class _OnlyKernels(TorchFunctionMode):
    """Refuses functions of torch that compute or copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            return func(*args, **(kwargs or {}))
        if func.__name__ not in _INERT:
            raise NotRecordableError(f"{func.__name__} is computed by torch")
        result = func(*args, **(kwargs or {}))
        parts = result if isinstance(result, (tuple, list)) else (result,)
        for part in parts:
            if isinstance(part, torch.Tensor) and not _is_view(part, args[0]):
                raise NotRecordableError(f"{func.__name__} makes a copy")
        return result


def _is_view(tensor: torch.Tensor, of: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()


class CpuPrograms:
    """One program a batch size, recorded when the size first comes up. Nothing is padded."""

    def __init__(self, runner: ModelRunner, max_size: int):
        self._runner = runner
        self.max_size = max_size
        self._buffers = BufferPool()
        self._programs: dict[int, tuple[Program, Any]] = {}

    @classmethod
    @torch.inference_mode()
    def try_make(cls, runner: ModelRunner, max_size: int) -> "CpuPrograms | None":
        """Record the smallest size on the scratch row to see whether this model can be; None, with a log line, if not."""
        if not is_available():
            return None
        made = cls(runner, max_size)
        runner.batch.prepare_decode_rows([], 1)
        try:
            made.replay(1)
        except NotRecordableError as error:
            # Its words alone: a record that somebody keeps must not keep the model alive.
            logger.info("decode steps run operator by operator: %s", str(error))
            return None
        logger.info("decode steps are programs of %d kernels", len(made._programs[1][0]))
        return made

    def size_for(self, count: int) -> int:
        """The program that serves `count` requests: its own."""
        return count

    @torch.inference_mode()
    def replay(self, size: int) -> DecodeOutput:
        """Run one step."""
        found = self._programs.get(size)
        if found is None:
            output = self._record(size)
        else:
            program, reopen = found
            program.run()
            output = reopen()
        if not self._runner.sampler.all_greedy:
            return self._runner.sample_decoded(output.logits, size)
        # Copies: with two steps in flight these are read after the next step has run.
        return output._replace(token_ids=output.token_ids.clone(), is_bad=output.is_bad.clone())

    def _record(self, size: int) -> DecodeOutput:
        """Run a step and keep its kernel calls."""
        with recording(self._buffers) as made, _OnlyKernels():
            output = self._runner.decode_step(size, all_greedy=True)
        views = [self._buffers.reopener(tensor) for tensor in output]
        self._programs[size] = made.program(), lambda: DecodeOutput(*(view() for view in views))
        return output
