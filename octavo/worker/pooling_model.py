"""From a native model to one that pools: a decoder loses its output head, and gets the one its vectors or classes come from."""

import re
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from octavo.config.engine import LoadConfig, PoolingConfig
from octavo.config.hf import HFConfig
from octavo.errors import ConfigError
from octavo.layers.attention.encoder import EncoderAttention
from octavo.layers.attention.layer import PagedAttention
from octavo.layers.build import attention_layers
from octavo.layers.causal_lm import CausalLM
from octavo.layers.embedding import LMHead
from octavo.layers.pooler import Dense, Encoder, float32_linear
from octavo.loader import load_model


def pooling_class(make: Callable[[HFConfig], Any], config: PoolingConfig) -> Callable[[HFConfig], Any]:
    """What builds the model; its arguments and tables are those of `make`."""

    def build(cfg: HFConfig) -> Any:
        # What a causal model's file refuses is done to it below.
        model = make(HFConfig({**cfg.data, "use_bidirectional_attention": False}))
        if isinstance(model, CausalLM):
            _adapt_decoder(model, cfg, config)
        elif config.label_token_ids or config.is_bidirectional:
            raise ConfigError(
                f"{cfg.architecture} is an encoder: it has no token logits, and looks both ways by itself."
            )
        if isinstance(model, (CausalLM, Encoder)) and config.tasks[0].endswith("classify") and model.classifier is None:
            raise ConfigError(
                f"{cfg.architecture} has no classifier; convert=classify is for decoders.", param="convert"
            )
        return model

    return build


def _adapt_decoder(model: CausalLM, cfg: HFConfig, config: PoolingConfig) -> None:
    model.classifier = model.projection = None
    if config.is_bidirectional:
        _look_both_ways(model)
    if config.label_token_ids:
        model.classifier = _TokenLogits(model.lm_head, config.label_token_ids)
    else:
        del model.lm_head
        model.ignored = (*model.ignored, r"^lm_head\.")
        model.tied = {}
        if config.tasks[0].endswith("classify"):
            model.classifier = _classifier(cfg, len(config.labels))
    model.renames = {r"^score\.": "classifier.", **_whole_names(model), **model.renames}


def _classifier(cfg: HFConfig, num_labels: int) -> nn.Module:
    if cfg.architecture.endswith("RewardModel"):
        return nn.Sequential(
            float32_linear(cfg.hidden_size, cfg.hidden_size), nn.ReLU(), float32_linear(cfg.hidden_size, num_labels)
        )
    return float32_linear(cfg.hidden_size, num_labels, bias=cfg.architecture.endswith("ForTokenClassification"))


def _whole_names(model: nn.Module) -> dict[str, str]:
    """Checkpoints of bare models (`Qwen3Model`) leave out the name under which a causal model holds them."""
    renames = {}
    for base, module in model.named_children():
        parts = "|".join(re.escape(name) for name, _ in module.named_children())
        if base != "classifier" and parts:
            renames[rf"^(?=({parts})\.)"] = f"{base}."
    return renames


def _look_both_ways(model: nn.Module) -> None:
    for path, layer in attention_layers(model).items():
        if not isinstance(layer, PagedAttention):
            raise ConfigError("latent attention in both directions is not supported.")
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, EncoderAttention.in_place_of(layer))


class _TokenLogits:
    """A classifier made of rows of the output head: for each class, the logit of one token; two tokens are one class, the
    second against the first (so that its sigmoid is the softmax of the two).
    """

    def __init__(self, lm_head: LMHead, token_ids: list[int]):
        self._head, self._ids = lm_head, token_ids
        self._rows: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._rows is None:
            self._rows = cast(torch.Tensor, self._head.weight)[self._ids].float()
        logits = x @ self._rows.T
        return logits[:, 1:] - logits[:, :1] if len(self._ids) == 2 else logits


def load_dense(config: PoolingConfig, device: torch.device) -> nn.Sequential | None:
    """The projections of sentence-transformers, from their own folders."""
    if not config.dense:
        return None
    layers = []
    for told in config.dense:
        layer = Dense(told.in_features, told.out_features, told.bias, told.activation).to(device)
        load_model(layer, LoadConfig("auto", use_tqdm=False), told.folder, dtype=torch.float32, device=device)
        layers.append(layer)
    return nn.Sequential(*layers)
