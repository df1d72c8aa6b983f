"""`octavo collect-env`: what a bug report should say about the machine. Secrets are left out."""

import os
import platform as host
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from octavo import __version__, plugins
from octavo.config.parser import OptionParser

PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub", "numpy"),
    *("msgspec", "pyzmq", "fastapi", "uvicorn", "uvloop", "httptools", "prometheus-client"),
)
PREFIXES = ("OCTAVO_", "CUDA_", "NVIDIA_", "HIP_", "NCCL_", "OMP_", "MKL_", "TORCH_", "TRITON_", "HF_")
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def run(arguments: Sequence[str]) -> int:
    """Print the report."""
    OptionParser("octavo collect-env", "Describe this machine and installation, for bug reports.", ()).parse_options(
        arguments
    )
    for line in report():
        print(line)
    return 0


def report() -> Iterator[str]:
    """The report, line by line."""
    yield f"octavo {__version__}"
    yield f"python {sys.version.split()[0]} ({host.python_implementation()}, {sys.executable})"
    yield f"system {host.platform()}"
    yield from _hardware()
    yield ""
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name} not installed"
    yield from _torch()
    for group in plugins.GROUPS:
        for point in plugins.find(group):
            yield f"plugin {group}: {point.name} = {point.value}"
    yield ""
    for name, value in sorted(os.environ.items()):
        if name.startswith(PREFIXES):
            hidden = any(word in name for word in SECRET_WORDS)
            yield f"{name}={'(set)' if hidden else value}"


def _hardware() -> Iterator[str]:
    from octavo.platforms import current_platform, get_platform

    yield f"platform {current_platform().describe()}"
    cpu = get_platform("cpu")
    yield f"cpu {cpu.describe()}, {cpu.available_memory() / 2**30:.1f} GiB free, prefers {cpu.preferred_dtype}"


def _torch() -> Iterator[str]:
    import torch

    yield f"torch built for CUDA {torch.version.cuda}, HIP {torch.version.hip}; threads {torch.get_num_threads()}"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield f"gpu {index} {properties.name}, {properties.total_memory / 2**30:.1f} GiB"
