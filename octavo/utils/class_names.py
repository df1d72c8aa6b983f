"""Classes as text: `"module:Class"`, which can be typed, stored and sent to another process.

A class that no import finds again (made inside a function) is remembered here, and its name works in this process alone.
"""

import importlib
from typing import Any

LOCAL_MODULE = "<this process>"
_local: dict[str, type] = {}


def class_name(cls: type) -> str:
    """The name under which `load_class` finds `cls`."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    try:
        if load_class(name) is cls:
            return name
    except (ImportError, AttributeError):
        pass
    name = f"{LOCAL_MODULE}:{cls.__qualname__}-{id(cls):x}"
    _local[name] = cls
    return name


def is_local(name: str) -> bool:
    """Whether a name means nothing to another process: its class is local, or of the script that runs."""
    return name.partition(":")[0] in (LOCAL_MODULE, "__main__")


def load_class(name: str) -> Any:
    """What `"module:Class"` names. ValueError when it has no such form, ImportError or AttributeError when it is not there."""
    if name in _local:
        return _local[name]
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise ValueError(f"{name!r} is not of the form 'module:Class'")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
