"""Checks before memory is allocated: whether several ranks can train this model, and whether they compute the same step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import get_args

import torch
from torch import Tensor

from ... import __version__
from ...kernels.cpu.library import library as native_library
from ...model.layer import Kept
from ...native.build import digest as native_sources
from ...text.untrusted import check_choice
from ..dist.mesh import Mesh
from ..optimizer import AdamW
from ..spec import Shard, StepSpec
from .context import check_context

MOST_IN_BFLOAT16 = 128  # micro-batches: adding less than 2⁻⁹ of a bfloat16 sum does not change the sum


def check_ranks(spec: StepSpec) -> None:
    world, shard, context, lora, freeze = spec.world, spec.shard, spec.context, spec.lora, spec.freeze
    check_choice(spec, "shard", get_args(Shard))
    if world > 1 and shard == "all" and (lora is not None or freeze):
        raise ValueError(
            f"shard: got 'all' with frozen parameters ({'lora' if lora is not None else f'freeze {list(freeze)}'}), which are "
            "never sharded; accepted: 'none' or 'optimizer'"
        )
    if world > 1 and shard == "all" and spec.muon is not None:
        raise ValueError(
            "shard: got 'all' with Muon, which needs whole matrices on a rank; accepted: 'none' or 'optimizer'"
        )
    check_context(spec.config, spec.seq_len, world, context)
    if context > 1 and lora is not None and lora.dropout:
        raise ValueError(f"lora.dropout: got {lora.dropout} with context {context}; accepted: 0.0")


def check_accumulation(gradient_accumulation: int, world: int, context: int, gradients: Kept = "float32") -> None:
    if gradient_accumulation < world // context:
        sharer = "rank" if context == 1 else f"group of {context} ranks"
        raise ValueError(
            f"gradient_accumulation: got {gradient_accumulation}; accepted: at least {world // context}, a micro-batch for "
            f"each {sharer}"
        )
    most = MOST_IN_BFLOAT16 * (world // context)
    if gradients == "bfloat16" and gradient_accumulation > most:
        raise ValueError(
            f"gradient_accumulation: got {gradient_accumulation} with gradients 'bfloat16'; accepted: at most {most}, "
            f"{MOST_IN_BFLOAT16} for each rank, because a longer sum in bfloat16 would lose terms; or gradients 'float32'"
        )


def check_micro_batches(count: int, spec: StepSpec) -> None:
    """Refuse more micro-batches in a step than the engine sums."""
    if count > 1 and not spec.accumulate:
        raise ValueError(f"tokens: got {count} micro-batches with accumulate=False; accepted: one")
    check_accumulation(max(count, 1), 1, 1, spec.states.gradients)


def check_same(mesh: Mesh, spec: StepSpec, adamw: AdamW, seed: int) -> None:
    """Raise if the ranks differ in model, batch, seed, optimizer, version or number of threads."""
    native = native_library()
    check_agreed(
        mesh,
        {
            "model": asdict(spec.config),
            "batch_size": spec.batch_size,
            "seq_len": spec.seq_len,
            "dtype": spec.dtype,
            "linear": spec.linear,
            "head": spec.head,
            "seed": seed,
            "shard": spec.shard,
            "bucket_bytes": spec.bucket_bytes,
            "context": spec.context,
            "documents": spec.documents,
            "lora": None if spec.lora is None else asdict(spec.lora),
            "freeze": spec.freeze,
            "invariant": spec.invariant,
            "muon": None if spec.muon is None else asdict(spec.muon),
            "windows": spec.windows,
            "ema": spec.ema,
            **asdict(spec.states),
            "recompute": [sorted(block) for block in spec.recompute],  # str() of a set differs between processes
            **asdict(adamw),
            "tilegrad": __version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "native library": native if isinstance(native, str) else native_sources(),
        },
    )


def check_agreed(mesh: Mesh, fields: Mapping[str, object]) -> None:
    """Raise if `fields` differ between ranks. All ranks raise the same error, which names the first field that differs from its
    value on rank 0, and the rank. A key of a nested mapping is named field.key."""
    if mesh.world == 1:
        return
    mesh.at("comparing the ranks")
    by_rank = mesh.gather(dict(_leaves(fields)))
    for name in {name: None for leaves in by_rank for name in leaves}:
        accepted = by_rank[0].get(name)
        for rank, leaves in enumerate(by_rank):
            if leaves.get(name) != accepted:
                raise ValueError(
                    f"{name}: got {leaves.get(name)} on rank {rank}; accepted: the value of rank 0, {accepted}"
                )


def _leaves(fields: Mapping[str, object], inside: str = "") -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{inside}{name}.")
        else:
            yield f"{inside}{name}", str(value)


def digest(tensors: Iterable[Tensor]) -> str:
    """The first 16 digits of the sha256 of the bytes of the tensors."""
    sha256 = hashlib.sha256()
    for x in tensors:
        for part in x.detach().reshape(-1).view(torch.uint8).split(1 << 26):
            sha256.update(part.cpu().numpy().data)
    return sha256.hexdigest()[:16]
