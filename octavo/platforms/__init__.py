"""Which platform this process runs on: asked for by name, or the first one found.

A plugin adds a row through the entry point group `octavo.platforms`; plugins are probed before the built-in platforms.
"""

from functools import cache

from octavo import envs, plugins
from octavo.errors import ConfigError
from octavo.platforms.base import BatchDefaults, Platform, Usage
from octavo.platforms.cpu import CpuPlatform
from octavo.platforms.cuda import CudaPlatform
from octavo.platforms.rocm import RocmPlatform

__all__ = ["BatchDefaults", "Platform", "Usage", "current_platform", "get_platform", "known_platforms"]

# In the order they are probed; the CPU is always there.
_BUILT_IN: tuple[type[Platform], ...] = (CudaPlatform, RocmPlatform, CpuPlatform)


def known_platforms() -> dict[str, type[Platform]]:
    """Platform classes by name, in the order they are probed."""
    found = {cls.name: cls for cls in plugins.load(plugins.PLATFORMS).values()}
    return found | {cls.name: cls for cls in _BUILT_IN if cls.name not in found}


def get_platform(device: str = "auto") -> Platform:
    """The platform called `device` ("cuda", or "cuda:1" for its second device); "auto" takes the first one found."""
    if device == "auto":
        return current_platform()
    name, _, index = device.partition(":")
    known = known_platforms()
    if name not in known or (index and not index.isdigit()):
        raise ConfigError(
            f"device={device!r} is not known; use auto, or one of {', '.join(known)}, with an index such as cuda:1.",
            param="device",
        )
    if not known[name].is_available():
        usable = ", ".join(other for other, cls in known.items() if other != name and cls.is_available())
        raise ConfigError(f"device={device!r} is not available on this machine; it has {usable}.", param="device")
    return known[name](int(index or 0))


@cache
def current_platform() -> Platform:
    """The platform named by OCTAVO_PLATFORM, else the first one this machine has."""
    forced = envs.OCTAVO_PLATFORM
    if forced:
        return get_platform(forced)
    for cls in known_platforms().values():
        if cls.is_available():
            return cls()
    raise ConfigError("no platform is available")  # unreachable: the CPU always is
