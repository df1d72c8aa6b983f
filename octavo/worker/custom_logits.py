"""Logits processors that users bring, with vLLM's interface.

A user's processor sees a *batch*: the logits of one step, [batch_size, vocab_size], and before them how the batch differs
from the last one it saw. Octavo's worker has permanent rows instead, of which a step samples some in any order;
`CustomProcessor` translates. Only its host work grows with the number of processors; without any, nothing here runs.

    permanent rows      7  2  4          (the step before: 2  9  7)
    batch index         0  1  2          removed [1], added [(1, row 4)], moved [(0, 1, SWAP) …]
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch

from octavo.config.engine import EngineConfig
from octavo.errors import ClientError, ConfigError
from octavo.types.sampling_params import SamplingParams
from octavo.types.step import NewRow
from octavo.utils.class_names import load_class
from octavo.worker import logits_processors as builtin
from octavo.worker.logits_processors import ProcessorStep, RowsFailedError


class MoveDirectionality(Enum):
    """Whether the request at the second index of a move goes to the first, or there was none."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
"""(index, parameters, prompt token ids, output token ids); the last list grows as tokens are generated."""
MovedRequest = tuple[int, int, MoveDirectionality]
"""(from index, to index, …)"""


@dataclass(frozen=True)
class BatchUpdate:
    """How a batch differs from the one before: first requests are removed, then added, then moved, each in order.

    A request is added at an index that is free by then, or beyond the end of the batch.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Changes the logits of every step, knowing which requests are in it. Subclass it and name it in `logits_processors`.

    One object serves all requests. An exception fails the requests of the step, since which of them it concerns cannot be
    told; `AdapterLogitsProcessor` fails the one request alone.
    """

    @classmethod  # noqa: B027 (most processors take every request)
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError when a request's parameters are wrong for this processor; the client gets the message."""

    @abstractmethod
    def __init__(self, vllm_config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        """Called once, before the model is loaded. `is_pin_memory`: whether copies to the device want pinned memory."""

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the changed logits, float32 [batch_size, vocab_size]; changing them in place is fine."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token stays the likeliest. If so, greedy requests do without, and random ones get their
        logits divided by the temperature."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before every `apply`; None when the batch holds the same requests at the same indices."""


RequestLogitsProcessor = (
    Callable[[list[int], torch.Tensor], torch.Tensor] | Callable[[list[int], list[int], torch.Tensor], torch.Tensor]
)
"""(output ids, logits [vocab_size]) or (prompt ids, output ids, logits) to the changed logits."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Gives each request a function of its own. Subclasses say which, in `new_req_logits_processor`."""

    def __init__(self, vllm_config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, partial[torch.Tensor]] = {}  # by index in the batch

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function for a request with these parameters; None when it needs none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._bind)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        errors: dict[int, str] = {}
        for index, function in self.req_info.items():
            try:
                logits[index] = function(logits[index])
            except Exception as error:
                errors[index] = f"{type(self).__name__}: {error!r}"
        if errors:
            raise RowsFailedError(errors)
        return logits

    def _bind(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> "partial[torch.Tensor] | None":
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        known: tuple[Any, ...] = (prompt_ids, output_ids) if _num_positional(function) == 3 else (output_ids,)
        return partial(function, *known)


def process_dict_updates(
    state: dict[int, Any],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], Any],
) -> bool:
    """Bring a dictionary keyed by index up to date; whether it changed.

    `new_state(params, prompt ids, output ids)` gives the entry of a new request; None: it has none.
    """
    if batch_update is None:
        return False
    changed = False
    for index in batch_update.removed:
        changed |= state.pop(index, None) is not None
    for index, params, prompt_ids, output_ids in batch_update.added:
        changed |= state.pop(index, None) is not None
        entry = new_state(params, prompt_ids, output_ids)
        if entry is not None:
            state[index], changed = entry, True
    for source, target, directionality in batch_update.moved:
        moving, displaced = state.pop(source, None), state.pop(target, None)
        changed |= moving is not None or displaced is not None
        if moving is not None:
            state[target] = moving
        if displaced is not None and directionality is MoveDirectionality.SWAP:
            state[source] = displaced
    return changed


@dataclass(slots=True)
class _Request:
    """A resident request as a processor gets to know it."""

    params: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]
    is_awaiting: bool = False  # a token was sampled that is not in `output_ids` yet


@dataclass(slots=True)
class _Batch:
    """Who was where in the last step."""

    rows: list[int] = field(default_factory=list)
    requests: list[_Request] = field(default_factory=list)


class CustomProcessor(builtin.LogitsProcessor):
    """A user's processor as a member of the worker's chain."""

    def __init__(self, inner: LogitsProcessor):
        super().__init__()
        self.inner = inner
        self._is_argmax_invariant = bool(inner.is_argmax_invariant())
        self._requests: dict[int, _Request] = {}  # by permanent row
        self._last = _Batch()

    def add_row(self, row: int, new: NewRow) -> None:
        if isinstance(self.inner, AdapterLogitsProcessor):
            # Asked here so that a fault is this request's, and a batch without users keeps the short path.
            if self.inner.new_req_logits_processor(new.sampling_params) is None:
                return
        elif self._is_argmax_invariant and new.sampling_params.is_greedy:
            return
        num_prompt = new.num_prompt_tokens
        self._requests[row] = _Request(new.sampling_params, new.token_ids[:num_prompt], new.token_ids[num_prompt:])
        self.rows.add(row)

    def remove_row(self, row: int) -> None:
        super().remove_row(row)
        self._requests.pop(row, None)

    def apply(self, logits: torch.Tensor, step: ProcessorStep) -> None:
        self._learn_tokens(step)
        users = [i for i, row in enumerate(step.rows_cpu) if row in self.rows]
        self.inner.update_state(self._update([step.rows_cpu[i] for i in users]))
        for request in self._last.requests:
            request.is_awaiting = True
        is_all = len(users) == len(step.rows_cpu)
        index = None if is_all else torch.tensor(users, device=logits.device)
        before = logits if index is None else logits[index]
        after, errors = self._call(before)
        if index is not None:
            logits[index] = after
        elif after is not logits:
            logits.copy_(after)
        if errors:
            raise RowsFailedError({users[i]: message for i, message in errors.items()})

    def _call(self, logits: torch.Tensor) -> tuple[torch.Tensor, dict[int, str]]:
        """(changed logits, errors by index); logits of requests in error mean nothing."""
        if not self._is_argmax_invariant:
            return self._apply_inner(logits)
        temperatures = [request.params.temperature or 1.0 for request in self._last.requests]
        scale = torch.tensor(temperatures, dtype=logits.dtype, device=logits.device)[:, None]
        after, errors = self._apply_inner(logits / scale)
        return after * scale, errors

    def _apply_inner(self, logits: torch.Tensor) -> tuple[torch.Tensor, dict[int, str]]:
        try:
            after = self.inner.apply(logits)
        except RowsFailedError as error:
            return logits, error.errors  # the adapter changes the others in place
        if not isinstance(after, torch.Tensor) or after.shape != logits.shape:
            got = tuple(after.shape) if isinstance(after, torch.Tensor) else type(after).__name__
            raise ValueError(f"apply must return logits of shape {tuple(logits.shape)}, not {got}")
        return after, {}

    def _learn_tokens(self, step: ProcessorStep) -> None:
        """Append what the step before sampled; steps run one at a time where there are custom processors."""
        waiting = [i for i, row in enumerate(step.rows_cpu) if row in self.rows and self._requests[row].is_awaiting]
        if not waiting:
            return
        latest = step.token_ids[step.rows.long(), (step.seq_lens - 1).long()].tolist()
        for i in waiting:
            request = self._requests[step.rows_cpu[i]]
            request.output_ids.append(latest[i])
            request.is_awaiting = False

    def _update(self, rows: list[int]) -> BatchUpdate | None:
        """How the batch of these rows differs from the last."""
        last = self._last
        requests = [self._requests[row] for row in rows]
        if len(requests) == len(last.requests) and all(
            now is before for now, before in zip(requests, last.requests, strict=True)
        ):
            return None
        self._last = _Batch(rows, requests)
        staying = {id(request) for request in requests}
        at: dict[int, _Request] = {i: request for i, request in enumerate(last.requests) if id(request) in staying}
        removed = [i for i in range(len(last.requests)) if i not in at]
        known = {id(request) for request in at.values()}
        added: list[AddedRequest] = []
        for target, request in enumerate(requests):
            if id(request) in known:
                continue
            index = target if target not in at else next(i for i in range(len(at) + 1) if i not in at)
            at[index] = request
            added.append((index, request.params, request.prompt_ids, request.output_ids))
        return BatchUpdate(len(requests), removed, added, _moves(at, requests))


def _moves(at: dict[int, _Request], wanted: list[_Request]) -> list[MovedRequest]:
    """Moves that bring the requests `at` their indices to those they have in `wanted`; `at` follows."""
    moves: list[MovedRequest] = []
    where = {id(request): index for index, request in at.items()}
    for target, request in enumerate(wanted):
        source = where[id(request)]
        if source == target:
            continue
        displaced = at.pop(target, None)
        at[target] = at.pop(source)
        where[id(request)] = target
        if displaced is not None:
            at[source] = displaced
            where[id(displaced)] = source
        moves.append(
            (source, target, MoveDirectionality.UNIDIRECTIONAL if displaced is None else MoveDirectionality.SWAP)
        )
    return moves


def _num_positional(function: Callable[..., Any]) -> int:
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in kinds for parameter in signature(function).parameters.values())


def make_custom_processors(config: EngineConfig, device: torch.device) -> list[CustomProcessor]:
    """Load and make the processors of the configuration. ConfigError names the one that cannot be."""
    return [CustomProcessor(_make(name, config, device)) for name in config.model.logits_processors]


def _make(name: str, config: EngineConfig, device: torch.device) -> LogitsProcessor:
    try:
        cls = load_class(name)
    except Exception as error:
        raise ConfigError(
            f"the logits processor {name} cannot be loaded: {error}.", param="logits_processors"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, LogitsProcessor)):
        raise ConfigError(
            f"the logits processor {name} is not a subclass of octavo.LogitsProcessor.", param="logits_processors"
        )
    try:
        return cls(config, device, device.type == "cuda")
    except Exception as error:
        raise ConfigError(
            f"the logits processor {name} cannot be made: {type(error).__name__}: {error}.", param="logits_processors"
        ) from error


def validate_params(processors: Sequence[CustomProcessor], params: SamplingParams) -> None:
    """Ask every processor whether it can take a request. ClientError carries its objection."""
    for processor in processors:
        try:
            processor.inner.validate_params(params)
        except ValueError as error:
            raise ClientError(str(error), param="extra_args") from error
