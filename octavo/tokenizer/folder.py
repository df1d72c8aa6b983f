"""A tokenizer from a model folder: `tokenizer.json` and the small files beside it, without importing transformers.

Folders that hold only a SentencePiece or tiktoken model go through transformers, which converts them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers, processors

from octavo.errors import LoadError
from octavo.tokenizer.backends import Backend, PythonBackend, RustBackend
from octavo.tokenizer.tokenizer import Tokenizer, TokenizerInfo

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_folder_tokenizer(
    folder: Path, *, trust_remote_code: bool = False, use_transformers: bool = False
) -> Tokenizer:
    """The tokenizer in `folder`; `use_transformers` has transformers build it even where `tokenizer.json` exists."""
    if use_transformers or not (folder / "tokenizer.json").exists():
        return _from_transformers(folder, trust_remote_code)
    config = _read_json(folder / "tokenizer_config.json")
    try:
        rust = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise LoadError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from None
    names, extra = _special_tokens(folder, config)
    _add_missing_tokens(rust, folder, config, [*names.values(), *extra])
    _apply_config(rust, config, names)
    return Tokenizer(RustBackend(rust), _info(folder, config, names, extra, trust_remote_code))


def _from_transformers(folder: Path, trust_remote_code: bool) -> Tokenizer:
    hf = _load_hf(folder, trust_remote_code)
    backend: Backend
    if hf.is_fast:
        backend = RustBackend(tokenizers.Tokenizer.from_str(hf.backend_tokenizer.to_str()))
    else:
        backend = PythonBackend(hf)
    names = {name: token for name in _NAMES if isinstance(token := getattr(hf, name, None), str)}
    extra = [token for token in hf.all_special_tokens if token not in names.values()]
    config = _read_json(folder / "tokenizer_config.json")
    return Tokenizer(backend, _info(folder, config, names, extra, trust_remote_code))


def _load_hf(folder: Path, trust_remote_code: bool) -> Any:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        hint = (
            "SentencePiece models need the packages sentencepiece and protobuf."
            if any(folder.glob("*.model"))
            else "Add the files of its tokenizer, name another (--tokenizer), or go without (--skip-tokenizer-init)."
        )
        raise LoadError(
            f"{folder} holds no tokenizer.json, and transformers cannot load a tokenizer from it either ({reason}). {hint}"
        ) from error


def _info(
    folder: Path, config: Mapping[str, Any], names: dict[str, str], extra: list[str], trust_remote_code: bool
) -> TokenizerInfo:
    return TokenizerInfo(
        special_tokens=names,
        extra_special_tokens=extra,
        chat_templates=_chat_templates(folder, config),
        source=str(folder),
        load_hf=lambda: _load_hf(folder, trust_remote_code),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise LoadError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise LoadError(f"{path} holds a {type(data).__name__}, not a JSON object.")
    return data


def _content(token: Any) -> str | None:
    """The text of a token that a file gives as a string or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Named special tokens, and further ones. `tokenizer_config.json` wins over the older special_tokens_map.json."""
    merged = {**_read_json(folder / "special_tokens_map.json"), **{k: v for k, v in config.items() if v is not None}}
    names = {name: text for name in _NAMES if (text := _content(merged.get(name))) is not None}
    extra = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = merged.get(key) or []
        extra += [_content(token) for token in (tokens.values() if isinstance(tokens, dict) else tokens)]
    return names, [token for token in extra if token is not None]


def _add_missing_tokens(
    rust: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any], special: list[str]
) -> None:
    """Add tokens that only the files beside `tokenizer.json` name, and mark as special those that must be.

    A named special token that has no id anywhere stays out: a new id would reach beyond the model's embedding.
    """
    wanted: dict[int, tokenizers.AddedToken] = {}
    for text, token_id in _read_json(folder / "added_tokens.json").items():
        wanted[int(token_id)] = tokenizers.AddedToken(text, special=text in special, normalized=False)
    for token_id, fields in (config.get("added_tokens_decoder") or {}).items():
        flags = {name: fields[name] for name in ("lstrip", "rstrip", "single_word", "normalized") if name in fields}
        text = fields["content"]
        is_special = bool(fields.get("special")) or text in special
        wanted[int(token_id)] = tokenizers.AddedToken(text, special=is_special, **flags)
    known = {token.content for token in rust.get_added_tokens_decoder().values()}
    for token_id, token in sorted(wanted.items()):
        if token.content in known:
            continue
        rust.add_tokens([token])
        got = rust.token_to_id(token.content)
        if got != token_id:
            raise LoadError(
                f"{folder}: the token {token.content!r} should have id {token_id}, but tokenizer.json leads to {got}; "
                "the files do not belong together."
            )
    known = {token.content for token in rust.get_added_tokens_decoder().values() if token.special}
    unmarked = [text for text in special if text not in known and rust.token_to_id(text) is not None]
    rust.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in unmarked])


def _apply_config(rust: tokenizers.Tokenizer, config: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Settings of tokenizer_config.json that override tokenizer.json, as in transformers."""
    if "add_bos_token" in config or "add_eos_token" in config:
        bos = names.get("bos_token") if config.get("add_bos_token") else None
        eos = names.get("eos_token") if config.get("add_eos_token") else None
        marks = {token: rust.token_to_id(token) for token in (bos, eos) if token is not None}
        rust.post_processor = processors.TemplateProcessing(
            single=[*([bos] if bos else []), "$A", *([eos] if eos else [])], special_tokens=list(marks.items())
        )
    if "add_prefix_space" in config and isinstance(rust.pre_tokenizer, pre_tokenizers.ByteLevel):
        rust.pre_tokenizer.add_prefix_space = bool(config["add_prefix_space"])


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. Files of their own win over the text in tokenizer_config.json."""
    templates: dict[str, str] = {}
    given = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(given, str):
        templates["default"] = given
    elif isinstance(given, list):
        templates |= {entry["name"]: entry["template"] for entry in given}
    elif isinstance(given, dict):
        templates |= given
    default = folder / "chat_template.jinja"
    if default.exists():
        templates["default"] = default.read_text("utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text("utf-8")
    return templates
