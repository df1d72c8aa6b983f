"""Reading a text that is still arriving.

A parser here is a generator that reads top to bottom as if it had the whole text; where it needs characters that are
not there yet it yields, and goes on when they are. What it does can depend on the characters alone, never on where the
pieces were cut, and every character is looked at a bounded number of times.
"""

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")

Parse = Generator[None, None, T]
"""A parser in progress: yields to wait for text, returns a T."""
Emit = Callable[[str], None]

_SPACE = re.compile(r"\s*")


class EndOfText(Exception):
    """More text is needed, and none will come."""


class MalformedError(Exception):
    """The text is not what its opening mark promised."""


class Marks:
    """Fixed strings to look for. Of several that begin at one place the longest counts."""

    def __init__(self, marks: Iterable[str]):
        self.marks = sorted(set(marks), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self.marks)) or r"(?!)")
        self._beginnings = frozenset(mark[:end] for mark in self.marks for end in range(1, len(mark)))
        self.longest = max(map(len, self.marks), default=0)

    def search(self, text: str, start: int, is_last: bool) -> tuple[int, str | None]:
        """(where the first mark begins, the mark), or (where one may be beginning, None) at the latest at the end."""
        found = self._pattern.search(text, start)
        if found is not None:
            may_grow = found.end() == len(text) and not is_last and found[0] in self._beginnings
            return found.start(), None if may_grow else found[0]
        for position in range(max(start, len(text) - self.longest + 1), len(text)):
            if text[position:] in self._beginnings:
                return position, None
        return len(text), None


class Reader:
    """The text of one answer. `text[at:]` is what has arrived and is not read yet."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False  # nothing more will come
        self.is_cut = False  # since the answer was cut, by a limit or by its client
        self._kept: list[str] | None = None  # what was read since `keep`, as far as it is not in `text` any more
        self._kept_from = 0

    def push(self, text: str) -> None:
        """Add what has arrived, and forget what was read."""
        if self._kept is not None:
            self._kept.append(self.text[self._kept_from : self.at])
            self._kept_from = 0
        self.text = self.text[self.at :] + text
        self.at = 0

    def keep(self, num_read: int = 0) -> None:
        """Remember what is read from here on, and the last `num_read` characters."""
        self._kept, self._kept_from = [], self.at - num_read

    def release(self) -> str:
        """What was read since `keep`."""
        assert self._kept is not None
        kept = "".join(self._kept) + self.text[self._kept_from : self.at]
        self._kept = None
        return kept

    def rest(self) -> str:
        """Read all that has arrived."""
        rest, self.at = self.text[self.at :], len(self.text)
        return rest

    def more(self) -> Parse[None]:
        """Wait for text."""
        if self.ended:
            raise EndOfText
        yield

    def peek(self) -> Parse[str]:
        """The next character, which stays unread."""
        while self.at == len(self.text):
            yield from self.more()
        return self.text[self.at]

    def expect(self, character: str) -> Parse[None]:
        """Read `character`; anything else is an error."""
        if (yield from self.peek()) != character:
            raise MalformedError
        self.at += 1

    def skip_space(self) -> Parse[str]:
        """Read whitespace; the character behind it."""
        while True:
            self.run(_SPACE)
            if self.at < len(self.text):
                return self.text[self.at]
            yield from self.more()

    def run(self, pattern: re.Pattern[str], limit: int | None = None) -> str:
        """Read what has arrived of `pattern`, a repetition of one class of characters that may be empty.

        A run of more than `limit` characters is an error, and read that far.
        """
        found = pattern.match(self.text, self.at)
        assert found is not None
        run = found[0]
        if limit is not None and len(run) > limit:
            self.at += limit
            raise MalformedError
        self.at += len(run)
        return run

    def word(self, pattern: re.Pattern[str], limit: int) -> Parse[str]:
        """Read all of `pattern` (as in `run`); more than `limit` characters are an error."""
        word = ""
        while True:
            word += self.run(pattern, limit - len(word))
            if self.at < len(self.text):
                return word
            yield from self.more()

    def literal(self, expected: str) -> Parse[bool]:
        """Read `expected` if the text goes on with it."""
        while len(self.text) - self.at < len(expected):
            if not expected.startswith(self.text[self.at :]):
                return False
            yield from self.more()
        if not self.text.startswith(expected, self.at):
            return False
        self.at += len(expected)
        return True

    def until(self, marks: Marks, emit: Emit) -> Parse[str]:
        """Hand what comes before the next mark to `emit`, read the mark and return it.

        If the text ends first, what may have become a mark is left unread.
        """
        while True:
            start, mark = marks.search(self.text, self.at, self.ended)
            if start > self.at:
                emit(self.text[self.at : start])
                self.at = start
            if mark is not None:
                self.at += len(mark)
                return mark
            yield from self.more()

    def until_after(self, marks: Marks, limit: int) -> Parse[tuple[str, str]]:
        """(the text before the next mark, the mark), both read. An error unless it begins within `limit` characters."""
        while True:
            window = self.text[self.at : self.at + limit + marks.longest]
            start, mark = marks.search(window, 0, self.ended)
            if start > limit:
                raise MalformedError
            if mark is not None:
                self.at += start + len(mark)
                return window[:start], mark
            yield from self.more()
