"""Reading checkpoints into models.

`load_model` is the entry point. It needs torch; gguf_metadata.py, gguf_file.py and find.py do not, and are imported
by code that must start without it, so the entry point is resolved on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.loader.load import LoadReport, load_model

__all__ = ["LoadReport", "load_model"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from octavo.loader import load

    return getattr(load, name)
