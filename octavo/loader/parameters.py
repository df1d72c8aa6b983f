"""The parameters of a built model as places to fill by name: allocated when first written, shared when tied.

Persistent buffers count as parameters: a checkpoint holds both. Two names may stand for one parameter, either because
the model was built so or because its `tied` table says so for the case that the checkpoint has only one of them. A
checkpoint that has both, different, gets two parameters.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Place:
    """One name under which a model holds a parameter or persistent buffer."""

    name: str
    owner: nn.Module
    attribute: str

    @property
    def tensor(self) -> Tensor:
        return getattr(self.owner, self.attribute)

    def replace(self, tensor: Tensor) -> None:
        """Make the owner hold another tensor under this name."""
        table = self.owner._parameters if self.attribute in self.owner._parameters else self.owner._buffers
        table[self.attribute] = tensor  # type: ignore[assignment]


@dataclass(frozen=True)
class Tie:
    """`name` holds what `target` holds, unless the checkpoint has both."""

    name: str
    target: str


class Parameters:
    """Every place of a model; see the module's docstring."""

    def __init__(self, model: nn.Module, device: torch.device, tied: dict[str, str]):
        self.device = device
        self.places = {place.name: place for place in _places(model)}
        self.ties = self._find_ties(tied)
        self._written: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.places

    def writable(self, name: str) -> Tensor:
        """The tensor of a place, on its device. A place whose tied one was written before gets a tensor of its own."""
        place = self.places[name]
        tensor = place.tensor
        if tensor.is_meta or (name not in self._written and self._is_written_through_tie(name)):
            place.replace(_like(tensor, self.device))
        self._written.add(name)
        return place.tensor

    def _is_written_through_tie(self, name: str) -> bool:
        tensor = self.places[name].tensor
        pairs = [(tie.name, tie.target) for tie in self.ties] + [(tie.target, tie.name) for tie in self.ties]
        return any(
            one == name and other in self._written and self.places[other].tensor is tensor for one, other in pairs
        )

    def share(self, name: str, with_name: str) -> None:
        """Make `name` hold the tensor of `with_name`."""
        self.places[name].replace(self.places[with_name].tensor)

    def _find_ties(self, tied: dict[str, str]) -> list[Tie]:
        """The model's table, and places that hold the same tensor already."""
        ties = {name: target for name, target in tied.items() if name in self.places and target in self.places}
        first_with: dict[int, str] = {}
        for name, place in self.places.items():
            first = first_with.setdefault(id(place.tensor), name)
            if first != name and ties.get(first) != name:
                ties.setdefault(name, first)
        return [Tie(name, target) for name, target in ties.items()]


def _places(model: nn.Module) -> Iterator[Place]:
    for prefix, module in model.named_modules():
        dot = "." if prefix else ""
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield Place(f"{prefix}{dot}{attribute}", module, attribute)
        for attribute, buffer in module._buffers.items():
            if buffer is not None and attribute not in module._non_persistent_buffers_set:
                yield Place(f"{prefix}{dot}{attribute}", module, attribute)


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    """An unset tensor of the same kind on the device, with the attributes (`weight_loader` …) of the old one."""
    target = device if tensor.is_meta else tensor.device
    fresh: Tensor = torch.empty_like(tensor, device=target)
    if isinstance(tensor, nn.Parameter):
        fresh = type(tensor)(fresh, requires_grad=tensor.requires_grad)
    fresh.__dict__.update(tensor.__dict__)
    return fresh


def weight_loader(tensor: Tensor) -> Callable[[Tensor, Tensor, int | None], Any] | None:
    """The loader that a layer attached to its parameter, if it did."""
    return getattr(tensor, "weight_loader", None)


def block_loader(tensor: Tensor) -> Callable[[Tensor, Tensor, str, int | None], Any] | None:
    """The loader of quantised blocks that a layer attached to its parameter, if it did."""
    return getattr(tensor, "block_loader", None)
