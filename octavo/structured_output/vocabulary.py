"""A vocabulary as grammars see it: the bytes of each token."""

from collections.abc import Callable, Sequence


class Vocabulary:
    """`tokens[i]` are the bytes that token i puts into a text, whatever kind of token it is.

    `special`: tokens that are no text of an answer, "<|im_end|>" -> id. `end_token_ids`: those that end one.
    `num_logits`: rows of the output head; the vocabulary may have fewer tokens. `encode`: a text to ids, nothing added.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        special: dict[str, int],
        end_token_ids: Sequence[int],
        num_logits: int,
        encode: Callable[[str], list[int]],
    ):
        self.tokens = tokens[:num_logits]
        self.special = {name: token_id for name, token_id in special.items() if token_id < num_logits}
        self.end_token_ids = [token_id for token_id in end_token_ids if token_id < num_logits]
        self.num_logits = num_logits
        self.num_words = -(-num_logits // 32)  # length of a mask
        self.encode = encode
        self._overruns: dict[tuple[bytes, bool], list[int]] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of any id the model can sample; the head's padding stands for none."""
        return self.tokens[token_id] if token_id < len(self.tokens) else b""

    def overruns(self, text: bytes, anywhere: bool) -> list[int]:
        """The tokens that begin with `text` (or hold it anywhere) and have more than white space behind it."""
        key = text, anywhere
        if key not in self._overruns:
            pieces = (token.partition(text) for token in self.tokens)
            self._overruns[key] = [
                token_id
                for token_id, (before, found, behind) in enumerate(pieces)
                if found and behind.strip() and (anywhere or not before)
            ]
        return self._overruns[key]
