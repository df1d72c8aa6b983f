"""There is one device: nothing to set up, little to clean up."""

import gc

from vllm import _missing

__all__ = ["cleanup_dist_env_and_memory"]


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect what is no longer referenced, on the GPU too."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def __getattr__(name: str) -> object:
    raise _missing.error_for(__name__, name)
