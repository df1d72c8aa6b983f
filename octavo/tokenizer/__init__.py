"""Text to tokens and back: vocabularies, chat templates, incremental detokenizing with stop strings. No torch."""

from dataclasses import replace
from pathlib import Path

from octavo.config.engine import TokenizerConfig
from octavo.errors import ConfigError
from octavo.tokenizer.detokenizer import IncrementalDetokenizer, TextDelta
from octavo.tokenizer.folder import load_folder_tokenizer
from octavo.tokenizer.gguf import load_gguf_tokenizer
from octavo.tokenizer.tokenizer import ChatPrompt, Tokenizer

__all__ = ["ChatPrompt", "IncrementalDetokenizer", "TextDelta", "Tokenizer", "get_tokenizer"]

_MODES = ("auto", "hf", "slow")
_HUB_FILES = ["*token*", "*.jinja", "*.model", "vocab*", "merges.txt", "chat_template*", "config.json"]


def get_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `config` describes: a GGUF file, a model folder, or a hub id.

    Mode "auto" reads `tokenizer.json` directly; "hf" and "slow" go through transformers. ConfigError for other modes
    and for a configuration without a tokenizer.
    """
    if config.path is None:
        raise ConfigError("there is no tokenizer (skip_tokenizer_init); only token ids can be used.")
    if config.mode not in _MODES:
        raise ConfigError(f"tokenizer_mode={config.mode!r} is not supported; use one of {', '.join(_MODES)}.")
    tokenizer = _load(config)
    if config.chat_template is None:
        return tokenizer
    # A name among the tokenizer's own templates, or the text of another one.
    templates = tokenizer.info.chat_templates
    chosen = templates.get(config.chat_template, config.chat_template)
    return Tokenizer(tokenizer.backend, replace(tokenizer.info, chat_templates={"default": chosen}))


def _load(config: TokenizerConfig) -> Tokenizer:
    assert config.path is not None
    path = Path(config.path)
    if path.is_file():
        return load_gguf_tokenizer(path)
    if not path.is_dir():
        path = _download(config)
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs and not any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return load_gguf_tokenizer(ggufs[0])
    return load_folder_tokenizer(
        path, trust_remote_code=config.trust_remote_code, use_transformers=config.mode in ("hf", "slow")
    )


def _download(config: TokenizerConfig) -> Path:
    """Fetch the tokenizer's files of a hub id."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(config.path), revision=config.revision, allow_patterns=_HUB_FILES))
    except Exception as error:
        raise ConfigError(
            f"tokenizer {config.path!r} is neither a folder, a GGUF file nor a hub id that can be fetched: {error}"
        ) from error
