"""The ranks of a run, and how they share its work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from ..engine.dist.mesh import Mesh
from ..engine.spec import Shard


class Sharding(TypedDict):
    shard: Shard  # which tensors are sharded over the ranks
    bucket_bytes: int  # bytes of gradients that one collective sums
    context: int  # ranks that share each sequence


@dataclass(frozen=True, slots=True)
class Ranks:
    mesh: Mesh
    sharding: Sharding

    @property
    def groups(self) -> int:
        """The number of groups of ranks that share sequences."""
        return self.mesh.world // self.sharding["context"]

    @property
    def group(self) -> int:
        """The index of this rank's group."""
        return self.mesh.rank // self.sharding["context"]
