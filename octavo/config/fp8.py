"""How a model's linears are kept in 8-bit floating point, read from what its checkpoint says of itself.

Two dialects are understood: `quant_method: fp8` (scales by tensor, or by block of 128 x 128) and `compressed-tensors` with
8-bit float weights (scales by tensor, output row or block). Everything else in them is refused by name.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError

BLOCK_SHAPE = [128, 128]
_STRATEGIES = {"tensor": "tensor", "channel": "row", "block": "block"}


@dataclass(frozen=True)
class Fp8Scheme:
    """A kind of FP8 weights, and which linears have them."""

    scales: str  # what shares a scale: "tensor", "row" or "block"
    is_static: bool  # whether the checkpoint has a scale for the activations, too
    scale_name: str  # of the weight's scale in the checkpoint
    ignored: tuple[str, ...] = ()  # names of linears kept in floating point; "re:" begins a regular expression
    is_stored: bool = True  # False: the checkpoint has floating point weights, rounded as they are read

    def ignores(self, names: Iterable[str]) -> bool:
        """Whether the linear that the checkpoint has under `names` (one a shard) is kept in floating point.

        An entry without "re:" is a whole name or whole dotted parts of one. ConfigError when the shards disagree.
        """
        kept = {name: any(_matches(entry, name) for entry in self.ignored) for name in names}
        if len(set(kept.values())) > 1:
            plain = ", ".join(name for name, is_plain in kept.items() if is_plain)
            raise ConfigError(
                f"{', '.join(kept)} are computed as one matrix, but the checkpoint keeps {plain} unquantised, which is not "
                "supported."
            )
        return next(iter(kept.values()))


ONLINE = Fp8Scheme("row", is_static=False, scale_name="weight_scale", is_stored=False)


def _matches(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    return f".{entry}." in f".{name}."


def read_fp8_scheme(config: Mapping[str, Any]) -> Fp8Scheme:
    """The scheme of a `quantization_config`; ConfigError naming what is not supported."""
    method = config.get("quant_method", "?")
    if method == "fp8":
        return _read_fp8(config)
    if method == "compressed-tensors":
        return _read_compressed_tensors(config)
    raise _unsupported(str(method))


def asks_for_fp8_cache(config: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` asks for a KV cache of 8-bit floats with one scale a layer."""
    scheme = config.get("kv_cache_scheme")
    if not scheme:
        return False
    wanted = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
    other = {key: scheme[key] for key, value in wanted.items() if scheme.get(key, value) != value}
    if other:
        raise _unsupported(f"with a kv_cache_scheme of {', '.join(f'{key}={value}' for key, value in other.items())}")
    return True


def _read_fp8(config: Mapping[str, Any]) -> Fp8Scheme:
    block, activations = config.get("weight_block_size"), config.get("activation_scheme", "dynamic")
    if block is not None and list(block) != BLOCK_SHAPE:
        raise _unsupported(f"fp8 with weight_block_size={list(block)}")
    if activations not in ("dynamic", "static") or (block is not None and activations == "static"):
        raise _unsupported(f"fp8 with activation_scheme={activations}, weight_block_size={block}")
    if config.get("fmt", "e4m3") != "e4m3":
        raise _unsupported(f"fp8 with fmt={config['fmt']}")
    ignored = (*(config.get("modules_to_not_convert") or ()), *(config.get("ignored_layers") or ()))
    if block is not None:
        return Fp8Scheme("block", False, "weight_scale_inv", ignored)
    return Fp8Scheme("tensor", activations == "static", "weight_scale", ignored)


def _read_compressed_tensors(config: Mapping[str, Any]) -> Fp8Scheme:
    groups = config.get("config_groups") or {}
    asks_for_fp8_cache(config)  # refuses other kinds of caches
    if len(groups) != 1:
        raise _unsupported(f"compressed-tensors with {len(groups)} config_groups")
    (group,) = groups.values()
    weights, activations = group.get("weights") or {}, group.get("input_activations") or {}
    if list(group.get("targets") or ()) != ["Linear"]:
        raise _unsupported(f"compressed-tensors with targets={group.get('targets')}")
    for what, scheme in (("weights", weights), ("input_activations", activations)):
        if scheme.get("num_bits") != 8 or scheme.get("type") != "float" or not scheme.get("symmetric", True):
            kind = f"{scheme.get('num_bits')}-bit {scheme.get('type')}" if scheme else "absent"
            raise _unsupported(f"compressed-tensors with {what} {kind}")
    scales = _STRATEGIES.get(weights.get("strategy", "tensor"))
    if scales is None or (scales == "block" and list(weights.get("block_structure") or ()) != BLOCK_SHAPE):
        shape = weights.get("block_structure")
        raise _unsupported(
            f"compressed-tensors with weights strategy={weights.get('strategy')}, block_structure={shape}"
        )
    is_static = not activations.get("dynamic", False)
    strategy = activations.get("strategy") or ("tensor" if is_static else "token")
    # A scale for a whole batch would make a request's numbers depend on its neighbours: tokens get their own instead.
    possible = {"block": ("group",)}.get(scales, ("tensor",) if is_static else ("token", "tensor"))
    if strategy not in possible or (scales == "block" and (is_static or activations.get("group_size") != 128)):
        kind = "static" if is_static else "dynamic"
        raise _unsupported(f"compressed-tensors with {kind} input_activations strategy={strategy}, weights by {scales}")
    return Fp8Scheme(scales, is_static, "weight_scale", tuple(config.get("ignore") or ()))


def _unsupported(what: str) -> ConfigError:
    return ConfigError(
        f"the checkpoint is quantised ({what}), which is not supported yet; use the unquantised checkpoint, an FP8 one or a "
        "GGUF file.",
        param="model",
    )
