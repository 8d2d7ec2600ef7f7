"""Saves the checkpoints of a run: the last few, and the checkpoint with the lowest validation loss."""

from __future__ import annotations

from pathlib import Path

from ..engine.dist.mesh import Mesh
from ..engine.engine import Engine
from ..engine.state import restore_counters
from .checkpoint import load_into, save_checkpoint, save_same
from .folder import Best, best_of
from .manifest import check_state, is_complete
from .state import RunState


class Checkpointer:
    def __init__(self, folder: Path, engine: Engine, mesh: Mesh, keep: int) -> None:
        self._folder, self._engine, self._mesh, self._keep = folder, engine, mesh, keep
        self.newest: tuple[int, Path] | None = None  # step and path of the newest checkpoint in checkpoints/
        self.best: Best | None = None
        self._written: tuple[int, Path] | None = None  # step and path of the last save, in either folder

    def save(self, state: RunState) -> Path | None:
        """Save into checkpoints/ and return the new folder, or None if this step is saved already."""
        if self.newest is not None and self.newest[0] == self._engine.steps:
            return None
        path = self._write("checkpoints", state, keep=self._keep)
        self.newest = self._engine.steps, path
        return path

    def is_best(self, loss: float) -> bool:
        """Whether `loss` is lower than every validation loss before."""
        return self.best is None or loss < self.best.validation_loss

    def save_if_best(self, state: RunState, loss: float) -> None:
        """Save into best/ if `loss` is lower than every validation loss before."""
        if self.is_best(loss):
            self.best = Best(self._write("best", state, keep=1), self._engine.steps, loss)

    def restore(self, path: Path, state: RunState) -> None:
        if self._mesh.world == 1:
            load_into(path, self._engine.tensors())
        else:
            from .pieces import load_pieces  # torch's distributed checkpoint takes a second to load

            load_pieces(path, self._engine, self._mesh)
        restore_counters(self._engine, state["engine"])
        self.best = best_of(self._folder)
        self.newest = (self._engine.steps, path) if path.parent.name == "checkpoints" else None

    def forget_last(self) -> None:
        """Never link to the last save again: after a rewind, the same step has other tensors."""
        self._written = None

    def check(self, state: RunState) -> None:
        """Refuse a state that can't be saved."""
        if self._mesh.world > 1:
            from .pieces import state_of_ranks

            check_state(state_of_ranks(self._engine, self._mesh, state))
        else:
            check_state(state)

    def _write(self, place: str, state: RunState, *, keep: int) -> Path:
        """Save a checkpoint; if the last save has the same tensors, link to its files."""
        folder, engine, mesh = self._folder / place, self._engine, self._mesh
        step, source = self._written or (-1, self._folder)
        same = step == engine.steps and mesh.gather(is_complete(source))[0]
        if mesh.world > 1:
            from .pieces import save_pieces, save_same_pieces

            if same:
                path = save_same_pieces(folder, source, engine, mesh, state, keep=keep)
            else:
                path = save_pieces(folder, engine, mesh, state, keep=keep)
        elif same:
            path = save_same(folder, source, state, keep=keep)
        else:
            path = save_checkpoint(folder, engine.steps, engine.tensors(), state, keep=keep)
        self._written = engine.steps, path
        return path
