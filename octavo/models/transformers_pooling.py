"""Every other architecture that makes vectors or classes: transformers' own module, one request at a time.

Its attention, its masks, its positions and its heads are used as they are, so whatever transformers can load runs and is
right; it computes no two requests in one call, and is as fast as that.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.context import get_step_context
from octavo.errors import ConfigError, LoadError
from octavo.layers.build import default_dtype
from octavo.layers.linear import Linear, LinearMethod
from octavo.layers.pooler import Encoder

# How an architecture's name ends -> the class that loads it, and what its `forward` is read for.
_AUTO_CLASSES = {
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "logits"),
    "ForTokenClassification": ("AutoModelForTokenClassification", "logits"),
}


class TransformersPooling(Encoder):
    """Gives the last hidden states [tokens, hidden]; of a classifier, its logits: a row a token, or a row a request."""

    def __init__(self, cfg: HFConfig):
        super().__init__()
        import transformers

        if cfg.model_type not in transformers.CONFIG_MAPPING:
            raise ConfigError(
                f"model_type={cfg.model_type!r} ({cfg.architecture}) is known neither to Octavo nor to the installed "
                "transformers; a newer transformers may know it."
            )
        data = {key: value for key, value in cfg.data.items() if key not in ("max_model_len", "num_labels")}
        self.hf_config = transformers.CONFIG_MAPPING[cfg.model_type].from_dict(data)
        suffix = next((name for name in _AUTO_CLASSES if cfg.architecture.endswith(name)), None)
        name, self._output = _AUTO_CLASSES[suffix] if suffix is not None else ("AutoModel", "last_hidden_state")
        self._auto_class: Any = getattr(transformers, name)
        self.pools_texts = suffix == "ForSequenceClassification"
        self.has_token_types = int(cfg.get("type_vocab_size", 0)) > 1
        if suffix is not None:
            self.classifier = nn.Identity()
        self.hf_model: Any = None

    def load_checkpoint(
        self,
        path: str,
        load_format: str,
        method_for: Callable[[str, Linear], LinearMethod],
        dtype: torch.dtype,
        device: torch.device,
    ) -> str:
        """Load the weights through transformers; returns a sentence for the log. LoadError where tensors are missing."""
        started = time.perf_counter()
        if load_format == "dummy":
            with torch.device(device), default_dtype(dtype):
                self.hf_model = self._auto_class.from_config(self.hf_config)
        elif load_format == "gguf":
            raise ConfigError(
                f"{self.hf_config.model_type} is loaded by transformers, from safetensors, not from GGUF."
            )
        else:
            self.hf_model, info = self._auto_class.from_pretrained(
                path, config=self.hf_config, dtype=dtype, output_loading_info=True, local_files_only=True
            )
            # A head that was trained for something else is left over; the pooler of BERT's kind is not read here.
            missing = [name for name in info["missing_keys"] if self.classifier is not None or "pooler" not in name]
            if missing or info["mismatched_keys"]:
                raise LoadError(f"{path} lacks {sorted(map(str, missing)) or info['mismatched_keys']}")
        self.hf_model.eval().requires_grad_(False).to(device)
        return f"transformers, one request at a time: {type(self.hf_model).__name__}, {time.perf_counter() - started:.1f} s"

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        context = get_step_context()
        starts = context.query_start_loc_cpu
        assert starts is not None
        rows = []
        for start, end in itertools.pairwise(starts):
            told = {"input_ids": input_ids[None, start:end]}
            told["attention_mask"] = torch.ones_like(told["input_ids"])
            if context.token_types is not None:
                told["token_type_ids"] = context.token_types[None, start:end]
            rows.append(getattr(self.hf_model(**told, return_dict=True), self._output)[0])
        return torch.stack(rows) if self.pools_texts else torch.cat(rows)
