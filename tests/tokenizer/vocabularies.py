"""Small vocabularies of every kind the detokenizer has to deal with."""

from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.tokenizer.backends import RustBackend
from octavo.tokenizer.gguf import TokenType
from octavo.tokenizer.tokenizer import Tokenizer, TokenizerInfo

PIECES = ["▁", "t", "h", "e", "c", "a", "▁t", "he", "▁the", "▁c", "at", "▁cat", "s", "n", "▁▁", "é"]


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of a vocabulary of 3 control, 256 byte, 16 normal and 1 user-defined token."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<tool>"]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    types += [*[TokenType.NORMAL] * len(PIECES), TokenType.USER_DEFINED]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        # The longer the piece, the better its score.
        "tokenizer.ggml.scores": [0.0] * 259 + [float(len(piece)) for piece in PIECES] + [0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def _wrap(rust: tokenizers.Tokenizer) -> Tokenizer:
    rust.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in ("[CLS]", "[SEP]")])
    return Tokenizer(RustBackend(rust), TokenizerInfo({"cls_token": "[CLS]", "sep_token": "[SEP]"}))


def wordpiece() -> Tokenizer:
    """Its decoder puts spaces between words and drops "##": not a vocabulary of bytes."""
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "cat", "##s", "sat", ".", ",", "un", "##do"]
    rust = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.decoder = decoders.WordPiece()
    return _wrap(rust)


def metaspace() -> Tokenizer:
    """A SentencePiece Unigram vocabulary as T5 has one: a Metaspace decoder."""
    pieces = [("<unk>", 0.0), ("[CLS]", 0.0), ("[SEP]", 0.0)]
    pieces += [(piece, -float(i)) for i, piece in enumerate(["▁the", "▁cat", "▁", "s", "▁▁", "t", "<0x41>"])]
    rust = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    return _wrap(rust)


def byte_fallback_without_strip() -> Tokenizer:
    """Gemma's decoder: spaces and byte tokens, nothing dropped at the start."""
    tokens = ["<unk>", "[CLS]", "[SEP]", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    rust = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _wrap(rust)
