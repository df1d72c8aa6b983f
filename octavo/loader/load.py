"""`load_model`: fills a built model from a checkpoint, with a ledger.

The model comes with its parameters allocated (on the device, or on `meta`: then they are allocated here, one by one)
and with the tables described in names.py; `tied` maps a parameter to the one it shares when the checkpoint lacks it.
A parameter may carry `weight_loader(parameter, tensor, shard)`, which copies a checkpoint tensor (whole, or as part
`shard` of a packed module) into its place and raises LoadError with both shapes when it does not fit; without one,
the tensor must have the parameter's shape exactly. One with `block_loader(parameter, blocks, ggml_type, shard)` gets
a GGUF file's quantised blocks undecoded. One with `is_optional` may be missing from the checkpoint. What a layer does
to its weights afterwards is not done here.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from octavo.config.engine import LoadConfig
from octavo.errors import LoadError
from octavo.loader.dummy import fill_dummy
from octavo.loader.find import WeightFiles, find_weights
from octavo.loader.gguf import GGUFTensor, open_gguf_tensors
from octavo.loader.gguf_file import forget_gguf
from octavo.loader.ledger import Ledger
from octavo.loader.names import KV_CACHE_SCALES, NameTables, Target
from octavo.loader.parameters import Parameters, block_loader, weight_loader
from octavo.loader.safetensors_file import open_safetensors
from octavo.loader.torch_file import open_torch
from octavo.logger import get_logger

logger = get_logger(__name__)

_FLOAT16_MAX = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class LoadReport:
    """What was loaded, from where, in what time."""

    load_format: str
    files: tuple[Path, ...]
    num_tensors: int  # read from the checkpoint
    checkpoint_bytes: int
    parameter_bytes: int  # what the model's parameters and persistent buffers take
    seconds: float
    ignored: list[str] = field(default_factory=list)  # checkpoint tensors known to be of no use
    shared: dict[str, str] = field(default_factory=dict)  # parameter → the one it shares


class StoredTensor(Protocol):
    """A tensor of a checkpoint that has not been read yet: what every format yields."""

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> Path: ...
    @property
    def num_bytes(self) -> int: ...
    def read(self, dtype: torch.dtype, device: torch.device) -> Tensor: ...
    def release(self) -> None: ...


def load_model(
    model: nn.Module,
    load_config: LoadConfig,
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> LoadReport:
    """Fill `model` from the checkpoint at `path`; LoadError with every problem when it does not fit.

    `dtype` is what quantised blocks are decoded to on their way; a parameter keeps the dtype it was built with.
    `seed` is that of the random weights of load_format "dummy".
    """
    started = time.perf_counter()
    parameters = Parameters(model, device, dict(getattr(model, "tied", {})))
    weights = find_weights(path, load_config.load_format)
    if weights.load_format == "dummy":
        shared = _fill_with_dummies(parameters, seed)
        ledger, checkpoint_bytes = Ledger(), 0
    else:
        loading = _Loading(model, parameters, dtype, device)
        with torch.no_grad():
            checkpoint_bytes = loading.run(_with_progress(weights, load_config.use_tqdm))
            loading.check_index(weights)
            shared = loading.settle_ties()
        loading.check_missing()
        ledger = loading.ledger
        ledger.raise_problems(path, type(model).__name__)
        forget_gguf()
    _check_buffers(model)
    distinct = {id(place.tensor): place.tensor for place in parameters.places.values()}
    report = LoadReport(
        load_format=weights.load_format,
        files=weights.files,
        num_tensors=len(ledger.seen),
        checkpoint_bytes=checkpoint_bytes,
        parameter_bytes=sum(
            tensor.numel() * tensor.element_size() + getattr(tensor, "packed_bytes", 0) for tensor in distinct.values()
        ),
        seconds=time.perf_counter() - started,
        ignored=ledger.ignored,
        shared=shared,
    )
    if weights.load_format == "dummy":
        logger.info("Filled %.2f GB of parameters with random weights.", report.parameter_bytes / 1e9)
        return report
    logger.info(
        "Loaded %d tensors (%.2f GB, %s) from %s in %.2f s; parameters take %.2f GB.",
        report.num_tensors,
        checkpoint_bytes / 1e9,
        report.load_format,
        path,
        report.seconds,
        report.parameter_bytes / 1e9,
    )
    return report


def stored_tensors(weights: WeightFiles) -> Iterator[StoredTensor]:
    """The tensors of all files, in order, each file opened when its turn comes."""
    if weights.load_format == "gguf":
        yield from open_gguf_tensors(weights.files)
        return
    for file in weights.files:
        yield from open_safetensors(file) if weights.load_format == "safetensors" else open_torch(file)


class _Loading:
    """One load in progress."""

    def __init__(self, model: nn.Module, parameters: Parameters, dtype: torch.dtype, device: torch.device):
        self.model = model
        self.parameters = parameters
        self.dtype = dtype
        self.device = device
        self.ledger = Ledger()
        self.tables = NameTables(
            getattr(model, "packing", {}),
            {**getattr(model, "renames", {}), **KV_CACHE_SCALES},
            getattr(model, "ignored", ()),
        )
        self.remap = getattr(model, "remap", None)

    def run(self, tensors: Iterable[StoredTensor]) -> int:
        """Put every tensor in its place; returns the bytes read."""
        num_bytes = 0
        for stored in tensors:
            if not self.ledger.see(stored.name, stored.file.name):
                continue
            if self.tables.is_ignored(stored.name):
                self.ledger.ignored.append(stored.name)
                continue
            self._load(stored)
            stored.release()
            num_bytes += stored.num_bytes
        return num_bytes

    def _load(self, stored: StoredTensor) -> None:
        try:
            if self._load_blocks(stored):
                return
            tensor = stored.read(self.dtype, self.device)
        except LoadError as error:
            self.ledger.problem("unreadable", f"{stored.name}: {error}")
            return
        name = self.tables.rename(stored.name)
        pairs: Iterable[tuple[str, Tensor]] = [(name, tensor)] if self.remap is None else self.remap(name, tensor)
        for place, part in pairs:
            self._place(place, part, stored.name)

    def _target(self, name: str) -> Target | None:
        """Where a (renamed) tensor goes."""
        return next((t for t in self.tables.candidates(name) if t.name in self.parameters), None)

    def _load_blocks(self, stored: StoredTensor) -> bool:
        """Hand quantised blocks to a parameter that wants them as they are; False where none does."""
        if not isinstance(stored, GGUFTensor) or stored.block_type is None:
            return False
        name = self.tables.rename(stored.name)
        target = self._target(name)
        if target is None or block_loader(self.parameters.places[target.name].tensor) is None:
            return False
        blocks = stored.raw()
        # A model that changes the tensor, or cuts it up, needs numbers.
        pairs = [(name, blocks)] if self.remap is None else list(self.remap(name, blocks))
        if len(pairs) != 1 or pairs[0][0] != name or pairs[0][1] is not blocks:
            return False
        if not self.ledger.fill(target.name, target.shard, stored.name):
            return True
        place = self.parameters.writable(target.name)
        load = block_loader(place)
        assert load is not None
        try:
            load(place, blocks, stored.block_type, target.shard)
        except ValueError as error:
            self.ledger.problem("misshapen", f"{stored.name} for {target.name}: {error}")
        return True

    def _place(self, name: str, tensor: Tensor, source: str) -> None:
        target = self._target(name)
        if target is None:
            shown = source if source == name else f"{source} (as {name})"
            self.ledger.problem("unused", f"{shown} {_shape(tensor)}: the model has no place for it")
            return
        if not self.ledger.fill(target.name, target.shard, source):
            return
        place = self.parameters.writable(target.name)
        problem = _unfit(place, tensor)
        if problem is None:
            problem = _copy(place, tensor, target.shard)
        if problem is not None:
            self.ledger.problem("misshapen", f"{source} for {target.name}: {problem}")

    def check_index(self, weights: WeightFiles) -> None:
        """Hold the index of a sharded checkpoint against what its files hold."""
        for name, file in weights.weight_map.items():
            actual = self.ledger.seen.get(name)
            if actual is None:
                self.ledger.problem("missing", f"{name}: the index places it in {file}, which lacks it")
            elif actual != file:
                self.ledger.problem("misplaced", f"{name}: the index places it in {file}, it is in {actual}")
        if weights.weight_map:
            unlisted = [name for name in self.ledger.seen if name not in weights.weight_map]
            if unlisted:
                logger.warning("The index of the checkpoint does not list: %s.", ", ".join(unlisted[:20]))

    def settle_ties(self) -> dict[str, str]:
        """Share what the checkpoint has once, or twice but equal; returns the names shared and with what."""
        shared: dict[str, str] = {}
        for tie in self.parameters.ties:
            has_name, has_target = self.ledger.is_filled(tie.name), self.ledger.is_filled(tie.target)
            if has_name and has_target:
                one, other = (self.parameters.places[name].tensor for name in (tie.name, tie.target))
                if not _equal(one, other):
                    logger.warning("The checkpoint's %s differs from %s; both are used.", tie.name, tie.target)
                    continue
            if has_target:
                self.parameters.share(tie.name, tie.target)
                shared[tie.name] = tie.target
            elif has_name:
                self.parameters.share(tie.target, tie.name)
                shared[tie.target] = tie.name
        return shared

    def check_missing(self) -> None:
        """Enter every place, and every part of a packed one, that nothing filled."""
        tied_to = {tie.name: tie.target for tie in self.parameters.ties}
        tied_to |= {tie.target: tie.name for tie in self.parameters.ties}
        for name, place in self.parameters.places.items():
            if getattr(place.tensor, "is_optional", False):
                continue
            filled = self.ledger.filled.get(name, set())
            if None in filled or (name in tied_to and self.ledger.is_filled(tied_to[name])):
                continue
            parts = self.tables.parts(name)
            missing = [part for shard, part in enumerate(parts) if shard not in filled]
            if parts and filled and missing:
                self.ledger.problem("missing", f"{', '.join(missing)} of {name}: not in the checkpoint")
            elif not filled:
                made_of = f", made of {', '.join(parts)}" if parts else ""
                self.ledger.problem("missing", f"{name} {_shape(place.tensor)}{made_of}: not in the checkpoint")


def _copy(place: Tensor, tensor: Tensor, shard: int | None) -> str | None:
    """Copy a tensor into its place; says what does not fit, if it does not."""
    loader = weight_loader(place)
    if loader is not None:
        try:
            loader(place, tensor, shard)
        except torch.OutOfMemoryError:
            raise
        except (LoadError, RuntimeError, ValueError, IndexError) as error:
            return f"{_shape(tensor)} into {_shape(place)}: {error}"
    elif shard is not None:
        return f"it is part {shard} of a packed parameter, which has no weight_loader"
    elif place.shape != tensor.shape:
        return f"{_shape(tensor)} in the checkpoint, {_shape(place)} in the model"
    else:
        place.copy_(tensor)
    return None


def _unfit(place: Tensor, tensor: Tensor) -> str | None:
    """Why the numbers of a tensor cannot be kept in the dtype of its place, if they cannot."""
    if place.is_floating_point() != tensor.is_floating_point():
        return f"{tensor.dtype} in the checkpoint, {place.dtype} in the model"
    narrows = place.dtype == torch.float16 and tensor.dtype.itemsize >= 2 and tensor.dtype != torch.float16
    if narrows and tensor.numel():
        low, high = (float(bound) for bound in torch.aminmax(tensor))
        if max(-low, high) > _FLOAT16_MAX:
            return f"values up to {max(-low, high):.4g} do not fit float16; use bfloat16 or float32"
    return None


def _equal(one: Tensor, other: Tensor) -> bool:
    if block_loader(one) is not None:
        return one is other
    return one is other or (one.shape == other.shape and torch.equal(one, other))


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _check_buffers(model: nn.Module) -> None:
    """Tables that a model computes for itself cannot come from a checkpoint; on `meta` they would be garbage."""
    unset = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if unset:
        raise LoadError(f"{type(model).__name__} has tables without values on the meta device: {', '.join(unset)}.")


def _fill_with_dummies(parameters: Parameters, seed: int) -> dict[str, str]:
    """Random weights everywhere; what is tied is shared."""
    shared = {tie.name: tie.target for tie in parameters.ties}
    with torch.no_grad():
        for name in parameters.places:
            if name not in shared:
                fill_dummy(parameters.writable(name), name, seed)
    for name, target in shared.items():
        parameters.share(name, target)
    return shared


def _with_progress(weights: WeightFiles, use_tqdm: bool) -> Iterator[StoredTensor]:
    """The tensors of all files, under a progress bar in bytes when stderr is a terminal."""
    if not use_tqdm:
        yield from stored_tensors(weights)
        return
    from tqdm import tqdm  # only here: an interactive start pays for it

    total = sum(file.stat().st_size for file in weights.files)
    # disable=None: shown on a terminal only.
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=None, leave=False) as bar:
        for stored in stored_tensors(weights):
            yield stored
            bar.update(stored.num_bytes)
