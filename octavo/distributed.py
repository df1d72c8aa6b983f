"""Named process groups and the collectives layers use. One process until the parallel issue: every group has one rank.

Layers ask for a group by name (`tp`, `pp`, `dp`, `ep`, `cp`) and call its collectives; with one rank they return their
input untouched.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Group:
    """A set of ranks that compute one thing together."""

    name: str
    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks."""
        assert self.size == 1, f"group {self.name} has {self.size} ranks but no communicator"
        return x


_groups = {name: Group(name) for name in ("tp", "pp", "dp", "ep", "cp")}


def get_group(name: str) -> Group:
    """The group `name` of this process."""
    return _groups[name]
