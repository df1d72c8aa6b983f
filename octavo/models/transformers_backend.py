"""Every other decoder-only architecture: transformers' own module, with our paged attention, linears and norms put in.

No per-model code. Three seams of transformers carry it:

* its attention interface: "octavo" is registered as an implementation, and finds our layer by the module's `layer_idx`;
  which layers there are, and what each keeps, is read off one pass on the meta device;
* its output head: `logits` runs the model's own `forward` with the decoder replaced by one that returns the chosen hidden
  states, so that soft caps, scales and biases of the head apply;
* its loading: names, conversions and merged experts are transformers' business; what it reports as missing, unexpected or
  misshapen is an error here.
"""

import contextlib
import functools
import inspect
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.errors import ConfigError, LoadError
from octavo.layers.attention.layer import PagedAttention
from octavo.layers.build import default_dtype
from octavo.layers.causal_lm import CausalLM
from octavo.layers.linear import Linear, LinearMethod
from octavo.layers.norm import RMSNorm
from octavo.logger import get_logger

if TYPE_CHECKING:
    from octavo.models.transformers_states import RecurrentLayer

logger = get_logger(__name__)

IMPLEMENTATION = "octavo"
TRACE = "octavo_trace"  # of the pass on the meta device

# What the attention function talks to; one model runs at a time in a process.
_active: "TransformersForCausalLM | None" = None


class TransformersForCausalLM(CausalLM):
    """A transformers causal LM run by the engine. Built on the meta device; `load_checkpoint` brings the real weights."""

    def __init__(self, cfg: HFConfig):
        super().__init__()
        self.hf_config = _transformers_config(cfg)
        layers, self.recurrent = _discover_layers(self.hf_config, cfg.architecture)
        self.paged_index = {layer_idx: index for index, layer_idx in enumerate(layers)}
        self.paged_layers = nn.ModuleList(layers.values())
        states = [layer.make_state(_TRACED, torch.get_default_dtype()) for layer in self.recurrent]
        self.row_states: Any = nn.ModuleList(states)
        self.hf_model: Any = None
        self.decoder_options: dict[str, Any] = {"use_cache": False}
        self.first_position = 0

    def load_checkpoint(
        self,
        path: str,
        load_format: str,
        method_for: Callable[[str, Linear], LinearMethod],
        dtype: torch.dtype,
        device: torch.device,
    ) -> str:
        """Load the weights through transformers and swap our layers in; returns a sentence for the log.

        Raises LoadError naming every tensor that is missing, unexpected or misshapen.
        """
        started = time.perf_counter()
        if load_format == "dummy":
            with torch.device(device), default_dtype(dtype):
                self.hf_model = _auto_class().from_config(self.hf_config)
        elif load_format == "gguf":
            raise ConfigError(
                f"{self.hf_config.model_type} has no native implementation, and GGUF files load into native models only; "
                "use the safetensors checkpoint."
            )
        else:
            self.hf_model, info = _auto_class().from_pretrained(
                path, config=self.hf_config, dtype=dtype, output_loading_info=True, local_files_only=True
            )
            _check_ledger(info, path)
            self.hf_model.to(device)
        self.hf_model.eval().requires_grad_(False)
        swapped = _swap_layers(self.hf_model, method_for)
        self.decoder = _decoder(self.hf_model)
        for module in self.hf_model.modules():
            if getattr(module, "layer_idx", None) in self.paged_index:
                module.paged_index = torch.tensor(self.paged_index[module.layer_idx], device="cpu")
        if self.recurrent:
            from octavo.models.transformers_states import RequestwiseForward, StatesOnly

            self.decoder_options = {"cache": StatesOnly(config=self.hf_config), "use_cache": True}
            for layer, state in zip(self.recurrent, self.row_states, strict=True):
                module = self.decoder.get_submodule(layer.path)
                hidden_size = self.hf_config.get_text_config().hidden_size
                module.forward = RequestwiseForward(module, layer, state, self.decoder_options["cache"], hidden_size)
        self.first_position = _first_position(self.decoder)
        for table in _counting_tables(self.decoder):
            table.forward = functools.partial(self._look_up_positions, table)
        self.head = _Given(self.decoder)
        setattr(self.hf_model, self.hf_model.base_model_prefix, self.head)
        return f"transformers backend: {swapped}, {time.perf_counter() - started:.1f} s"

    def forward(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.positions = positions
        embeds = None if inputs_embeds is None else inputs_embeds[None]
        ids = None if input_ids is None or embeds is not None else input_ids[None]
        with self._serving():
            out = self.decoder(
                input_ids=ids,
                inputs_embeds=embeds,
                position_ids=positions[None] + self.first_position,
                return_dict=True,
                **self.decoder_options,
            )
        return out.last_hidden_state[0]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.decoder.get_input_embeddings()(input_ids)

    def _look_up_positions(self, table: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """In place of a table of positions that counts from the cache's length."""
        return nn.functional.embedding(self.positions + getattr(table, "offset", 0), table.weight)[None]

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.head.hidden_states = hidden_states[None]
        # Where the decoder was, the embeddings are not looked at; some heads look at how many they are.
        return self.hf_model(inputs_embeds=hidden_states[None], use_cache=False, return_dict=True).logits[0]

    @contextlib.contextmanager
    def _serving(self):
        global _active
        previous, _active = _active, self
        try:
            yield
        finally:
            _active = previous


class _Given(nn.Module):
    """Stands where the decoder stood: returns the hidden states it was given."""

    hidden_states: torch.Tensor

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self._replaced = (decoder,)  # in a tuple, so that it is no part of this

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # some heads read the decoder's settings
            return getattr(super().__getattribute__("_replaced")[0], name)

    @property
    def decoder(self) -> "_Given":
        """Some heads call `model.decoder` (OPT)."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> "_Output":
        return _Output(self.hidden_states)


class _Output:
    """A decoder's output as heads read it: the hidden states by name or as item 0, and None for all else."""

    def __init__(self, hidden_states: torch.Tensor):
        self.last_hidden_state = hidden_states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor:
        if index != 0:
            raise IndexError(index)
        return self.last_hidden_state


def _auto_class() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def _decoder(model: Any) -> Any:
    """The part under the head, without its look at the input for padding: there is none, and looking waits for the device."""
    decoder = getattr(model, model.base_model_prefix)
    decoder.warn_if_padding_and_no_attention_mask = lambda *args, **kwargs: None
    return decoder


def _counting_tables(decoder: nn.Module) -> list[Any]:
    """Tables of positions that BART and its likes index by a count of their own."""
    if "position_ids" in inspect.signature(decoder.forward).parameters:
        return []
    found = [m for name, m in decoder.named_modules() if name.rpartition(".")[2] == "embed_positions"]
    return [module for module in found if isinstance(module, nn.Embedding)]


def _first_position(decoder: nn.Module) -> int:
    """The number of the first token: RoBERTa and its likes count from behind the padding token's id."""
    for module in decoder.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return int(module.padding_idx) + 1  # type: ignore[arg-type]
    return 0


def _transformers_config(cfg: HFConfig) -> Any:
    from transformers import CONFIG_MAPPING

    if cfg.model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"model_type={cfg.model_type!r} ({cfg.architecture}) is known neither to Octavo nor to the installed "
            "transformers; a newer transformers may know it."
        )
    data = {k: v for k, v in cfg.data.items() if k not in ("max_model_len", "quantization_config")}
    config = CONFIG_MAPPING[cfg.model_type].from_dict(data)
    config._attn_implementation = IMPLEMENTATION
    _register()
    return config


def _register() -> None:
    from transformers import AttentionInterface

    # No mask function is registered on purpose: transformers then builds no masks.
    AttentionInterface.register(IMPLEMENTATION, _paged)


def _paged(module: Any, query, key, value, attention_mask=None, *, scaling=None, **kwargs: Any):
    """transformers' attention function: query [1, heads, tokens, head_dim] → ([1, tokens, heads, head_dim], None)."""
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    width = v.shape[-1]
    if width < k.shape[-1]:  # latent attention has narrower values; one page holds both
        v = nn.functional.pad(v, (0, k.shape[-1] - width))
    attend = torch.ops.octavo.attend if torch.compiler.is_compiling() else _attend
    return attend(q, k, v, module.paged_index, kwargs.get("s_aux"))[None, ..., :width], None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, index: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention of the paged layer `index`: [tokens, heads, head_dim] each.

    As an operator of torch it is one call to a compiler. The index is a tensor, on the host, so that no layer's number is
    a constant of its code and all layers share it.
    """
    assert _active is not None, "the model runs outside TransformersForCausalLM.forward"
    layer: Any = _active.paged_layers[int(index)]
    layer.sinks = sinks
    return layer.attend(query, key, value).contiguous()


torch.library.custom_op("octavo::attend", _attend, mutates_args=()).register_fake(
    lambda query, key, value, index, sinks: query.new_empty(query.shape)
)


class _Recorder:
    """Collects what each attention layer is, during one pass on the meta device."""

    def __init__(self) -> None:
        self.layers: dict[int, PagedAttention] = {}
        self.masked_windows: set[int] = set()  # which the model would apply by a mask

    def mask(self, *args: Any, local_size: int | None = None, **kwargs: Any) -> None:
        """Stands in for the function that makes masks: notes what they would hide, and makes none."""
        if local_size is not None:
            self.masked_windows.add(local_size)

    def __call__(self, module: Any, query, key, value, attention_mask=None, *, scaling=None, **kwargs: Any):
        if not getattr(module, "is_causal", True):
            raise ConfigError("only causal attention is supported by the transformers backend")
        if attention_mask is not None:
            raise ConfigError(f"{type(module).__name__} computes an attention mask of its own")
        told = {name for name, value in kwargs.items() if isinstance(value, torch.Tensor)} - {"s_aux", "position_ids"}
        if told:
            raise ConfigError(f"{type(module).__name__} gives attention more than it is known to read: {sorted(told)}")
        if module.layer_idx in self.layers or value.shape[1] != key.shape[1] or value.shape[-1] > key.shape[-1]:
            raise ConfigError(f"{type(module).__name__} is not plain attention over one key and value a head")
        self.layers[module.layer_idx] = PagedAttention(
            query.shape[1],
            key.shape[1],
            key.shape[-1],
            scale=scaling,
            window=kwargs.get("sliding_window"),
            softcap=kwargs.get("softcap") or 0.0,
        )
        _, num_heads, num_tokens, _ = query.shape
        return torch.empty(1, num_tokens, num_heads, value.shape[-1], dtype=query.dtype, device="meta"), None


# Of the pass on the meta device: some operators have a meta version for this type alone.
_TRACED = torch.bfloat16


def _discover_layers(config: Any, architecture: str) -> tuple[dict[int, PagedAttention], "list[RecurrentLayer]"]:
    """The paged layers of a model by number, and its recurrent ones, from one pass of two tokens on the meta device.

    Refuses what cannot run, with the reason.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    from octavo.models.transformers_states import keeps_states, recurrent_layers, watch_states

    config._attn_implementation = TRACE
    AttentionInterface.register(TRACE, _paged)
    try:
        with torch.device("meta"), default_dtype(_TRACED):
            model = _auto_class().from_config(config, dtype=_TRACED)
    except KeyError as error:
        raise ConfigError(
            f"{architecture} has its own attention classes and none named {error}, so it cannot be paged."
        ) from error
    if type(model).__name__ != architecture and architecture not in ("?", ""):
        raise ConfigError(
            f"{architecture} is not the causal language model that transformers has for model_type={config.model_type!r} "
            f"({type(model).__name__}); only decoder-only generation is supported."
        )
    if not hasattr(model, model.base_model_prefix):
        raise ConfigError(f"{architecture} keeps its decoder under another name than transformers' models do.")
    decoder = _decoder(model)
    has_states = keeps_states(config)
    if getattr(model, "_is_stateful", False) and not has_states:
        raise ConfigError(f"{architecture} keeps recurrent state in a way of its own, which cannot be batched.")
    recorder, recurrent = _Recorder(), []
    # It reads positions to see whether they are several sequences' in a row, and on the meta device there is nothing to read.
    find_packed, masking_utils.find_packed_sequence_indices = (
        masking_utils.find_packed_sequence_indices,
        lambda ids: None,
    )
    AttentionInterface.register(TRACE, recorder)
    AttentionMaskInterface.register(TRACE, recorder.mask)
    try:
        ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
        if has_states:
            with watch_states(decoder, config) as cache:
                decoder(input_ids=ids, position_ids=ids, cache=cache, use_cache=True, return_dict=True)
            recurrent = recurrent_layers(cache)
        else:
            decoder(input_ids=ids, position_ids=ids, use_cache=False, return_dict=True)
    except ConfigError as error:
        raise ConfigError(f"{architecture} cannot run through the transformers backend: {error}.") from error
    except (NotImplementedError, RuntimeError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{architecture} cannot be traced for the transformers backend: {error}") from error
    finally:
        masking_utils.find_packed_sequence_indices = find_packed
        config._attn_implementation = IMPLEMENTATION
    is_told = "position_ids" in inspect.signature(decoder.forward).parameters or _counting_tables(decoder)
    if recorder.layers and not is_told:
        raise ConfigError(f"{architecture} counts positions by itself, which a batch of chunks cannot follow.")
    hidden = recorder.masked_windows - {layer.window for layer in recorder.layers.values()}
    if hidden:
        raise ConfigError(
            f"{architecture} hides what is outside a window or chunk of {hidden.pop()} tokens by a mask, and does not tell its "
            "attention."
        )
    text = config.get_text_config()
    num_layers = getattr(text, "decoder_layers", text.num_hidden_layers)
    kinds = getattr(text, "layers_block_type", None) or [""] * num_layers
    expected = {index for index, kind in enumerate(kinds) if kind not in ("moe", "mlp")}
    known = set(recorder.layers) | {layer.layer_idx for layer in recurrent}
    if known != expected:
        raise ConfigError(
            f"{architecture} mixes tokens in layers {sorted(expected)}, of which {sorted(known)} attend through "
            "transformers' interface or keep states in its cache; the transformers backend needs all."
        )
    return {i: recorder.layers[i] for i in sorted(recorder.layers)}, recurrent


def _check_ledger(info: dict[str, Any], path: str) -> None:
    problems = []
    for key, meaning in (
        ("missing_keys", "missing from the checkpoint"),
        ("unexpected_keys", "in the checkpoint but not in the model"),
        ("mismatched_keys", "of another shape"),
    ):
        found = sorted(str(k) for k in info.get(key) or ())
        if found:
            problems.append(f"{len(found)} tensors {meaning}: {', '.join(found[:20])}")
    if problems:
        raise LoadError(f"{path} does not fit its model: {'; '.join(problems)}")


def _swap_layers(model: nn.Module, method_for: Callable[[str, Linear], LinearMethod]) -> str:
    """Put our linears and norms in place of torch's; weights are shared, not copied."""
    linears = norms = 0
    module: Any
    for path, module in list(model.named_modules()):
        parent_path, _, name = path.rpartition(".")
        if type(module) is nn.Linear:
            layer = Linear(module.in_features, module.out_features, module.bias is not None)
            layer.method = method_for(path, layer)
            layer.weight, layer.bias = module.weight, module.bias
            setattr(model.get_submodule(parent_path), name, layer)
            linears += 1
        elif type(module).__name__.endswith("RMSNorm") and _is_plain_rms_norm(module):
            norm = RMSNorm(module.weight.shape[0], _epsilon(module))
            norm.weight = module.weight
            setattr(model.get_submodule(parent_path), name, norm)
            norms += 1
    return f"{linears} linears and {norms} norms swapped"


def _epsilon(module: nn.Module) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6)))


@torch.inference_mode()
def _is_plain_rms_norm(module: Any) -> bool:
    """Whether a norm computes what ours does (some add one to the weight, some normalise without one)."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return False
    x = torch.linspace(-2, 3, weight.shape[0], dtype=weight.dtype, device=weight.device)[None]
    with torch.random.fork_rng(devices=[]):
        ours = RMSNorm(weight.shape[0], _epsilon(module))
    ours.weight = weight
    return torch.equal(ours(x), module(x))
