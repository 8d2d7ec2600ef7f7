"""The frozen parameters of a run. Checkpoints do not contain them, but digests that identify them.

base        the base weights of adapters stay in the folder that --init named. A checkpoint has the name of the folder and a
            digest of the weights in it. If the folder has moved, --init says where it is now.
own copy    other frozen parameters (train.freeze) are copied once into frozen.safetensors in the run's folder, so that the
            run does not need the folder of weights any more. A checkpoint has the sha256 of this file.

A resumed run refuses frozen parameters with another digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..model.config import ModelConfig
from ..pretrained.weights import Weights, open_weights
from ..text.atomic import save_tensors, sha256_of, whole_file
from ..text.untrusted import open_tensors, regular_file
from .state import BaseState, RunState

OWN = "frozen.safetensors"


@dataclass(frozen=True, slots=True)
class BaseWeights:
    weights: Weights
    sha256: str

    def state(self) -> BaseState:
        return {"folder": str(self.weights.folder.resolve()), "sha256": self.sha256}


def open_base(config: ModelConfig, folder: Path) -> BaseWeights:
    """The weights in `folder`, for this model."""
    weights = replace(open_weights(folder), config=config)
    return BaseWeights(weights, weights.sha256())


def base_of(config: ModelConfig, state: RunState, init: Path | None) -> BaseWeights:
    """The weights that the adapters of this state were trained on, from `init` or, if that is None, from the folder that the
    state names."""
    saved = state["base"]
    folder = Path(saved["folder"]) if init is None else init
    try:
        base = open_base(config, folder)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}; adapters need the weights that they were trained on; pass their folder with --init"
        ) from error
    if base.sha256 != saved["sha256"]:
        raise ValueError(
            f"init: got {folder}, weights of sha256 {base.sha256[:12]}…; accepted: those that the adapters were trained on, "
            f"{saved['sha256'][:12]}…; pass their folder with --init"
        )
    return base


def save_own(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write the run's own copy, whole or not at all, and return its sha256."""
    with whole_file(folder / OWN) as staged:
        save_tensors({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, staged)
    return sha256_of(folder / OWN)


def load_own(folder: Path, state: RunState) -> dict[str, Tensor]:
    """The run's own copy; {} if the state has none."""
    if "frozen_sha256" not in state:
        return {}
    path = folder / OWN
    with open_tensors(regular_file(path, "the run's own frozen parameters")) as file:
        if (digest := sha256_of(path)) != state["frozen_sha256"]:
            raise ValueError(
                f"{path}: got weights of sha256 {digest[:12]}…; accepted: the weights of the checkpoint, "
                f"{state['frozen_sha256'][:12]}…"
            )
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    joined = {name: torch.cat([tensors.pop(part) for part in parts]) for name, parts in older_parts(tensors).items()}
    return tensors | joined


def older_parts(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """name of an up_gate tensor → (up, gate), the names of its two parts in an older checkpoint.

    >>> older_parts(["m.blocks.0.ffn.up.weight", "m.blocks.0.ffn.gate.weight", "blocks.1.ffn.up.weight"])
    {'m.blocks.0.ffn.up_gate.weight': ('m.blocks.0.ffn.up.weight', 'm.blocks.0.ffn.gate.weight')}
    """
    saved = set(names)
    up_of = {name: re.sub(r"\.ffn\.gate\.(weight|bias)$", r".ffn.up.\1", name) for name in sorted(saved)}
    gates = {gate: up for gate, up in up_of.items() if gate != up and up in saved}
    return {up.replace(".ffn.up.", ".ffn.up_gate."): (up, gate) for gate, up in gates.items()}
