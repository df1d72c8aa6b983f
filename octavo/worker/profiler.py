"""Profiles of a worker's steps: torch's profiler into Chrome traces, or the range that Nsight Systems records.

The core calls its worker on its own thread, so a trace holds scheduling, Python and kernels on one time line.
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.config.engine import ProfilerConfig
from octavo.errors import ClientError, ConflictError
from octavo.logger import get_logger

logger = get_logger(__name__)


class WorkerProfiler:
    """One profile at a time. Waits `delay_iterations` steps, ends by itself after `max_iterations` if that is not 0."""

    def __init__(self, config: ProfilerConfig, device: torch.device):
        self._config = config
        self._device = device
        self._is_open = False  # between start and stop
        self._profile: torch.profiler.profile | None = None
        self._path: Path | None = None
        self._num_steps = self._first = self._last = 0

    def start(self, prefix: str | None, delay_iterations: int | None, max_iterations: int | None) -> None:
        """Begin a profile; ConflictError while there is one. `prefix` begins the name of its file."""
        if self._is_open:
            raise ConflictError("a profile is being taken already; stop it first.")
        prefix = "octavo" if prefix is None else prefix
        if not prefix or Path(prefix).name != prefix:
            raise ClientError(f"profile_prefix={prefix!r} must be a plain file name.", param="profile_prefix")
        config = self._config
        self._first = config.delay_iterations if delay_iterations is None else delay_iterations
        length = config.max_iterations if max_iterations is None else max_iterations
        self._last = self._first + length if length else 0
        self._num_steps = 0
        if config.folder is not None:
            suffix = ".pt.trace.json.gz" if config.use_gzip else ".pt.trace.json"
            self._path = Path(config.folder) / f"{prefix}-{time.time_ns()}{suffix}"
        self._is_open = True
        if self._first == 0:
            self._begin()

    def before_step(self) -> None:
        """A step is about to be launched."""
        if not self._is_open:
            return
        if self._last and self._num_steps == self._last:
            self._end()
        elif self._first and self._num_steps == self._first:
            self._begin()
        self._num_steps += 1

    def stop(self) -> str | None:
        """End the profile; returns the file it is in, None when another program records. ConflictError without one."""
        if not self._is_open:
            raise ConflictError("no profile is being taken; start one first.")
        self._is_open = False
        self._end()
        return None if self._path is None or not self._path.exists() else str(self._path)

    def _begin(self) -> None:
        if self._path is None:
            torch.cuda.profiler.start()
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities,
            record_shapes=self._config.record_shapes,
            profile_memory=self._config.with_memory,
            with_stack=self._config.with_stack,
            with_flops=self._config.with_flops,
        )
        self._profile.start()

    def _end(self) -> None:
        """Write what there is. Called at most twice: by the last step, and by `stop`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._path is None:
            torch.cuda.profiler.stop()
            return
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self._path))
        logger.info("profile of %d steps: %s", self._num_steps - self._first, self._path)


def add_layer_ranges(model: nn.Module) -> None:
    """Have every module of the model show in Nsight Systems under its path."""

    def push(path: str) -> Any:
        return lambda module, args: torch.cuda.nvtx.range_push(path)

    def pop(module: nn.Module, args: Any, output: Any) -> None:
        torch.cuda.nvtx.range_pop()

    for path, module in model.named_modules():
        module.register_forward_pre_hook(push(path or type(model).__name__))
        module.register_forward_hook(pop, always_call=True)
