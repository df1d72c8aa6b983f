"""`AnswerMachine`: the text machine of every format: reasoning first, then content with tool calls in it.

What a format looks like is data (`octavo.server.reasoning_formats`, `octavo.server.tool_formats`). The rules are here:

- Whitespace next to a mark is layout and dropped; all other text goes to one of reasoning, content or arguments.
- What an opening mark promised and does not become (broken JSON, a tool nobody offered) is content again, marks and all.
  A call that its client already knows of gets the rest as the model wrote it, unless its arguments are complete.
- An answer that was cut shows no half mark and no call without a name; a cut call keeps the arguments it has.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import cast

from octavo.server.parsers.calls import Body, Calls, EnoughCalls, MakeId, Tool, random_call_id
from octavo.server.parsers.reader import EndOfText, MalformedError, Marks, Parse, Reader
from octavo.server.text_machine import ContentDelta, Event, Finish, ReasoningDelta, Sections, ToolCallArguments

CUT = frozenset({"length", "abort"})  # reasons of answers that their model would have gone on with


@dataclass(frozen=True, slots=True)
class Opening:
    """What an opening mark promises: how its calls read, and the mark behind which text goes on if one breaks."""

    body: Body
    end: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How the answers to one request are read. Marks are those of the formats in use; without a format there are none."""

    reasoning_starts: Sequence[str] = ()
    reasoning_ends: Sequence[str] = ()
    hides_reasoning: bool = False  # tell nothing of it
    in_reasoning: bool = False  # answers begin inside the section
    may_reason: bool = False  # or may open one at their beginning
    openings: Mapping[str, Opening] = field(default_factory=dict)  # by opening mark
    bare: Mapping[str, Body] = field(default_factory=dict)  # by the first character of an answer that is calls alone
    calls_end_reasoning: bool = False
    layout: Sequence[str] = ()  # marks around content that mean nothing to a client
    tools: Mapping[str, Tool] = field(default_factory=dict)
    make_id: MakeId = random_call_id
    used_ids: frozenset[str] = frozenset()
    max_calls: int | None = None
    finish_reason: str = "tool_calls"  # of an answer with calls


class _Text:
    """Text of one kind, less the whitespace next to marks.

    Between two texts with a mark in between, the whitespace behind the mark stays: without it they would run together.
    """

    def __init__(self, emit: Callable[[str], None], holds_space: bool):
        self.has_begun = False
        self._emit = emit
        self._holds_space = holds_space
        self._behind_mark = False
        self._held: list[str] = []  # whitespace that belongs to what comes next

    def add(self, text: str) -> None:
        if self._behind_mark:
            stripped = text.lstrip()
            if self.has_begun:
                self._held.append(text[: len(text) - len(stripped)])
            text = stripped
        kept = text.rstrip() if self._holds_space else text
        if kept:
            self._emit("".join(self._held) + kept)
            self._held.clear()
            self.has_begun, self._behind_mark = True, False
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])

    def mark(self, separator: str = "") -> None:
        """A mark stands here. `separator` goes between the texts before and behind it."""
        self._held.clear()
        if self.has_begun and separator:
            self._held.append(separator)
        self._behind_mark = True

    def flush(self) -> None:
        """No mark will follow."""
        if self._held and not self._behind_mark:
            self._emit("".join(self._held))
        self._held.clear()


class AnswerMachine:
    """Reads one choice by a `Plan`. `is_done` says that nothing further can matter: generation may stop."""

    def __init__(self, plan: Plan):
        self.is_done = False
        self.in_reasoning = False  # what was read last
        self.sections: Sections | None = None
        self._plan = plan
        self._events: list[Event] = []
        self._reader = Reader()
        self._calls = Calls(plan.tools, self._emit_call, self._reader, plan.make_id, set(plan.used_ids), plan.max_calls)
        self._content = _Text(lambda text: self._events.append(ContentDelta(text)), bool(plan.openings or plan.layout))
        self._reasoning = _Text(self._tell_reasoning, True)
        self._openings = Marks([*plan.openings, *plan.layout])
        self._parser = self._answer()
        self._advance()

    def feed(self, delta_text: str, token_ids: list[int]) -> list[Event]:
        if delta_text and not self.is_done:
            self._reader.push(delta_text)
            self._advance()
        return self._take()

    def finish(self, reason: str) -> list[Event]:
        if not self.is_done:
            self._reader.ended, self._reader.is_cut = True, reason in CUT
            self._advance()
        self._content.flush()
        self._reasoning.flush()
        if self._calls.num_complete and (reason == "stop" or self.is_done):
            reason = self._plan.finish_reason
        return [*self._take(), Finish(reason)]

    def _advance(self) -> None:
        next(self._parser, None)

    def _take(self) -> list[Event]:
        """What there is to tell; neighbouring pieces of one text as one event."""
        found, self._events = self._events, []
        if len(found) <= 1:
            return found
        events: list[Event] = []
        for kind, group in groupby(found, type):
            if kind in (ContentDelta, ReasoningDelta, ToolCallArguments):
                first, *others = cast("list[ContentDelta | ReasoningDelta | ToolCallArguments]", list(group))
                events.append(replace(first, text=first.text + "".join(event.text for event in others)))
            else:
                events += group
        return events

    def _tell_reasoning(self, text: str) -> None:
        if not self._plan.hides_reasoning:
            self._events.append(ReasoningDelta(text))

    def _emit_call(self, event: Event) -> None:
        self._content.mark()
        self._events.append(event)

    # The parser

    def _answer(self) -> Parse[None]:
        try:
            yield from self._read()
        except EndOfText:
            self._end()
        except EnoughCalls:
            self.is_done = True

    def _read(self) -> Parse[None]:
        """The whole answer; ends by an exception only."""
        if self._plan.in_reasoning:
            yield from self._read_reasoning()
        elif self._plan.may_reason:
            yield from self._read_leading_reasoning()
        if self._plan.bare:
            yield from self._read_bare()
        while True:
            mark = yield from self._reader.until(self._openings, self._content.add)
            yield from self._read_opening(mark)

    def _end(self) -> None:
        """The text is over, perhaps inside of something."""
        half_mark = self._reader.rest()
        if half_mark and not self._reader.is_cut:
            (self._reasoning if self.in_reasoning else self._content).add(half_mark)

    def _read_leading_reasoning(self) -> Parse[None]:
        """A section at the very beginning, if there is one."""
        reader = self._reader
        reader.keep()
        opened = False
        try:
            yield from reader.skip_space()
            for mark in self._plan.reasoning_starts:
                opened = opened or (yield from reader.literal(mark))
        finally:
            space = reader.release()
            if not opened:
                self._content.add(space)
        if opened:
            yield from self._read_reasoning()

    def _read_reasoning(self) -> Parse[None]:
        """Inside a section, up to its end mark."""
        self.in_reasoning = True
        plan, reader = self._plan, self._reader
        openings = plan.openings if plan.calls_end_reasoning else ()
        marks = Marks([*plan.reasoning_ends, *plan.reasoning_starts, *openings])
        self._reasoning.mark()
        while True:
            mark = yield from reader.until(marks, self._reasoning.add)
            if mark in plan.reasoning_starts:
                if self._reasoning.has_begun:
                    self._reasoning.add(mark)  # the model speaks of it
                continue
            self._reasoning.mark()
            self.in_reasoning = False
            self._content.mark()
            if mark in openings:
                yield from self._read_opening(mark)
            return

    def _read_bare(self) -> Parse[None]:
        """Calls without a mark, at the beginning of the content."""
        reader = self._reader
        reader.keep()
        try:
            body = self._plan.bare.get((yield from reader.skip_space()))
        except EndOfText:
            self._content.add(reader.release())
            raise
        if body is None:
            self._content.add(reader.release())
        else:
            yield from self._read_calls(Opening(body))

    def _read_opening(self, mark: str) -> Parse[None]:
        if mark in self._plan.layout:
            self._content.mark()
            return
        self._reader.keep(len(mark))
        yield from self._read_calls(self._plan.openings[mark])

    def _read_calls(self, opening: Opening) -> Parse[None]:
        """The calls behind an opening mark; what they turn out not to be is content. The reader keeps the mark."""
        reader, calls = self._reader, self._calls
        try:
            yield from opening.body(reader, calls)
            text = reader.release()
            self._content.add(text[len(text.rstrip()) :])  # space read in search of further calls
        except MalformedError:
            yield from self._recover(opening)
        except EndOfText:
            self._end_calls(opening)
            raise

    def _recover(self, opening: Opening) -> Parse[None]:
        call, self._calls.current = self._calls.current, None
        text = self._reader.release()
        if call is None or not call.is_told:
            self._content.add(text)
            return
        ends = Marks([opening.end] if opening.end else [])
        self._reader.keep()
        if call.has_arguments:
            call.end()
            yield from self._reader.until(ends, self._content.add)
        else:
            yield from self._reader.until(ends, call.arguments)
            call.end()
        self._reader.release()

    def _end_calls(self, opening: Opening) -> None:
        """The answer ended among its calls."""
        call, reader = self._calls.current, self._reader
        text = reader.release() + reader.rest()
        if call is not None and call.is_told and call.has_arguments:
            call.end()
        elif call is not None and (call.is_told or (reader.is_cut and call.tool is not None)):
            call.commit()
        elif not reader.is_cut and not (self._calls.num_complete and (opening.end or "").startswith(text.strip())):
            self._content.add(text)
