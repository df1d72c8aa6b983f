"""Features that change logits before sampling, each in an object that knows the few rows which use it.

Rows that use none cost nothing. What a processor needs on the device is assembled when the composition of a step changes, not
at every step, and which tokens exist is asked on the device: with two steps in flight the host does not know the latest.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from octavo.errors import ServerError
from octavo.logger import get_logger
from octavo.ops.logits import add_logit_bias, apply_penalties, apply_token_bitmask
from octavo.types.step import NewRow
from octavo.worker.row_params import RowParams
from octavo.worker.rows import upload

logger = get_logger(__name__)


@dataclass(slots=True)
class ProcessorStep:
    """What a processor may look at, besides the logits [num, vocab]."""

    rows_cpu: list[int]  # the permanent row of each row of logits
    rows: torch.Tensor  # the same on the device, [num] int32
    seq_lens: torch.Tensor  # [num] int32: how many tokens the row holds, which is the index of the one to be generated
    token_ids: torch.Tensor  # [max_rows, max_len] int32, by permanent row
    num_prompt: torch.Tensor  # [max_rows] int32, by permanent row


class RowsFailedError(Exception):
    """Raised by a processor that knows whom its fault concerns: index in the step's logits -> what went wrong."""

    def __init__(self, errors: dict[int, str]):
        super().__init__("; ".join(errors.values()))
        self.errors = errors


class LogitsProcessor(ABC):
    """One feature. `rows` holds the permanent rows that use it; `apply` is called when the step has one of them."""

    def __init__(self) -> None:
        self.rows: set[int] = set()

    @abstractmethod
    def add_row(self, row: int, new: NewRow) -> None:
        """Look at a new request and, if it uses the feature, keep what is needed and add `row` to `rows`.

        An exception fails this request alone.
        """

    @abstractmethod
    def apply(self, logits: torch.Tensor, step: ProcessorStep) -> None:
        """Change logits (float32) of the rows that use the feature, in place. Must not wait for the device.

        An exception fails the requests in `rows` alone; a `RowsFailedError` only those it names.
        """

    def remove_row(self, row: int) -> None:
        """Forget a row, whether or not it used the feature."""
        self.rows.discard(row)


class _EntryProcessor(LogitsProcessor):
    """Base of processors that add numbers to single logits: an entry is (token, columns of int32), several a row.

    `self.entries[row]` is an int32 array [n, columns], its first column the token. `_assemble` gives those of a step on the
    device beside the logits row each belongs to, and sends nothing as long as the step has the same rows.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.entries: dict[int, np.ndarray] = {}
        self._assembled_for: list[int] | None = None
        self._indices = self._columns = torch.empty(0)

    def _set_entries(self, row: int, entries: np.ndarray) -> None:
        if len(entries):
            self.entries[row] = entries
            self.rows.add(row)
            self._assembled_for = None

    def remove_row(self, row: int) -> None:
        super().remove_row(row)
        if self.entries.pop(row, None) is not None:
            self._assembled_for = None

    def _assemble(self, rows_cpu: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(indices [n] int64: the entry's row of logits, columns [columns, n] int32)."""
        if self._assembled_for != rows_cpu:
            found = [(i, self.entries[row]) for i, row in enumerate(rows_cpu) if row in self.rows]
            columns = np.concatenate([entries for _, entries in found]).T
            indices = np.repeat([i for i, _ in found], [len(entries) for _, entries in found])
            sent = upload(np.concatenate([indices[None].astype(np.int32), columns]), self.device)
            self._indices, self._columns = sent[0].long(), sent[1:]
            self._assembled_for = list(rows_cpu)
        return self._indices, self._columns


class AllowedTokens(LogitsProcessor):
    """`allowed_token_ids`: every other token is impossible."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__()
        self.vocab_size, self.device = vocab_size, device
        self._bitmasks: dict[int, torch.Tensor] = {}  # row -> [words] int32 on the device
        self._assembled_for: list[int] | None = None
        self._bitmask = self._indices = torch.empty(0)

    def add_row(self, row: int, new: NewRow) -> None:
        allowed = new.sampling_params.allowed_token_ids
        if allowed is None:
            return
        ids = _checked_ids(allowed, self.vocab_size, "allowed_token_ids")
        bits = np.zeros(-(-self.vocab_size // 32) * 32, dtype=np.uint8)
        bits[ids] = 1
        words = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
        self._bitmasks[row] = upload(words, self.device)
        self.rows.add(row)
        self._assembled_for = None

    def remove_row(self, row: int) -> None:
        super().remove_row(row)
        if self._bitmasks.pop(row, None) is not None:
            self._assembled_for = None

    def apply(self, logits: torch.Tensor, step: ProcessorStep) -> None:
        if self._assembled_for != step.rows_cpu:
            found = [(i, self._bitmasks[row]) for i, row in enumerate(step.rows_cpu) if row in self.rows]
            self._bitmask = torch.stack([bitmask for _, bitmask in found])
            self._indices = upload(np.array([i for i, _ in found], dtype=np.int32), self.device)
            self._assembled_for = list(step.rows_cpu)
        apply_token_bitmask(logits, self._bitmask, self._indices)


class BadWords(_EntryProcessor):
    """`bad_words_token_ids`: the last token of a sequence is impossible where the rest has just been generated.

    The rest must lie in the output; a prompt that ends in it forbids nothing. An entry is (last token, length of the rest,
    the rest from its end backwards, padded to the longest of all rows with -1).
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(device)
        self.vocab_size = vocab_size
        self._width = 0  # of the padded rest

    def add_row(self, row: int, new: NewRow) -> None:
        sequences = new.sampling_params.bad_words_token_ids
        if not sequences:
            return
        self._widen(max(len(sequence) for sequence in sequences) - 1)
        entries = np.full((len(sequences), 2 + self._width), -1, dtype=np.int32)
        for entry, sequence in zip(entries, sequences, strict=True):
            ids = _checked_ids(sequence, self.vocab_size, "bad_words_token_ids")
            entry[0], entry[1] = ids[-1], len(ids) - 1
            entry[2 : len(ids) + 1] = ids[-2::-1]
        self._set_entries(row, entries)

    def _widen(self, width: int) -> None:
        if width > self._width:
            pad = ((0, 0), (0, width - self._width))
            self.entries = {row: np.pad(e, pad, constant_values=-1) for row, e in self.entries.items()}
            self._width = width
            self._assembled_for = None

    def apply(self, logits: torch.Tensor, step: ProcessorStep) -> None:
        indices, columns = self._assemble(step.rows_cpu)
        last, length, rest = columns[0], columns[1], columns[2:]
        row, end = step.rows[indices].long(), step.seq_lens[indices]
        is_bad = end - length >= step.num_prompt[row]
        if self._width:
            back = torch.arange(1, self._width + 1, device=self.device)[:, None]
            found = step.token_ids[row, (end - back).clamp(min=0).long()]
            is_bad &= ((found == rest) | (rest < 0)).all(dim=0)
        add_logit_bias(logits, indices, last.long(), torch.where(is_bad, -float("inf"), 0.0))


class MinTokens(_EntryProcessor):
    """`min_tokens`: no id that would end the answer before that many tokens are out. Ids beyond the vocabulary are ignored.

    An entry is (token, number of tokens from which on it is possible). The device decides by the row's length; the host
    counts the row's steps only to drop it, and with it the cost, once it is certainly past.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(device)
        self.vocab_size = vocab_size
        self._steps_left: dict[int, int] = {}

    def add_row(self, row: int, new: NewRow) -> None:
        until = new.num_prompt_tokens + new.sampling_params.min_tokens
        steps = until - len(new.token_ids)
        ids = sorted({i for i in new.stop_token_ids if 0 <= i < self.vocab_size})
        if steps <= 0 or not ids:
            return
        self._steps_left[row] = steps
        self._set_entries(row, np.array([(i, until) for i in ids], dtype=np.int32))

    def remove_row(self, row: int) -> None:
        super().remove_row(row)
        self._steps_left.pop(row, None)

    def apply(self, logits: torch.Tensor, step: ProcessorStep) -> None:
        indices, (token, until) = self._assemble(step.rows_cpu)
        bias = torch.where(step.seq_lens[indices] < until, -float("inf"), 0.0)
        add_logit_bias(logits, indices, token.long(), bias)
        for row in self.rows.intersection(step.rows_cpu):
            self._steps_left[row] -= 1
            if self._steps_left[row] == 0:
                self.remove_row(row)


class LogitBias(_EntryProcessor):
    """`logit_bias`: numbers added to logits. An entry is (token, the float32's bits)."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(device)
        self.vocab_size = vocab_size

    def add_row(self, row: int, new: NewRow) -> None:
        bias = new.sampling_params.logit_bias
        if not bias:
            return
        ids = _checked_ids(bias, self.vocab_size, "logit_bias")
        bits = np.array(list(bias.values()), dtype=np.float32).view(np.int32)
        self._set_entries(row, np.stack([ids, bits], axis=1))

    def apply(self, logits: torch.Tensor, step: ProcessorStep) -> None:
        indices, (token, bits) = self._assemble(step.rows_cpu)
        add_logit_bias(logits, indices, token.long(), bits.view(torch.float32))


class Penalties(LogitsProcessor):
    """`repetition_penalty` over prompt and output, `presence_penalty` and `frequency_penalty` over the output."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        super().__init__()
        self.params = RowParams(
            num_rows,
            device,
            {"repetition": (torch.float32, 1.0), "presence": (torch.float32, 0.0), "frequency": (torch.float32, 0.0)},
        )

    def add_row(self, row: int, new: NewRow) -> None:
        p = new.sampling_params
        if p.repetition_penalty == 1.0 and p.presence_penalty == 0.0 and p.frequency_penalty == 0.0:
            return
        self.params.set(
            row, repetition=p.repetition_penalty, presence=p.presence_penalty, frequency=p.frequency_penalty
        )
        self.rows.add(row)

    def remove_row(self, row: int) -> None:
        if row in self.rows:
            self.params.reset(row)
        super().remove_row(row)

    def apply(self, logits: torch.Tensor, step: ProcessorStep) -> None:
        self.params.flush()
        values = (self.params[name] for name in ("repetition", "presence", "frequency"))
        apply_penalties(logits, step.rows, step.token_ids, step.num_prompt, step.seq_lens, *values)


class ProcessorChain:
    """The processors in their order. A fault in one fails the rows that use it and leaves the others alone."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self.processors = list(processors)

    @classmethod
    def builtin(
        cls, num_rows: int, vocab_size: int, device: torch.device, more: Sequence[LogitsProcessor] = ()
    ) -> "ProcessorChain":
        """Every feature of SamplingParams, then `more`."""
        return cls(
            [
                AllowedTokens(vocab_size, device),
                BadWords(vocab_size, device),
                MinTokens(vocab_size, device),
                LogitBias(vocab_size, device),
                Penalties(num_rows, device),
                *more,
            ]
        )

    def add_row(self, row: int, new: NewRow) -> str | None:
        """Show a new request to every processor; returns what went wrong, if anything did."""
        for processor in self.processors:
            try:
                processor.add_row(row, new)
            except Exception as error:
                logger.exception("%s cannot take request %s", type(processor).__name__, new.request_id)
                self.remove_row(row)
                return f"{type(processor).__name__}: {error}"
        return None

    def remove_row(self, row: int) -> None:
        """Forget a row."""
        for processor in self.processors:
            processor.remove_row(row)

    def active(self, rows_cpu: list[int]) -> list[LogitsProcessor]:
        """The processors that some of these rows use."""
        return [p for p in self.processors if p.rows and not p.rows.isdisjoint(rows_cpu)]

    @staticmethod
    def apply(active: list[LogitsProcessor], logits: torch.Tensor, step: ProcessorStep) -> dict[int, str]:
        """Run the active processors; returns what went wrong, by index in the step."""
        errors: dict[int, str] = {}
        for processor in active:
            users = {i for i, row in enumerate(step.rows_cpu) if row in processor.rows}
            try:
                processor.apply(logits, step)
            except RowsFailedError as error:
                logger.warning("%d of %d requests failed: %s", len(error.errors), len(users), error)
                errors = error.errors | errors
            except Exception as error:
                logger.exception("%s failed", type(processor).__name__)
                errors |= dict.fromkeys(users - errors.keys(), f"{type(processor).__name__}: {error}")
        return errors


def _checked_ids(ids: Iterable[int], vocab_size: int, name: str) -> np.ndarray:
    """Token ids as int32; the front has checked them, an id that would write outside the row must not get further."""
    array = np.array(list(ids), dtype=np.int64)
    if len(array) == 0 or array.min() < 0 or array.max() >= vocab_size:
        raise ServerError(f"{name} must hold token ids from 0 to {vocab_size - 1}; got {array.tolist()}.")
    return array.astype(np.int32)
