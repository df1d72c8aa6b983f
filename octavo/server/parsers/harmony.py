"""Harmony, the format of gpt-oss: an answer is a row of messages in channels.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

`analysis` is reasoning, a message to `functions.NAME` is a call with its arguments, everything else is content.
"""

import re

from octavo.server.parsers.answer import AnswerMachine, Opening
from octavo.server.parsers.json_calls import named_call
from octavo.server.parsers.reader import EndOfText, MalformedError, Marks, Parse

# What a grammar may take for the end of reasoning: the answer proper begins.
HARMONY_ANSWER = "<|channel|>final<|message|>"

_MAX_HEADER = 512
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.:/-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_MESSAGE = Marks(["<|message|>"])
_STARTS = Marks(["<|start|>", "<|channel|>"])
_ENDS = Marks(["<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"])


class HarmonyMachine(AnswerMachine):
    """Reads an answer that begins behind `<|start|>assistant`. Messages of one kind stand on lines of their own."""

    def _read(self) -> Parse[None]:
        mark = yield from self._read_leading_recipient()
        while True:
            if not mark:
                mark = yield from self._reader.until(_STARTS, self._content.add)
            mark = yield from self._read_message(mark)

    def _read_leading_recipient(self) -> Parse[str]:
        """The rest of a header that the prompt began, if there is one."""
        reader = self._reader
        reader.keep()
        word = " to="
        is_header = False
        try:
            is_header = yield from reader.literal(word)
        finally:
            space = reader.release()
            if not is_header:
                self._content.add(space)
        return word if is_header else ""

    def _read_message(self, mark: str) -> Parse[str]:
        """A message whose header began with `mark`, which was read; the mark of the next header if it was read, too."""
        reader = self._reader
        header = yield from self._read_header(mark)
        if header is None:
            return ""
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        is_analysis = channel is not None and channel[1] == "analysis"
        text = self._content
        if recipient is not None and (recipient[1] in self._plan.tools or not is_analysis):
            yield from self._read_calls(Opening(named_call(recipient[1]), "<|call|>"))
        else:
            reader.release()
            self.in_reasoning = is_analysis
            text = self._reasoning if is_analysis else self._content
            text.mark("\n")
        mark = yield from reader.until(_ENDS, text.add)
        text.mark()
        self.in_reasoning = False
        return mark if mark in _STARTS.marks else ""

    def _read_header(self, mark: str) -> Parse[str | None]:
        """The header, which the reader keeps; None when there is none, and the text was content."""
        reader = self._reader
        reader.keep(len(mark))
        try:
            header, _ = yield from reader.until_after(_MESSAGE, _MAX_HEADER)
        except MalformedError:
            self._content.add(reader.release())
            return None
        except EndOfText:
            if not reader.is_cut:
                self._content.add(reader.release())
            raise
        return mark + header
