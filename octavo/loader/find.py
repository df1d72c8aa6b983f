"""Which files of a model hold its weights. No torch here: configuration code asks too.

Given a folder or a single file and a load format, `find_weights` names the files to read, in order. Where a folder has
several formats, "auto" prefers safetensors, then PyTorch, then GGUF.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from octavo.errors import LoadError
from octavo.loader.gguf_file import split_parts

LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")

# Files beside the weights that share their ending: training state, adapters, a second copy in another layout.
_NOT_WEIGHTS = re.compile(r"^(training_args|optimizer|scheduler|rng_state|scaler|adapter_|consolidated)")
_GGUF_NOT_FIRST = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_GGUF_NOT_A_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)


@dataclass(frozen=True)
class WeightFiles:
    """The files to read, and the index that says which tensor lies in which of them (sharded checkpoints)."""

    load_format: str  # "safetensors", "pt", "gguf" or "dummy"
    files: tuple[Path, ...] = ()
    weight_map: dict[str, str] = field(default_factory=dict)  # tensor name → file name; empty without an index


def find_weights(path: str | Path, load_format: str = "auto") -> WeightFiles:
    """Decide the format and the files of the model at `path`; LoadError when there is nothing to read."""
    if load_format not in LOAD_FORMATS:
        raise LoadError(f"load_format={load_format!r} is not known; use one of {', '.join(LOAD_FORMATS)}.")
    if load_format == "dummy":
        return WeightFiles("dummy")
    path = Path(path)
    if not path.exists():
        raise LoadError(f"{path} does not exist.")
    if path.is_file():
        return _single_file(path, load_format)
    finders = {"safetensors": _find_safetensors, "pt": _find_pytorch, "gguf": _find_gguf}
    for name in finders if load_format == "auto" else (load_format,):
        found = finders[name](path)
        if found is not None:
            return found
    wanted = "*.safetensors, pytorch_model*.bin or *.gguf" if load_format == "auto" else f"weights of {load_format=!s}"
    present = sorted(entry.name for entry in path.iterdir())[:20]
    raise LoadError(f"{path} has no {wanted}; it holds: {', '.join(present) or 'nothing'}.")


def _single_file(path: Path, load_format: str) -> WeightFiles:
    by_suffix = {".gguf": "gguf", ".safetensors": "safetensors", ".bin": "pt", ".pt": "pt", ".pth": "pt"}
    actual = by_suffix.get(path.suffix)
    if actual is None:
        raise LoadError(f"{path} is not a weight file; known endings: {', '.join(by_suffix)}.")
    if load_format not in ("auto", actual):
        raise LoadError(f"{path} is a {actual} file, but load_format={load_format!r}; use load_format='auto'.")
    return WeightFiles(actual, tuple(split_parts(path)) if actual == "gguf" else (path,))


def _find_safetensors(folder: Path) -> WeightFiles | None:
    return _find_indexed(folder, "safetensors", "model.safetensors", "*.safetensors")


def _find_pytorch(folder: Path) -> WeightFiles | None:
    return _find_indexed(folder, "pt", "pytorch_model.bin", "*.bin")


def _find_indexed(folder: Path, load_format: str, whole: str, pattern: str) -> WeightFiles | None:
    """The one file of the usual name, else the files of its index, else whatever matches."""
    if (folder / whole).is_file():
        return WeightFiles(load_format, (folder / whole,))
    index = folder / f"{whole}.index.json"
    if index.is_file():
        weight_map = _read_index(index)
        return WeightFiles(load_format, tuple(folder / name for name in sorted(set(weight_map.values()))), weight_map)
    files = sorted(file for file in folder.glob(pattern) if not _NOT_WEIGHTS.match(file.name))
    return WeightFiles(load_format, tuple(files)) if files else None


def _find_gguf(folder: Path) -> WeightFiles | None:
    models = sorted(
        file
        for file in folder.glob("*.gguf")
        if not _GGUF_NOT_FIRST.search(file.name) and not _GGUF_NOT_A_MODEL.search(file.name)
    )
    if not models:
        return None
    if len(models) > 1:
        names = ", ".join(file.name for file in models)
        raise LoadError(f"{folder} holds several GGUF models: {names}. Give the path of the one to load.")
    return WeightFiles("gguf", tuple(split_parts(models[0])))


def _read_index(index: Path) -> dict[str, str]:
    """The `weight_map` of an index, whose files must lie beside it and exist."""
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{index} is not a readable index: {error!r}.") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{index} is not a readable index: its weight_map is empty or not an object.")
    names = set(weight_map.values())
    outside = sorted(str(name) for name in names if not isinstance(name, str) or Path(name).name != name)
    if outside:
        raise LoadError(f"{index} names files outside its folder: {', '.join(outside)}.")
    missing = sorted(name for name in names if not (index.parent / name).is_file())
    if missing:
        raise LoadError(f"{index} names files that do not exist: {', '.join(missing)}.")
    return weight_map
