"""Recorded steps on the CPU: the counterpart of `DecodeGraphs`.

A first step runs the model's own code while every kernel call is written down; later ones repeat the list by a single call
into C, with their own numbers of tokens and requests. A decode step's list holds everything from gathering the inputs to
storing the likeliest token. That is right only if all the work went through kernels, so the recording watches torch and
refuses when it computes anything itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from octavo.context import StepContext
from octavo.logger import get_logger
from octavo.ops.cpu.runtime import BufferPool, Count, NotRecordableError, Program, is_available, recording
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
    """Two programs: of a decode step, whole, and of the forward pass of any other step. Each serves every number of tokens."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        self.max_size = runner.batch.max_requests
        self._buffers = BufferPool()
        self._query_start = torch.zeros(self.max_size + 1, dtype=torch.int32)
        self._decode, self._decoded = self._record_decode()
        self._record_forward()

    @classmethod
    @torch.inference_mode()
    def try_make(cls, runner: ModelRunner) -> "CpuPrograms | None":
        """Record steps on the scratch row, and let the runner use the programs; None, with a log line, for a model that
        does not run in kernels alone."""
        if not is_available():
            return None
        try:
            made = cls(runner)
        except NotRecordableError as error:
            # Its words alone: a record that somebody keeps must not keep the model alive.
            logger.info("steps run operator by operator: %s", str(error))
            return None
        logger.info("steps are programs: %d kernels decode", len(made._decode))
        return made

    def size_for(self, count: int) -> int:
        """How many requests a step for `count` of them runs: nothing is padded."""
        return count

    @torch.inference_mode()
    def replay(self, size: int, wants_tokens: bool = True) -> DecodeOutput:
        """Run one decode step. Without `wants_tokens` its tokens mean nothing, and only the logits are to be used."""
        self._decode.run(size)
        output = DecodeOutput(*(view(size) for view in self._decoded))
        if not wants_tokens:
            return output
        if not self._runner.sampler.all_greedy:
            return self._runner.sample_decoded(output.logits, size)
        # Copies: with two steps in flight these are read after the next step has run.
        return output._replace(token_ids=output.token_ids.clone(), is_bad=output.is_bad.clone())

    def forward(self, context: StepContext) -> torch.Tensor:
        """The hidden states of all tokens of a step whose inputs are prepared; valid until the next step."""
        self._query_start[: context.num_reqs + 1] = context.query_start_loc
        self._forward.run(context.num_tokens, context.num_reqs)
        return self._hidden_states(context.num_tokens)

    def _record_decode(self) -> tuple[Program, list[Callable[[int], torch.Tensor]]]:
        self._runner.batch.prepare_decode_rows([], 1)
        with recording(self._buffers, Count(1, self.max_size)) as made, _OnlyKernels():
            output = self._runner.decode_step(1, all_greedy=True)
        return made.program(), [self._buffers.reopener(tensor) for tensor in output]

    def _record_forward(self) -> None:
        """Record a step of two requests, so that its counts can be told apart, and let the runner use the program."""
        batch, scratch = self._runner.batch, self._runner.rows.scratch
        num = min(2, batch.max_requests)
        if batch.max_tokens <= num:
            return  # all its steps are decode steps
        context = batch.prepare_mixed([scratch] * num, [2, 1][:num], [])
        total = context.num_tokens
        self._query_start[: num + 1] = context.query_start_loc
        context.query_start_loc = self._query_start[: num + 1]
        counts = Count(total, batch.max_tokens), Count(num, self.max_size)
        with recording(self._buffers, *counts) as made, _OnlyKernels():
            hidden_states = self._runner.forward(context)
        self._forward, self._hidden_states = made.program(), self._buffers.reopener(hidden_states)
        self._runner.forward_mixed = self.forward
