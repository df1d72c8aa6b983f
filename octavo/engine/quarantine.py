"""Which request kills cores.

A core that dies once proves nothing: somebody may have killed it. A request is *suspect* when it was in flight in two
deaths and got no token in between; a request that makes progress after each restart ends some day, whatever happens to
the core. A suspect that was in flight all alone is the culprit. The others are tried one at a time in the next core:
each is sent when the one before has got a token and is cleared by it. When the core does not survive a trial, the
request on trial is tried first, and so alone, in the core after that. So finding a culprit among any number of
requests costs at most four deaths once it gets no further, and no request is failed for a death that it merely attended.
"""

from collections.abc import Collection, Mapping


class Quarantine:
    """Judges deaths. Progress is told by the number of tokens that a request's client has."""

    def __init__(self) -> None:
        self._last_seen: dict[str, int] = {}  # in flight at the last death -> tokens it had
        self._suspects: dict[str, int] = {}  # -> tokens it had when the core died

    @property
    def is_trying(self) -> bool:
        """Whether some suspect has not been cleared."""
        return bool(self._suspects)

    def judge(self, in_flight: Collection[str], num_tokens: Mapping[str, int]) -> str | None:
        """A core died with `in_flight`; `num_tokens` of all open requests. The culprit, if this death shows one."""
        self.choose(num_tokens)
        for name in num_tokens:  # in the order they came, so that trials keep it
            if name in in_flight and self._last_seen.get(name) == num_tokens[name]:
                self._suspects.setdefault(name, num_tokens[name])
        alone = next(iter(in_flight)) if len(in_flight) == 1 else None
        culprit = alone if alone in self._suspects else None
        if in_flight:  # a core that died before it had anything to do says nothing
            self._last_seen = {name: num_tokens[name] for name in in_flight if name != culprit}
        if culprit is not None:
            del self._suspects[culprit]
        return culprit

    def choose(self, num_tokens: Mapping[str, int]) -> str | None:
        """Whose trial it is, given the tokens of all open requests; None when nobody is suspect any more."""
        self._suspects = {name: count for name, count in self._suspects.items() if num_tokens.get(name) == count}
        return next(iter(self._suspects), None)
