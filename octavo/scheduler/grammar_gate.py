"""Requests that follow a grammar: they wait here until it is compiled, and each step that samples them gets masks."""

from collections.abc import Iterator, Sequence

from octavo.errors import OctavoError
from octavo.scheduler.request import Request
from octavo.structured_output.manager import GrammarManager, PendingGrammar
from octavo.types.request import EngineRequest
from octavo.types.step import SchedulerOutput, TokenMasks


class GrammarGate:
    """Holds requests before the queue. Integers and bytes only; what a grammar is, the manager knows."""

    def __init__(self, manager: GrammarManager | None):
        self._maybe_manager = manager
        self._held: dict[Request, PendingGrammar] = {}
        self.num_prompt_tokens = 0  # of those held

    @property
    def _manager(self) -> GrammarManager:
        assert self._maybe_manager is not None, "no request was to follow a grammar"
        return self._maybe_manager

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request: Request) -> bool:
        return request in self._held

    def hold(self, request: Request, engine_request: EngineRequest) -> None:
        """Keep a request until its grammar is there."""
        self._held[request] = self._manager.start(engine_request)
        self.num_prompt_tokens += request.num_input_tokens

    def drop(self, request: Request) -> None:
        """Forget one that has ended."""
        del self._held[request]
        self.num_prompt_tokens -= request.num_input_tokens

    def release(self) -> Iterator[tuple[Request, OctavoError | None]]:
        """Those whose wait is over, with the grammar or the reason why there is none."""
        for request, pending in list(self._held.items()):
            try:
                request.grammar = pending.poll()
            except OctavoError as error:
                self.drop(request)
                yield request, error
                continue
            if request.grammar is not None:
                self.drop(request)
                yield request, None

    def wait(self, seconds: float) -> None:
        """Return as soon as a grammar is ready, or the time is over."""
        self._manager.wait_for_any(list(self._held.values()), seconds)

    def masks(self, step: SchedulerOutput, requests: Sequence[Request]) -> TokenMasks:
        """The masks of a step that awaits them, once all tokens before it are known; `requests` are its rows'."""
        indices, grammars = [], []
        for index, request in enumerate(requests):
            # A result that nobody takes in needs no mask.
            if request.grammar is None or not step.samples[index] or request.is_finished:
                continue
            if request.discard_through_step < step.step_id:
                indices.append(index)
                grammars.append(request.grammar)
        words = self._manager.fill(grammars).tobytes() if grammars else b""
        return TokenMasks(step.step_id, indices, words)
