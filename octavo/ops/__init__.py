"""Operators. Each is its torch reference; faster providers register beside it (see `registry`)."""

import importlib
import importlib.util
import os

# The last registered is tried first.
_CPU_MODULES = ("attention.sdpa", "by_row", "cpu.norm", "cpu.linear", "cpu.attention", "cpu.step")
_TRITON_MODULES = (
    "norm_triton",
    "activation_triton",
    "embedding_triton",
    "rope_triton",
    "linear.triton_linear",
    "linear.triton_invariant",
    "linear.triton_fp8_quant",
    "linear.triton_fp8",
    "attention.triton_decode",
    "attention.triton_prefill",
    "attention.triton_invariant",
    "attention.fa3",
    "attention.triton_mla",
    "attention.triton_mla_prefill",
    "attention.triton_mla_step",
    "moe.triton_route",
    "moe.triton_experts",
    "ssm.triton_conv",
    "ssm.triton_mamba",
    "ssm.triton_delta",
    "ssm.triton_norm",
    "inputs_triton",
)


def load_providers(device: str | None = None, force: bool = False) -> None:
    """Register the providers this machine may use: the CPU's always, Triton's where a GPU or its interpreter runs them.

    The worker calls this once and names its `device`: on a GPU nobody needs the CPU's C++ kernels, which would first have to
    be compiled. `force` registers Triton's anyway, to compile for a GPU that is elsewhere. They are not imported
    with their operators, so that a machine without Triton, or without need of it, never pays for it.
    """
    import torch

    for name in _CPU_MODULES:
        if device == "cuda" and name.startswith("cpu."):
            continue
        importlib.import_module(f"octavo.ops.{name}")
    if importlib.util.find_spec("triton") is None:
        return
    if force or torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET", "0") == "1":
        for name in _TRITON_MODULES:
            importlib.import_module(f"octavo.ops.{name}")
