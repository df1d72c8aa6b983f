"""The books of one load: every checkpoint tensor used once, every place filled once, or a problem with its name.

Problems do not stop the reading; they are collected and raised together, so that one start shows all that is wrong.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from octavo.errors import LoadError

MAX_NAMED = 20  # problems of one kind spelled out in the message; the rest is counted


@dataclass
class Ledger:
    """What was seen, what was filled, what went wrong."""

    seen: dict[str, str] = field(default_factory=dict)  # checkpoint name → file
    ignored: list[str] = field(default_factory=list)
    filled: dict[str, set[int | None]] = field(default_factory=lambda: defaultdict(set))  # place → parts; None: whole
    problems: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # kind → lines

    def see(self, name: str, file: str) -> bool:
        """Enter a checkpoint tensor; False (and a problem) when there was one of this name."""
        if name in self.seen:
            self.problem("duplicated", f"{name} is in {self.seen[name]} and again in {file}")
            return False
        self.seen[name] = file
        return True

    def fill(self, place: str, shard: int | None, source: str) -> bool:
        """Enter the filling of a place or of one part of it; False (and a problem) when it is filled already."""
        parts = self.filled[place]
        if shard in parts or None in parts or (shard is None and parts):
            what = place if shard is None else f"part {shard} of {place}"
            self.problem("duplicated", f"{source} would fill {what}, which is filled already")
            return False
        parts.add(shard)
        return True

    def is_filled(self, place: str) -> bool:
        return bool(self.filled.get(place))

    def problem(self, kind: str, line: str) -> None:
        """Enter a problem under a kind: unused, misshapen, duplicated, missing, unreadable."""
        self.problems[kind].append(line)

    def raise_problems(self, checkpoint: str, model: str) -> None:
        """LoadError with everything that was entered, if anything was."""
        if not self.problems:
            return
        count = sum(len(lines) for lines in self.problems.values())
        text = [f"{checkpoint} does not fit {model} ({count} problem{'s' if count > 1 else ''}):"]
        for kind, lines in self.problems.items():
            text += [f"  {kind}: {line}" for line in lines[:MAX_NAMED]]
            if len(lines) > MAX_NAMED:
                text.append(f"  {kind}: and {len(lines) - MAX_NAMED} more")
        raise LoadError("\n".join(text))
