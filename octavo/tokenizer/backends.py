"""The two things a `Tokenizer` can stand on: the Rust library, or a Python tokenizer of transformers."""

import json
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import tokenizers


@dataclass(frozen=True)
class AddedToken:
    """A token matched in text before anything else; special ones are left out when special tokens are skipped."""

    content: str
    special: bool


class Backend(Protocol):
    """What `Tokenizer` asks of the library below it. Every method may be called from several threads at once."""

    added_tokens: dict[int, AddedToken]
    decoder_state: dict[str, Any] | None  # the decoder as tokenizer.json describes it; None: unknown
    is_fast: bool

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]: ...
    def encode_pieces(self, pieces: list[str], add_special_tokens: bool) -> list[int]: ...
    def encode_fitting(
        self, texts: list[str], add_special_tokens: bool, max_tokens: int | None
    ) -> tuple[list[int], list[int]]: ...
    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str: ...
    def id_to_token(self, token_id: int) -> str | None: ...
    def token_to_id(self, token: str) -> int | None: ...
    def vocab(self) -> dict[str, int]: ...


def fitting_lengths(lengths: list[int], room: int) -> list[int]:
    """Lengths of one text or of a pair that fit in `room`: of a pair the longer one is cut first, then both alike."""
    room = max(room, 0)
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    short, long = sorted(lengths)
    long = min(long, max(short, room - short))
    if short + long > room:
        short, long = room // 2, room - room // 2
    return [short, long] if lengths[0] <= lengths[1] else [long, short]


class RustBackend:
    """`tokenizers.Tokenizer`. Its settings are fixed here, once: a later change would fail under concurrent use."""

    is_fast = True

    def __init__(self, rust: tokenizers.Tokenizer):
        rust.no_truncation()
        rust.no_padding()
        self.rust = rust
        self.added_tokens = {
            token_id: AddedToken(token.content, token.special)
            for token_id, token in rust.get_added_tokens_decoder().items()
        }
        decoder = rust.decoder
        self.decoder_state = json.loads(decoder.__getstate__()) if decoder is not None else None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Not `rust.encode`: that one holds the interpreter's lock, and a long text would stop every other thread.
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        encodings = self.rust.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_pieces(self, pieces: list[str], add_special_tokens: bool) -> list[int]:
        """Encode pieces on their own and join them; special tokens go around the whole, not around each."""
        encodings = self.rust.encode_batch(pieces, add_special_tokens=False)
        merged = tokenizers.Encoding.merge(encodings, growing_offsets=True)
        return self.rust.post_process(merged, add_special_tokens=add_special_tokens).ids

    def encode_fitting(
        self, texts: list[str], add_special_tokens: bool, max_tokens: int | None
    ) -> tuple[list[int], list[int]]:
        """(ids, type ids) of one text or of two as a pair, cut at their ends to leave room for the special tokens."""
        encodings = self.rust.encode_batch(texts, add_special_tokens=False)
        if max_tokens is not None:
            num_special = self.rust.num_special_tokens_to_add(len(texts) == 2) if add_special_tokens else 0
            lengths = fitting_lengths([len(encoding) for encoding in encodings], max_tokens - num_special)
            for encoding, length in zip(encodings, lengths, strict=True):
                encoding.truncate(length)
        second = encodings[1] if len(encodings) == 2 else None
        made = self.rust.post_process(encodings[0], second, add_special_tokens=add_special_tokens)
        return made.ids, made.type_ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return self.rust.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        return self.rust.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self.rust.token_to_id(token)

    def vocab(self) -> dict[str, int]:
        return self.rust.get_vocab(with_added_tokens=True)


class PythonBackend:
    """A transformers tokenizer written in Python, for vocabularies the Rust library cannot hold. One lock guards it."""

    is_fast = False

    def __init__(self, hf: Any):
        self.decoder_state: dict[str, Any] | None = None
        self._hf = hf
        self._lock = threading.Lock()
        self.added_tokens = {
            token_id: AddedToken(token.content, token.special) for token_id, token in hf.added_tokens_decoder.items()
        }
        self._vocab: dict[str, int] = hf.get_vocab()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with self._lock:
            return self._hf.encode(text, add_special_tokens=add_special_tokens)

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def encode_pieces(self, pieces: list[str], add_special_tokens: bool) -> list[int]:
        ids = [token_id for piece in pieces for token_id in self.encode(piece, False)]
        if not add_special_tokens:
            return ids
        with self._lock:
            return self._hf.build_inputs_with_special_tokens(ids)

    def encode_fitting(
        self, texts: list[str], add_special_tokens: bool, max_tokens: int | None
    ) -> tuple[list[int], list[int]]:
        with self._lock:
            made = self._hf(
                *texts,
                add_special_tokens=add_special_tokens,
                truncation=max_tokens is not None,
                max_length=max_tokens,
                return_token_type_ids=True,
            )
        return made["input_ids"], made["token_type_ids"]

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        with self._lock:
            return self._hf.decode(
                [i for i in token_ids if 0 <= i < len(self._hf)],
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )

    def id_to_token(self, token_id: int) -> str | None:
        with self._lock:
            return self._hf.convert_ids_to_tokens(token_id) if 0 <= token_id < len(self._hf) else None

    def token_to_id(self, token: str) -> int | None:
        return self._vocab.get(token)

    def vocab(self) -> dict[str, int]:
        return dict(self._vocab)
