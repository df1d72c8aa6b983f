"""Byte-level BPE read from a GGUF a second time, as plainly as it can be said: the oracle of FC-154.

It shares nothing with the tokenizer under test: the file is read by the public `gguf` package, text is cut by the
expressions that SmolLM's tokenizer is documented with, and merges are applied one by one.
"""

from itertools import pairwise
from pathlib import Path

import regex
from gguf import GGUFReader

# Digits stand alone; then GPT-2's words.
_DIGIT = regex.compile(r"\p{N}")
_WORD = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def _byte_letters() -> dict[int, str]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


class SecondReader:
    """Text to ids; text without control tokens only."""

    def __init__(self, path: Path):
        fields = GGUFReader(path).fields
        self.ids = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"].contents())}
        merges = fields["tokenizer.ggml.merges"].contents()
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        self.letters = _byte_letters()

    def encode(self, text: str) -> list[int]:
        ids = []
        for piece in self._cut_digits(text):
            for word in _WORD.findall(piece):
                ids += [self.ids[symbol] for symbol in self._merge([self.letters[byte] for byte in word.encode()])]
        return ids

    @staticmethod
    def _cut_digits(text: str) -> list[str]:
        pieces, start = [], 0
        for digit in _DIGIT.finditer(text):
            pieces += [text[start : digit.start()], digit[0]]
            start = digit.end()
        return [*pieces, text[start:]]

    def _merge(self, symbols: list[str]) -> list[str]:
        """Join the pair that was learnt first, again and again."""
        while True:
            known = [pair for pair in pairwise(symbols) if pair in self.ranks]
            if not known:
                return symbols
            best = min(known, key=self.ranks.__getitem__)
            merged: list[str] = []
            for symbol in symbols:
                if merged and (merged[-1], symbol) == best:
                    merged[-1] += symbol
                else:
                    merged.append(symbol)
            symbols = merged
