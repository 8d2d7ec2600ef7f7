"""The contenders. Each has a name, a model, an optimizer and a peak of the learning rate.

    nanogpt     GPT-2 in PyTorch: LayerNorm, GELU, learned positions, tied head, fused AdamW (../peer.py)
    nanochat    nanochat's architecture in PyTorch: rope, qk_norm, ReLU², untied head with a softcap, Muon (nanochat.py)
    adamw       tilegrad, with nanogpt's model and optimizer
    muon        tilegrad, with Muon and AdamW. The model is nanochat's, but its norms have weights, and no norm follows wte
    muon-fp8    as muon, but all products of linear layers and of the head are in float8

Peers are compiled on a GPU and eager on a CPU. All have as many blocks and channels, and read the same windows in the same
order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from tilegrad.engine.optimizer import AdamW
from tilegrad.kernels.muon import MuonConfig
from tilegrad.model.config import ModelConfig

from ..cases import Case, Problem
from ..contenders import Contender, Entry, Ours
from ..peer import Peer, PeerForm
from .nanochat import HEAD_DIM, MATRIX_RATE, MOMENTUM_STEPS, SOFTCAP, Nanochat


class Trained(Contender, Protocol):
    def evaluate(self, tokens: Tensor, targets: Tensor) -> float:
        """The mean loss of a batch."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model's size, and a step's batch of B sequences of T tokens."""

    n_layer: int
    n_head: int
    n_embd: int
    batch_size: int
    seq_len: int
    dtype: str

    def gpt2(self, vocab_size: int) -> ModelConfig:
        return ModelConfig(vocab_size, self.seq_len, self.n_layer, self.n_head, self.n_embd)

    def modern(self, vocab_size: int) -> ModelConfig:
        """nanochat's architecture, with weights in the norms and no norm after the embedding."""
        return replace(
            self.gpt2(vocab_size), n_head=max(1, self.n_embd // HEAD_DIM), norm="rmsnorm", position="rope", qk_norm=True,
            activation="relu2", bias=False, tie_embeddings=False, logit_softcap=SOFTCAP,
            residual_scalars=True, embedding_scale=EMBEDDING_SCALE,
        )  # fmt: skip


SIZES = {
    "124m": Size(12, 12, 768, batch_size=64, seq_len=1024, dtype="bfloat16"),
    "tiny": Size(2, 2, 32, batch_size=4, seq_len=16, dtype="float32"),
}
ADAMW_RATE = 1e-3
MUON_RATE = 8e-3  # the peak for the parameters that AdamW updates in `muon`; the matrices have MATRIX_RATE
EMBEDDING_SCALE = 50.0  # the stream begins with a deviation of 1; a step of AdamW changes it by 50 times the rate
MUON_ADAMW = AdamW(betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, max_norm=math.inf)  # as in nanochat.py


@dataclass(frozen=True, slots=True)
class Task:
    """The size, vocabulary, device and seed, which all contenders share."""

    size: Size
    vocab_size: int
    device: str
    seed: int

    def entry(self, config: ModelConfig) -> Entry:
        problem = Problem(config, self.size.batch_size, self.size.seq_len, self.size.dtype)
        return Entry("ours", Case("five-minutes", problem, device=self.device), seed=self.seed)


def _nanogpt(task: Task) -> Trained:
    size, device = task.size, torch.device(task.device)
    shape = (size.gpt2(task.vocab_size), size.batch_size, size.seq_len)
    dtype, compiled = getattr(torch, size.dtype), device.type == "cuda"
    return Peer(*shape, device, seed=task.seed, form=PeerForm(), compiled=compiled, dtype=dtype)


def _nanochat(task: Task) -> Trained:
    config, device = task.size.modern(task.vocab_size), torch.device(task.device)
    dtype = getattr(torch, task.size.dtype)
    return Nanochat(config, device, seed=task.seed, dtype=dtype, compiled=device.type == "cuda")


def _adamw(task: Task) -> Trained:
    return Ours(task.entry(task.size.gpt2(task.vocab_size)))


def _muon(task: Task, *, fp8: bool = False) -> Trained:
    entry = task.entry(task.size.modern(task.vocab_size))
    muon = MuonConfig(
        orthogonalization="polar_express", learning_rate_factor=MATRIX_RATE / MUON_RATE, momentum_warmup=MOMENTUM_STEPS
    )
    case = replace(entry.case, muon=muon, adamw=MUON_ADAMW)
    if fp8:
        case = replace(case, linear="fp8-all", head="fp8")
    return Ours(replace(entry, case=case))


@dataclass(frozen=True, slots=True)
class Named:
    """A contender. rate: the peak of `submit`'s learning rate."""

    build: Callable[[Task], Trained]
    rate: float
    needs_gpu: bool = False


CONTENDERS = {
    "nanogpt": Named(_nanogpt, ADAMW_RATE),
    "nanochat": Named(_nanochat, MATRIX_RATE),
    "adamw": Named(_adamw, ADAMW_RATE),
    "muon": Named(_muon, MUON_RATE),
    "muon-fp8": Named(lambda task: _muon(task, fp8=True), MUON_RATE, needs_gpu=True),
}


def weights_sha256(contender: Trained) -> str:
    """The digest of all parameters: equal if two runs gave the same bits."""
    if isinstance(contender, Ours):
        params = contender.engine.params
    else:
        assert isinstance(contender, Peer | Nanochat)
        params = {name: p.detach() for name, p in contender.model.named_parameters()}
    digest = hashlib.sha256()
    for name, x in sorted(params.items()):
        digest.update(name.encode())
        digest.update(x.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
