"""A tokenizer from a GGUF's metadata alone: no other file, no network.

Two kinds of vocabulary are understood: `gpt2` (byte-level BPE; how text is cut into words comes from
`pre_tokenizers.PRE_TOKENIZERS`) and `llama` (SentencePiece BPE with byte fallback). Others are refused by name.
"""

from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from octavo.errors import LoadError
from octavo.loader.gguf_metadata import read_gguf_metadata
from octavo.tokenizer.backends import RustBackend
from octavo.tokenizer.pre_tokenizers import find_pre_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer, TokenizerInfo

SPACE = "▁"  # SentencePiece's mark for a space


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Metadata key -> the name transformers gives that token.
_NAMED_TOKENS = {
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
    "seperator_token_id": "sep_token",  # spelled so in the format
    "mask_token_id": "mask_token",
    "cls_token_id": "cls_token",
}
# Tokens that end a turn under these names although older files state one end token only.
_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|eot|>",
)


def load_gguf_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of one GGUF file."""
    return tokenizer_from_metadata(read_gguf_metadata(path), str(path))


def tokenizer_from_metadata(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Build a tokenizer from GGUF metadata; `source` names the file in errors. LoadError when it cannot be done."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        rust, add_bos = _byte_level_bpe(metadata, source)
    elif kind == "llama":
        rust, add_bos = _sentencepiece_bpe(metadata, source)
    else:
        raise LoadError(
            f"{source} holds a tokenizer of kind tokenizer.ggml.model={kind!r}; 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece BPE) are supported. Give the original model's tokenizer with --tokenizer instead."
        )
    tokens, types = _tokens(metadata, source), _types(metadata)
    _mark_added_tokens(rust, tokens, types, strip_right=_strips_right(metadata))
    named = {
        name: tokens[token_id]
        for key, name in _NAMED_TOKENS.items()
        if isinstance(token_id := metadata.get(f"tokenizer.ggml.{key}"), int) and token_id < len(tokens)
    }
    rust.post_processor = _frame(
        rust,
        bos=named.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None,
        eos=named.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return Tokenizer(
        RustBackend(rust),
        TokenizerInfo(
            special_tokens=named,
            chat_templates=_chat_templates(metadata),
            end_token_ids=end_token_ids(metadata),
            source=source,
        ),
    )


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Every id that ends an answer: end of sequence, of turn and of message, as stated or under a well-known name."""
    stated = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ids = [token_id for token_id in stated if isinstance(token_id, int)]
    tokens, types = metadata.get("tokenizer.ggml.tokens") or [], metadata.get("tokenizer.ggml.token_type")
    for name in _END_OF_TURN:
        try:
            token_id = tokens.index(name)
        except ValueError:
            continue
        if types is None or types[token_id] in (TokenType.CONTROL, TokenType.USER_DEFINED):
            ids.append(token_id)
    return list(dict.fromkeys(ids))


def _byte_level_bpe(metadata: Mapping[str, Any], source: str) -> tuple[tokenizers.Tokenizer, bool]:
    row = find_pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
    lines = metadata.get("tokenizer.ggml.merges")
    if lines is None:
        raise LoadError(f"{source} has no tokenizer.ggml.merges, which a byte-level BPE vocabulary needs.")
    merges = []
    for line in lines:
        left, _, right = line.partition(" ")
        merges.append((left, right))
    model = models.BPE(
        vocab=_vocab(_tokens(metadata, source)), merges=merges, fuse_unk=False, ignore_merges=row.ignore_merges
    )
    rust = tokenizers.Tokenizer(model)
    normalizer = row.normalizer()
    if normalizer is not None:
        rust.normalizer = normalizer
    rust.pre_tokenizer = row.build()
    rust.decoder = decoders.ByteLevel()
    return rust, row.add_bos


def _sentencepiece_bpe(metadata: Mapping[str, Any], source: str) -> tuple[tokenizers.Tokenizer, bool]:
    tokens, types = _tokens(metadata, source), _types(metadata)
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise LoadError(f"{source} has no tokenizer.ggml.scores, which a SentencePiece vocabulary needs.")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab=_vocab(tokens),
        merges=_merges_from_scores(tokens, scores, types),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    rust = tokenizers.Tokenizer(model)
    add_space_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    mark_spaces = normalizers.Replace(" ", SPACE)
    rust.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), mark_spaces]) if add_space_prefix else mark_spaces
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    rust.decoder = decoders.Sequence(steps)
    return rust, True


def _merges_from_scores(tokens: list[str], scores: list[float], types: list[int] | None) -> list[tuple[str, str]]:
    """The merge list that makes ranked BPE do what SentencePiece does with scores: the best-scored piece first."""
    pieces: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if types is None or types[token_id] in (TokenType.NORMAL, TokenType.USER_DEFINED):
            pieces.setdefault(token, token_id)
    find = pieces.get
    ranked = [
        (-scores[token_id], left_id, right_id)
        for token, token_id in pieces.items()
        for cut in range(1, len(token))
        if (right_id := find(token[cut:])) is not None and (left_id := find(token[:cut])) is not None
    ]
    ranked.sort()
    return [(tokens[left_id], tokens[right_id]) for _, left_id, right_id in ranked]


def _tokens(metadata: Mapping[str, Any], source: str) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise LoadError(f"{source} has no tokenizer.ggml.tokens; give the original model's tokenizer with --tokenizer.")
    return tokens


def _types(metadata: Mapping[str, Any]) -> list[int] | None:
    return metadata.get("tokenizer.ggml.token_type")


def _vocab(tokens: list[str]) -> dict[str, int]:
    """Token -> id; of a token that stands twice, the first."""
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocab.setdefault(token, token_id)
    return vocab


def _strips_right(metadata: Mapping[str, Any]) -> bool:
    """Phi-3's control tokens swallow the white space after them; its files state that in no other way."""
    name = str(metadata.get("general.name", "")).lower()
    return "phi-3" in name or "phi3" in name


def _mark_added_tokens(
    rust: tokenizers.Tokenizer, tokens: list[str], types: list[int] | None, *, strip_right: bool
) -> None:
    """Have control and user-defined tokens matched in text as wholes; control tokens are special."""
    if types is None:
        return
    added = []
    for token, token_type in zip(tokens, types, strict=True):
        special = token_type in (TokenType.CONTROL, TokenType.UNKNOWN)
        if token and (special or token_type == TokenType.USER_DEFINED):
            rstrip = strip_right and special and token not in ("<unk>", "<s>", "<|endoftext|>")
            added.append(tokenizers.AddedToken(token, special=special, normalized=False, rstrip=rstrip))
    rust.add_tokens(added)


def _frame(rust: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> processors.TemplateProcessing | None:
    """The post-processor that puts BOS before and EOS after a text."""
    marks = [token for token in (bos, eos) if token is not None]
    if not marks:
        return None
    return processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(token, rust.token_to_id(token)) for token in dict.fromkeys(marks)],
    )


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {"default": metadata.get("tokenizer.chat_template")}
    for name in metadata.get("tokenizer.chat_templates") or []:
        templates[name] = metadata.get(f"tokenizer.chat_template.{name}")
    return {name: text for name, text in templates.items() if text}
