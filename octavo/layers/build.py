"""From a model's class to a model with weights: build the tree, attach methods by path, let them create the weights."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import nn

from octavo.layers.attention.cross import CrossAttention
from octavo.layers.attention.layer import PagedAttention
from octavo.layers.attention.mla import LatentAttention
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear, LinearMethod
from octavo.layers.moe.experts import Experts

ModelT = TypeVar("ModelT", bound=nn.Module)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch's default dtype for the block's duration."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def materialise(
    make: Callable[[], ModelT],
    method_for: Callable[[str, Linear | Embedding | Experts], LinearMethod],
    dtype: torch.dtype,
    device: torch.device | str,
) -> ModelT:
    """Run `make()` and give every linear in the tree its method and its empty weights, on `device` in `dtype`; methods
    that keep embeddings in their format take those over.

    `method_for(path, layer)` chooses the method by the layer's dotted path.
    """
    with torch.device(device), default_dtype(dtype):
        model = make()
        for path, layer in model.named_modules():
            if isinstance(layer, Linear):
                method = method_for(path, layer)
                layer.method = method.for_numbers() if layer.reads_numbers else method
                layer.method.create_weights(layer)
            elif isinstance(layer, Experts):
                layer.method = method_for(path, layer).for_experts()
                layer.method.create_weights(layer)
            elif isinstance(layer, Embedding):
                method_for(path, layer).create_table(layer)
    return model.eval()


def process_after_loading(model: nn.Module) -> None:
    """Let every linear's and embedding's method finish its weights, and attention its scales."""
    for layer in model.modules():
        if isinstance(layer, PagedAttention):
            layer.process_after_loading()
        if isinstance(layer, (Linear, Experts)):
            layer.method.process_after_loading(layer)  # type: ignore[arg-type]
        elif isinstance(layer, Embedding) and layer.method is not None:
            layer.method.process_table_after_loading(layer)


def attention_layers(model: nn.Module) -> dict[str, PagedAttention | LatentAttention | CrossAttention]:
    """The layers with pages in the KV cache by path, in the order of the tree."""
    kinds = (PagedAttention, LatentAttention, CrossAttention)
    return {name: m for name, m in model.named_modules() if isinstance(m, kinds)}
