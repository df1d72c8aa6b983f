"""Modules that run when they are first used, not when they are imported.

`import torch` spends a fifth of its time on Python versions of operators for tensors without data, which only tracing
needs: `torch.compile`, export, models built on the meta device. An engine's core that does none of these starts without.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

TRACING = ("torch._meta_registrations", "torch.export")
# Importing one of these means that tracing is about to begin.
TRACERS = ("torch._dynamo", "torch._inductor", "transformers")


def postpone_tracing() -> None:
    """Have a later `import torch` leave out what only tracing needs. For a process of our own: it changes torch's."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Postponer())


class _Postponed(types.ModuleType):
    """A module that runs once somebody asks for one of its names."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system's own questions
            raise AttributeError(name)
        run(self)
        return getattr(self, name)


def run(module: types.ModuleType) -> None:
    """Run a module that was postponed; others are left alone."""
    if isinstance(module, _Postponed):
        # First: it is asked for names while it runs.
        module.__class__ = types.ModuleType  # type: ignore[assignment]
        assert module.__spec__ is not None and isinstance(module.__spec__.loader, _Loader)
        module.__spec__.loader.now.exec_module(module)


class _Loader(importlib.abc.Loader):
    def __init__(self, now: importlib.abc.Loader):
        self.now = now

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Postponed(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Not yet."""


class _Postponer(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in TRACERS:
            for postponed in TRACING:
                if postponed in sys.modules:
                    run(sys.modules[postponed])
        if name not in TRACING:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec
