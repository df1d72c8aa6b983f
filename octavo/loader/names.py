"""From a checkpoint's tensor name to a place in the model, by the tables that the model carries.

A model class may have:

- `ignored: tuple[str, ...]`: regular expressions, searched in the checkpoint's own name; a match is known to be of no
  use (`rotary_emb.inv_freq`).
- `renames: dict[str, str]`: regular expression → replacement (`re.sub` syntax), applied one after the other in the
  order of the table, each on the result of the one before.
- `remap(name, tensor)`: for what a table cannot say; sees the renamed name and yields any number of (name, tensor).
- `packing: dict[str, tuple[str, ...]]`: a module of the model → the checkpoint's modules it is made of, in order.
  Both are whole dotted parts of a name: `{"qkv_proj": ("q_proj", "k_proj", "v_proj")}` makes `x.q_proj.weight` part 0
  of `x.qkv_proj.weight`. A checkpoint that has the packed module itself fills it whole.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Scales of an 8-bit KV cache, by the names that tools of quantisation give them: beside the attention's projections or in
# them. They belong to the attention proper, whatever the model.
KV_CACHE_SCALES = {
    r"\.self_attn\.(?:[kv]_proj\.|qkv_proj\.)?([kv])_scale$": r".self_attn.attn.\1_scale",
    r"\.self_attn\.([kv])_proj\.output_scale$": r".self_attn.attn.\1_scale",
}


@dataclass(frozen=True)
class Target:
    """A place in the model, or one part of a packed one."""

    name: str
    shard: int | None = None


class NameTables:
    """The tables of one model, compiled."""

    def __init__(self, packing: Mapping[str, Sequence[str]], renames: Mapping[str, str], ignored: Sequence[str]):
        self._ignored = [re.compile(pattern) for pattern in ignored]
        self._renames = [(re.compile(pattern), replacement) for pattern, replacement in renames.items()]
        self._parts = {
            tuple(source.split(".")): (tuple(packed.split(".")), shard)
            for packed, sources in packing.items()
            for shard, source in enumerate(sources)
        }
        self._lengths = sorted({len(source) for source in self._parts}, reverse=True)
        self._packed = {tuple(packed.split(".")): tuple(sources) for packed, sources in packing.items()}
        self._packed_lengths = sorted({len(packed) for packed in self._packed}, reverse=True)

    def is_ignored(self, name: str) -> bool:
        """Whether the model says that a checkpoint's tensor is of no use to it."""
        return any(pattern.search(name) for pattern in self._ignored)

    def rename(self, name: str) -> str:
        """The checkpoint's name as the model would have it, before packing."""
        for pattern, replacement in self._renames:
            name = pattern.sub(replacement, name)
        return name

    def candidates(self, name: str) -> list[Target]:
        """Where a (renamed) tensor may go, best first: under its own name, or as a part of a packed module."""
        targets = [Target(name)]
        words = name.split(".")
        for length in self._lengths:
            for start in range(len(words) - length + 1):
                part = self._parts.get(tuple(words[start : start + length]))
                if part:
                    packed, shard = part
                    targets.append(Target(".".join([*words[:start], *packed, *words[start + length :]]), shard))
        return targets

    def parts(self, name: str) -> tuple[str, ...]:
        """The checkpoint modules that a place is made of; empty when it is not packed."""
        words = name.split(".")
        for length in self._packed_lengths:
            for start in range(len(words) - length + 1):
                sources = self._packed.get(tuple(words[start : start + length]))
                if sources:
                    return sources
        return ()
