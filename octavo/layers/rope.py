"""Rotary position embeddings: the tables of every scaling that checkpoints name, built once per model and shared.

`Rope.of(config)` reads the configuration strictly; the angles follow the papers named at each function, and agree with
transformers' to float32.
"""

import math
from typing import Any, cast

import torch
from torch import nn

from octavo.config.hf import HFConfig
from octavo.errors import ConfigError
from octavo.ops.rope import apply_rope


def _inverse_frequencies(base: float, dim: int) -> torch.Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _llama3(inv_freq: torch.Tensor, p: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    low, high, original = p["low_freq_factor"], p["high_freq_factor"], p["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    blend = (original / wavelength - low) / (high - low)
    mixed = (1 - blend) * inv_freq / p["factor"] + blend * inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / p["factor"], inv_freq)
    medium = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(medium, mixed, scaled)


def yarn_mscale(factor: float, m: float = 1.0) -> float:
    """YaRN's temperature for a context stretched by `factor`."""
    return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(base: float, dim: int, p: dict[str, Any], max_position: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate low frequencies, keep high ones, ramp between; returns the attention factor too."""
    original = p.get("original_max_position_embeddings") or max_position
    factor = p["factor"]
    attention = p.get("attention_factor")
    if attention is None:
        m, m_all = p.get("mscale"), p.get("mscale_all_dim")
        attention = yarn_mscale(factor, m) / yarn_mscale(factor, m_all) if m and m_all else yarn_mscale(factor)

    def correction_dim(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = correction_dim(p.get("beta_fast") or 32)
    high = correction_dim(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    inv_freq = _inverse_frequencies(base, dim)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), attention


def _longrope_factor(p: dict[str, Any], max_position: int, length: int) -> float:
    original = p["original_max_position_embeddings"]
    stated = p.get("long_mscale" if length > original else "short_mscale")  # Phi-3.5-MoE
    if stated is not None:
        return stated
    factor = p.get("factor") or max_position / original
    if p.get("attention_factor") is not None:
        return p["attention_factor"]
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


class Rope(nn.Module):
    """A table of cos and sin for every position, [max_position, rotary_dim] float32.

    Applied where queries and keys are written to the cache (`ops.qkv_rope_write`), not as a call of its own. Layers
    without positions have None in its place.
    """

    def __init__(self, cos_sin: torch.Tensor, interleaved: bool = False):
        super().__init__()
        self.register_buffer("cos_sin", cos_sin, persistent=False)
        self.interleaved = interleaved

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """For models that go on with what is rotated: x [tokens, heads, head_dim]."""
        return apply_rope(x, cast(torch.Tensor, self.cos_sin)[positions], self.interleaved)

    @classmethod
    def of(
        cls, config: HFConfig, max_position: int | None = None, interleaved: bool = False, dim: int | None = None
    ) -> "Rope":
        """The table a model's configuration asks for, long enough for `max_position` tokens (default: the model's own).

        `dim`: elements of a head that rotate, where that is not a share of the head's width.
        """
        p = config.rope_parameters
        if dim is None:
            dim = (
                config.head_dim
                if p["rope_type"] == "proportional"
                else int(config.head_dim * p["partial_rotary_factor"])
            )
        trained = config.max_position_embeddings or 2048
        # Of what is served only: for the millions of tokens that Llama 4 is made for, a table has gigabytes.
        length = max_position or trained
        positions = torch.arange(length, dtype=torch.float32, device="cpu")
        with torch.device("cpu"):
            inv_freq, attention = cls._frequencies(p, dim, trained, length)
            angles = positions[:, None] * inv_freq
            table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention
        device = torch.get_default_device()
        return cls(table.to(device), interleaved)

    @staticmethod
    def _frequencies(p: dict[str, Any], dim: int, trained: int, length: int) -> tuple[torch.Tensor, float]:
        """Inverse frequencies [dim / 2] and the attention factor."""
        base, kind = float(p["rope_theta"]), p["rope_type"]
        inv_freq = _inverse_frequencies(base, dim)
        if kind == "default":
            return inv_freq, 1.0
        if kind == "linear":
            return inv_freq / p["factor"], 1.0
        if kind == "proportional":  # Gemma 4: the slowest of all angles stand still
            inv_freq[int(p["partial_rotary_factor"] * dim // 2) :] = 0
            return inv_freq / p.get("factor", 1.0), 1.0
        if kind == "llama3":
            return _llama3(inv_freq, p), 1.0
        if kind == "yarn":
            return _yarn(base, dim, p, trained)
        if kind == "dynamic" and p.get("alpha"):  # Hunyuan: not dynamic, a base of its own
            return _inverse_frequencies(base * p["alpha"] ** (dim / (dim - 2)), dim), 1.0
        if kind == "dynamic":
            # Dynamic NTK changes the base with the running length, which would invalidate cached keys: the base for the
            # longest admitted context is used throughout, which is exact up to the trained length.
            if length > trained:
                factor = p["factor"]
                base *= ((factor * length / trained) - (factor - 1)) ** (dim / (dim - 2))
            return _inverse_frequencies(base, dim), 1.0
        if kind == "longrope":
            return Rope._longrope(p, inv_freq, length), _longrope_factor(p, trained, length)
        raise ConfigError(
            f"config.json has rope_type={kind!r}; supported are default, linear, proportional, llama3, yarn, dynamic, longrope."
        )

    @staticmethod
    def _longrope(p: dict[str, Any], inv_freq: torch.Tensor, length: int) -> torch.Tensor:
        """LongRoPE (Ding et al. 2024): short factors when the served context fits the original one, else long ones."""
        key = "long_factor" if length > p["original_max_position_embeddings"] else "short_factor"
        return inv_freq / torch.tensor(p[key], dtype=torch.float32)
