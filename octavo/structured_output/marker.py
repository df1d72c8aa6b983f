"""`Marker`: finds the end of a free section (`</think>`) in a stream of tokens, however they cut it."""

from collections.abc import Iterator, Sequence

from octavo.structured_output.vocabulary import Vocabulary


class Marker:
    """Looks for the first of several texts."""

    def __init__(self, texts: Sequence[str], vocabulary: Vocabulary):
        self._texts = [text.encode() for text in texts]
        self._vocabulary = vocabulary
        self._longest = max(map(len, self._texts))
        self._tail = b""  # as much of the text so far as a marker could begin in

    def feed(self, token_id: int) -> bool:
        """Take in a token; whether one of the texts is complete."""
        text = self._tail + self._vocabulary.bytes_of(token_id)
        self._tail = text[max(0, len(text) - self._longest + 1) :]
        return any(marker in text for marker in self._texts)

    def overrunning(self) -> Iterator[int]:
        """Tokens that would complete a text and go on behind it, where already the grammar has its say."""
        for marker in self._texts:
            yield from self._vocabulary.overruns(marker, True)
            for length in range(1, len(marker)):
                if self._tail.endswith(marker[:length]):
                    yield from self._vocabulary.overruns(marker[length:], False)
