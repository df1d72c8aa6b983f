"""The small files that sentence-transformers keeps beside a model: how its hidden states become embeddings.

`modules.json` names the steps in order, each with a folder of its own. What is understood: Transformer, Pooling (cls, mean or
last token), Dense, Normalize. Anything else is refused: leaving a step out would give other embeddings.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

# In 1_Pooling/config.json -> our word.
POOLING_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_POOLING_WORDS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
DENSE_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu"}


@dataclass(frozen=True)
class DenseModule:
    """A projection behind the pooling."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class SentenceTransformers:
    """What the files say."""

    pooling: str | None = None  # "cls", "mean" or "last"; None: a vector for each token (late interaction)
    dense: list[DenseModule] = field(default_factory=list)
    normalizes: bool = False
    max_seq_length: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # name


def read_sentence_transformers(folder: Path) -> SentenceTransformers | None:
    """What the folder's files say; None when it is no model of sentence-transformers."""
    modules = _read(folder / "modules.json", list)
    if not modules:
        return None
    pooling, dense, normalizes, max_seq_length = None, [], False, None
    for module in modules:
        kind, path = str(module.get("type", "")).rpartition(".")[2], folder / str(module.get("path", ""))
        if kind == "Transformer":
            max_seq_length = _read(path / "sentence_bert_config.json", dict).get("max_seq_length")
        elif kind == "Pooling":
            pooling = _pooling_mode(path / "config.json")
        elif kind == "Dense":
            dense.append(_dense(path))
        elif kind == "Normalize":
            normalizes = True
        else:
            raise ConfigError(
                f"{folder / 'modules.json'} has a module {module.get('type')!r}; supported are Transformer, Pooling, "
                "Dense and Normalize.",
                param="model",
            )
    texts = _read(folder / "config_sentence_transformers.json", dict)
    prompts = {str(name): str(text) for name, text in (texts.get("prompts") or {}).items()}
    return SentenceTransformers(pooling, dense, normalizes, max_seq_length, prompts, texts.get("default_prompt_name"))


def _read(path: Path, kind: type) -> Any:
    if not path.is_file():
        return kind()
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="model") from None
    if not isinstance(content, kind):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not a {kind.__name__}.", param="model")
    return content


def _pooling_mode(path: Path) -> str:
    config = _read(path, dict)
    if config.get("include_prompt") is False:
        raise ConfigError(f"{path} leaves prompts out of the pooling, which is not supported.", param="model")
    if "pooling_mode" in config:
        stated = config["pooling_mode"]
        modes = [stated] if isinstance(stated, str) else list(stated)
        found = [_POOLING_WORDS.get(mode, mode) for mode in modes]
    else:
        found = [
            POOLING_MODES.get(key, key) for key, value in config.items() if key.startswith("pooling_mode") and value
        ]
    if len(found) != 1 or found[0] not in _POOLING_WORDS.values():
        raise ConfigError(
            f"{path} pools by {', '.join(found) or 'nothing'}; supported is one of cls, mean, last.", param="model"
        )
    return found[0]


def _dense(folder: Path) -> DenseModule:
    config = _read(folder / "config.json", dict)
    name = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in DENSE_ACTIVATIONS:
        raise ConfigError(
            f"{folder} has the activation {name!r}; supported are {', '.join(DENSE_ACTIVATIONS)}.", param="model"
        )
    try:
        sizes = int(config["in_features"]), int(config["out_features"])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{folder / 'config.json'} needs in_features and out_features.", param="model") from None
    return DenseModule(str(folder), *sizes, bool(config.get("bias", True)), DENSE_ACTIVATIONS[name])
