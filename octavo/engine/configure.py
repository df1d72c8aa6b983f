"""`create_engine_config`: the part of configuration that looks at the world.

It finds the model, reads its small files, asks the machine, and hands all of it to the pure `resolve`. Of the weight
files only the headers are read.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo import plugins
from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.engine import EngineConfig, TokenizerConfig
from octavo.config.hf import HFConfig
from octavo.config.resolve import NEUTRAL_GENERATION_CONFIG, resolve
from octavo.config.sentence_transformers import read_sentence_transformers
from octavo.engine.find_model import find_model, find_tokenizer
from octavo.errors import ConfigError, LoadError
from octavo.loader.find import WeightFiles, find_weights
from octavo.loader.gguf_file import open_gguf_parts
from octavo.loader.gguf_metadata import read_gguf_config
from octavo.logger import get_logger
from octavo.models.registry import ENCODER_DECODERS, ENCODERS, NATIVE
from octavo.platforms import Usage, get_platform
from octavo.tokenizer import get_tokenizer

logger = get_logger(__name__)

_SAFETENSORS_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_GGUF_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MAX_HEADER_BYTES = 100 << 20  # what the safetensors format allows


def create_engine_config(args: EngineArgs, usage: Usage = "server") -> EngineConfig:
    """Everything decided, from what the user typed. Each decision is logged with its reason."""
    plugins.run(plugins.MODELS)
    platform = get_platform(args.device)
    path = find_model(args)
    hf_config, generation_config = read_model_config(path)
    if args.generation_config not in ("auto", *NEUTRAL_GENERATION_CONFIG):
        generation_config = _read_generation_config(Path(args.generation_config), required=True)
    tokenizer_path = find_tokenizer(args, path)
    resolved = resolve(
        args,
        hf_config,
        platform,
        checkpoint=inspect_checkpoint(path, tokenizer_path, args.load_format),
        generation_config=generation_config,
        native_architectures=NATIVE,
        encoder_architectures=ENCODERS,
        encoder_decoder_architectures=ENCODER_DECODERS,
        sentence_transformers=read_sentence_transformers(path) if path.is_dir() else None,
        label_token_ids=_label_token_ids(args, hf_config, tokenizer_path),
        chat_template=_read_chat_template(args.chat_template),
        plugin_processors=[point.value for point in plugins.find(plugins.LOGITS_PROCESSORS)],
        usage=usage,
    )
    logger.info("%s on %s", args.model, platform.describe())
    for decision in resolved.decisions:
        logger.info("%s", decision)
    return resolved.config


def _label_token_ids(args: EngineArgs, hf_config: HFConfig, tokenizer_path: Path) -> list[int]:
    """The tokens of `classifier_from_token`, whose logits are the classes of a language model that judges."""
    words = args.hf_overrides.get("classifier_from_token") or hf_config.get("classifier_from_token") or []
    if not words:
        return []
    tokenizer = get_tokenizer(TokenizerConfig(str(tokenizer_path)))
    ids = [tokenizer.token_to_id(str(word)) for word in words]
    if None in ids:
        raise ConfigError(
            f"classifier_from_token={words}: {words[ids.index(None)]!r} is no token of the model.", param="hf_overrides"
        )
    return [token_id for token_id in ids if token_id is not None]


def read_model_config(path: Path) -> tuple[HFConfig, dict[str, Any]]:
    """(config.json, generation_config.json) of a folder or, from its metadata, of a GGUF file."""
    gguf = _only_gguf(path)
    if gguf is not None:
        config, generation_config = read_gguf_config(gguf)
        return HFConfig(config), generation_config
    return HFConfig.from_file(path), _read_generation_config(path)


def _only_gguf(path: Path) -> Path | None:
    """The GGUF file to take the configuration from, where there is no config.json."""
    if path.is_file():
        return path
    if (path / "config.json").is_file():
        return None
    try:
        return find_weights(path, "gguf").files[0]
    except LoadError:
        return None


def inspect_checkpoint(path: Path, tokenizer_path: Path, load_format: str = "auto") -> Checkpoint:
    """What `resolve` needs to know of the files: formats there are, number of parameters, stored data type."""
    found: dict[str, WeightFiles] = {}
    for name in ("gguf",) if path.is_file() else ("safetensors", "pt", "gguf"):
        try:
            found[name] = find_weights(path, name)
        except LoadError as error:
            # Only a format that is there and broken, or the one asked for, is worth a word.
            if load_format == name:
                raise
            logger.debug("%s", error)
    wanted = found.get(load_format) or next(iter(found.values()), None)
    num_parameters, stored_dtype = (0, None) if wanted is None else _measure(wanted)
    return Checkpoint(
        path=str(path),
        formats=tuple(found),
        num_parameters=num_parameters,
        stored_dtype=stored_dtype,
        tokenizer_path=str(tokenizer_path),
    )


def _measure(weights: WeightFiles) -> tuple[int, str | None]:
    """(number of parameters, data type most of them are stored in) from the headers; pickles give only a size."""
    readers: dict[str, Callable[[WeightFiles], dict[str, int]]] = {
        "safetensors": _count_safetensors,
        "gguf": _count_gguf,
    }
    if weights.load_format not in readers:
        # Two bytes a parameter is the common case; the number only guides memory planning.
        return sum(file.stat().st_size for file in weights.files) // 2, None
    counts = readers[weights.load_format](weights)
    return sum(counts.values()), max(counts, key=lambda name: counts[name], default=None)


def _count_safetensors(weights: WeightFiles) -> dict[str, int]:
    """Parameters by data type."""
    counts: dict[str, int] = {}
    for file in weights.files:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise LoadError(f"{file} is not a safetensors file, or damaged: its header claims {length} bytes.")
            try:
                header = json.loads(stream.read(length))
            except ValueError as error:
                raise LoadError(f"{file} has a damaged safetensors header: {error}.") from None
        for name, entry in header.items():
            if name != "__metadata__":
                dtype = _SAFETENSORS_DTYPES.get(entry["dtype"], "quantised")
                counts[dtype] = counts.get(dtype, 0) + math.prod(entry["shape"])
    return counts


def _count_gguf(weights: WeightFiles) -> dict[str, int]:
    counts: dict[str, int] = {}
    for part in open_gguf_parts(weights.files[0]):
        for tensor in part.tensors.values():
            dtype = _GGUF_DTYPES.get(tensor.ggml_type, "quantised")
            counts[dtype] = counts.get(dtype, 0) + math.prod(tensor.shape)
    return counts


def _read_generation_config(folder: Path, *, required: bool = False) -> dict[str, Any]:
    path = folder / "generation_config.json" if folder.is_dir() else folder
    if not path.is_file() and not required:
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as generation_config.json: {error}", param="generation_config"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not a JSON object.", param="generation_config")
    return content


def _read_chat_template(given: str | None) -> str | None:
    """The template's text: a file's content, or what was given when it is a template itself."""
    if given is None:
        return None
    path = Path(given)
    try:
        if path.is_file():
            return path.read_text()
    except OSError:  # a template is often too long for a file name
        pass
    if not any(mark in given for mark in ("{{", "{%", "\n")):
        raise ConfigError(
            f"chat_template={given!r} is neither a file nor a template (a template holds {{{{ or {{%).",
            param="chat_template",
        )
    return given
