"""A vocabulary of single bytes: whether a grammar takes a text can be asked byte by byte."""

import numpy as np

from octavo.structured_output.constraint import make_constraint
from octavo.structured_output.grammar import Backend, CompiledGrammar
from octavo.structured_output.vocabulary import Vocabulary
from octavo.types.structured_outputs import StructuredOutputsParams

END, THINK, UNTHINK, CALL = 256, 257, 258, 259
SPECIAL = {"<|end|>": END, "<|call|>": CALL}
TEXTS = [bytes([byte]) for byte in range(256)] + [b"<|end|>", b"<think>", b"</think>", b"<|call|>", b">{", b">\n\n"]


def bytes_vocabulary() -> Vocabulary:
    """256 bytes, some special tokens, and two tokens that run over the end of `</think>`; one padding id."""
    return Vocabulary(TEXTS, SPECIAL, [END], len(TEXTS) + 1, lambda text: list(text.encode()))


def takes(backend: Backend, compiled: CompiledGrammar, text: str) -> bool:
    """Whether `text` is a complete text of the grammar. Each byte must be in the mask before it is accepted."""
    grammar = compiled.start()
    for byte in text.encode():
        mask = np.zeros((1, bytes_vocabulary().num_words), dtype=np.int32)
        assert not backend.fill([grammar], mask, [0])
        is_allowed = bool(mask[0, byte // 32] >> byte % 32 & 1)
        if not is_allowed:
            return False
        assert grammar.accept(byte), f"{byte} of {text!r} is in the mask and not accepted"
    return grammar.is_accepting


def compile_with(backend: Backend, **fields) -> CompiledGrammar:
    return backend.compile(make_constraint(StructuredOutputsParams(**fields)))
