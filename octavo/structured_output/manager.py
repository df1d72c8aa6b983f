"""`GrammarManager`: compiles grammars beside the loop, keeps compiled ones, and fills the masks of a step."""

import contextlib
import importlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from octavo.config.engine import StructuredOutputsConfig
from octavo.errors import ClientError, OctavoError, RequestFailedError
from octavo.logger import get_logger
from octavo.structured_output.constraint import Constraint, make_constraint
from octavo.structured_output.grammar import Backend, CompiledGrammar, Masks
from octavo.structured_output.request_grammar import RequestGrammar
from octavo.structured_output.vocabulary import Vocabulary
from octavo.types.request import EngineRequest

logger = get_logger(__name__)

# Name -> module:class, loaded when a request needs it.
BACKENDS = {
    "llguidance": "octavo.structured_output.llguidance_backend:LLGuidance",
    "xgrammar": "octavo.structured_output.xgrammar_backend:XGrammar",
}
# "auto": llguidance, and xgrammar where that can do more.
FIRST = "llguidance"
SECOND = {"gbnf": "xgrammar", "structural_tag": "xgrammar"}
NUM_THREADS = 2
MAX_CACHE_BYTES = 256 << 20


@dataclass(slots=True)
class PendingGrammar:
    """A grammar on its way to a request."""

    future: "Future[RequestGrammar]"
    deadline: float  # time.monotonic()
    seconds: float

    def poll(self) -> RequestGrammar | None:
        """The grammar once it is there. Raises OctavoError, a ClientError if the client's constraint is at fault."""
        if self.future.done():
            error = self.future.exception()
            if error is None:
                return self.future.result()
            if isinstance(error, OctavoError):
                raise error
            # A native engine that panics raises no Exception; that is this request's misfortune all the same.
            logger.error("a grammar could not be made", exc_info=error)
            raise RequestFailedError(f"its grammar could not be made: {error!r}") from error
        if time.monotonic() > self.deadline:
            self.future.cancel()
            raise ClientError(
                f"structured_outputs: the constraint was not ready after {self.seconds:g} s; make it smaller, or start "
                "the engine with a larger compile_timeout in --structured-outputs-config.",
                param="structured_outputs",
            )
        return None


class GrammarManager:
    """Not thread-safe but for what its own threads do."""

    def __init__(self, config: StructuredOutputsConfig, make_vocabulary: Callable[[], Vocabulary], max_num_seqs: int):
        self._config = config
        self._make_vocabulary = make_vocabulary
        self._max_num_seqs = max_num_seqs
        self._lock = threading.Lock()  # over what the threads share: the vocabulary, the backends, the cache
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[str, Backend] = {}
        self._cache = _Cache(MAX_CACHE_BYTES)
        self._masks: Masks | None = None
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="octavo-grammar")

    def start(self, request: EngineRequest) -> PendingGrammar:
        """Begin to make the grammar of a request that has a constraint."""
        seconds = self._config.compile_timeout
        future = self._threads.submit(self._make, request)
        return PendingGrammar(future, time.monotonic() + seconds, seconds)

    @staticmethod
    def wait_for_any(pending: Sequence[PendingGrammar], seconds: float) -> None:
        """Return as soon as one is done, or the time is over."""
        wait([p.future for p in pending], seconds, FIRST_COMPLETED)

    def fill(self, grammars: Sequence[RequestGrammar]) -> Masks:
        """[len(grammars), words]: what each may sample next. Valid until the next call.

        A grammar whose mask could not be made has `error` set and allows nothing.
        """
        assert self._vocabulary is not None
        if self._masks is None:
            self._masks = np.zeros((self._max_num_seqs, self._vocabulary.num_words), dtype=np.int32)
        by_backend: dict[Backend, list[int]] = {}
        for row, grammar in enumerate(grammars):
            if grammar.needs_mask:
                by_backend.setdefault(grammar.backend, []).append(row)
        for backend, rows in by_backend.items():
            errors = backend.fill([grammars[row].grammar for row in rows], self._masks, rows)
            for index, message in errors.items():
                grammars[rows[index]].error = f"its grammar cannot be followed any further: {message}"
        for row, grammar in enumerate(grammars):
            if grammar.error is None:
                grammar.complete_mask(self._masks[row])
            else:
                self._masks[row] = 0
        return self._masks[: len(grammars)]

    def shutdown(self) -> None:
        """Let go of the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- on the threads

    def _make(self, request: EngineRequest) -> RequestGrammar:
        params = request.sampling_params
        assert params.structured_outputs is not None
        vocabulary = self._get_vocabulary()
        backend, compiled = self._compile(make_constraint(params.structured_outputs, self._config))
        ends = [*(() if params.ignore_eos else request.eos_token_ids), *(params.stop_token_ids or ())]
        section = None if self._config.enable_in_reasoning else params.reasoning
        grammar = RequestGrammar(backend, compiled.start(), vocabulary, ends, section)
        grammar.follow(request.output_token_ids)  # of a request that goes on after a restart
        return grammar

    def _compile(self, constraint: Constraint) -> tuple[Backend, CompiledGrammar]:
        """By the backend that was chosen; under "auto" by the first that can."""
        if self._config.backend != "auto":
            return self._compile_with(self._config.backend, constraint)
        try:
            return self._compile_with(FIRST, constraint)
        except ClientError:
            second = SECOND.get(constraint.kind)
            if second is None or find_spec(second) is None:
                raise
            with contextlib.suppress(ClientError):
                return self._compile_with(second, constraint)
            raise  # the first one's word counts

    def _compile_with(self, name: str, constraint: Constraint) -> tuple[Backend, CompiledGrammar]:
        backend = self._get_backend(name)
        return backend, self._cache.get(name, backend, constraint)

    def _get_vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def _get_backend(self, name: str) -> Backend:
        vocabulary = self._get_vocabulary()
        with self._lock:
            if name not in self._backends:
                module, _, cls = BACKENDS[name].partition(":")
                self._backends[name] = getattr(importlib.import_module(module), cls)(vocabulary)
            return self._backends[name]


class _Cache:
    """The grammars used last, and those being made: who asks for one of these waits for it."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, Constraint], Future[CompiledGrammar]] = OrderedDict()

    def get(self, name: str, backend: Backend, constraint: Constraint) -> CompiledGrammar:
        key = name, constraint
        with self._lock:
            future = self._entries.get(key)
            is_new = future is None
            if future is None:
                future = self._entries[key] = Future()
            self._entries.move_to_end(key)
        if is_new:
            self._fill(key, future, backend)
        return future.result()

    def _fill(self, key: tuple[str, Constraint], future: "Future[CompiledGrammar]", backend: Backend) -> None:
        try:
            compiled = backend.compile(key[1])
        except BaseException as error:
            with self._lock:
                del self._entries[key]
            future.set_exception(error)
            return
        future.set_result(compiled)
        with self._lock:
            self._num_bytes += compiled.num_bytes
            while self._num_bytes > self._max_bytes:
                oldest = next(k for k, entry in self._entries.items() if entry.done())
                self._num_bytes -= self._entries.pop(oldest).result().num_bytes
