"""AMD GPUs: known, and refused until somebody has proven them."""

from octavo.errors import ConfigError
from octavo.platforms.cuda import CudaPlatform, has_driver


class RocmPlatform(CudaPlatform):
    """torch's ROCm build answers to torch.cuda, and most operators would run; none has been tested."""

    name = "rocm"

    @classmethod
    def is_available(cls) -> bool:
        if not has_driver("/dev/kfd"):
            return False
        import torch

        return torch.version.hip is not None and torch.cuda.is_available()

    def __init__(self, index: int = 0):
        raise ConfigError("AMD GPUs are not supported yet: nothing has been tested on one. Use --device cpu.")
