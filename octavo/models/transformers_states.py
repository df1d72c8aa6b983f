"""Recurrent layers of transformers' models (Mamba, gated delta rule, short convolutions, …) in ragged batches.

All of them talk to one interface of transformers' cache: a layer asks it for its states, convolution's and recurrence's, and
hands the new ones back; a chunk goes on from the states it finds. So no architecture is known here. `watch_states` follows one
pass on the meta device to learn which modules these are and what they keep; at run time each of them is called once a
request, or once for all requests where each has one token, with the request's states put into the cache before.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from octavo.errors import ConfigError
from octavo.layers.ssm.state import RowState

CONV, RECURRENT = "conv_states", "recurrent_states"


@dataclass(frozen=True)
class RecurrentLayer:
    """A module that keeps states: where it is, and which of the cache's tensors are its own."""

    path: str
    layer_idx: int
    states: tuple[tuple[str, int], ...]  # (CONV or RECURRENT, number)
    layout: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def make_state(self, meta_dtype: torch.dtype, dtype: torch.dtype) -> RowState:
        """Room for its states; those in the pass's data type are kept in the model's."""
        return RowState([(shape, dtype if kept is meta_dtype else kept) for shape, kept in self.layout])


def keeps_states(config: Any) -> bool:
    """Whether some layers of a model are recurrent."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers)


class StatesOnly(DynamicCache):
    """A cache of recurrent states alone: keys and values are the attention function's business."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class _Watching(StatesOnly):
    """Notes the innermost module at work when states arrive."""

    def __init__(self, config: Any):
        super().__init__(config=config)
        self.stack: list[str] = []
        self.owners: dict[str, int] = {}

    def update_conv_state(self, conv_states, layer_idx, *args, **kwargs):
        self.owners[self.stack[-1]] = layer_idx
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states, layer_idx, *args, **kwargs):
        self.owners[self.stack[-1]] = layer_idx
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)


@contextlib.contextmanager
def watch_states(model: nn.Module, config: Any) -> Iterator[_Watching]:
    """A cache to give to a pass on the meta device; `recurrent_layers` reads off what it saw."""
    cache = _Watching(config)
    hooks = []
    for path, module in model.named_modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            hooks.append(module.register_forward_pre_hook(lambda *_, path=path: cache.stack.append(path)))
            hooks.append(module.register_forward_hook(lambda *_: cache.stack.pop() and None))
    try:
        yield cache
    finally:
        for hook in hooks:
            hook.remove()


def recurrent_layers(cache: _Watching) -> list[RecurrentLayer]:
    """The modules that kept states in the pass."""
    found = []
    for path, layer_idx in cache.owners.items():
        layer = cache.layers[layer_idx]
        tensors = {
            (kind, number): tensor
            for kind in (CONV, RECURRENT)
            for number, tensor in getattr(layer, kind).items()
            if tensor is not None
        }
        layout = tuple((tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors.values())
        found.append(RecurrentLayer(path, layer_idx, tuple(tensors), layout))
    return found


class RequestwiseForward:
    """Stands in for a module's `forward`, and has each request of a batch go on from its own states."""

    def __init__(self, module: nn.Module, layer: RecurrentLayer, state: RowState, cache: StatesOnly, hidden_size: int):
        self._original = module.forward
        self._layer, self._state, self._cache = layer, state, cache
        self._place: Any = cache.layers[layer.layer_idx]
        has_recurrence = any(kind == RECURRENT for kind, _ in layer.states)
        if has_recurrence and not self._goes_on_by_chunks(module, hidden_size):
            raise ConfigError(f"{type(module).__name__} begins every chunk from nothing, so prompts cannot be cut.")

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        def recurrence(inputs: torch.Tensor, states: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
            self._set(states)
            out = self._original(inputs, *args, **kwargs)
            return out, [getattr(self._place, kind)[number] for kind, number in self._layer.states]

        return self._state.run(recurrence, hidden_states[0])[None]

    def _set(self, states: Sequence[torch.Tensor]) -> None:
        for (kind, number), tensor in zip(self._layer.states, states, strict=True):
            getattr(self._place, kind)[number] = tensor
            getattr(self._place, f"is_{kind}_initialized")[number] = True
            self._place.has_previous_state[number] = True
            if kind == CONV:
                self._place.conv_kernel_size[number] = tensor.shape[-1]

    @torch.inference_mode()
    def _goes_on_by_chunks(self, module: nn.Module, hidden_size: int) -> bool:
        """Whether a chunk goes on from the recurrent states it finds, as one token always does: some scans start from
        nothing.

        Found out by trying: two tokens after states of zeros and of ones.
        """
        weight = next(module.parameters())
        inputs = torch.randn(1, 2, hidden_size, generator=torch.Generator().manual_seed(0)).to(weight)
        outs = []
        for start in (0.0, 1.0):
            states = [torch.zeros(1, *shape, dtype=dtype, device=weight.device) for shape, dtype in self._state.layout]
            for (kind, _), state in zip(self._layer.states, states, strict=True):
                state.fill_(start if kind == RECURRENT else 0.0)
            self._set(states)
            out = self._original(inputs, cache=self._cache)
            if not isinstance(out, torch.Tensor):
                raise ConfigError(f"{type(module).__name__} gives more than hidden states, which cannot be batched.")
            outs.append(out)
        return not torch.equal(*outs)
