"""A peer with nanochat's architecture and optimizers, in PyTorch under `torch.compile`.

    x = rms(wte[tokens])                    rms(x) = x / √mean(x²): norms have no weights, linear layers no biases
    for each block i:
        x = a_i x + b_i x0                  x0: x before the first block; a_i and b_i are learned
        q, k = rms(rope(Wq rms(x))), rms(rope(Wk rms(x)))        in each head of 128 channels
        x += Wo attention(q, k, Wv rms(x))
        x += Wdown relu(Wup rms(x))²
    logits = 15 tanh(W rms(x) / 15)         W is not tied to wte

Muon updates the matrices of the blocks: those of one shape are one stack, which a compiled function orthogonalizes. Fused AdamW
updates the embedding, the head, a and b, each with its own learning rate. Gradients are not clipped, and there is no weight
decay. nanochat's value embeddings and sliding windows are left out.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilegrad.kernels.muon import COEFFICIENTS, MARGINS
from tilegrad.model.config import ModelConfig

from ..peer import TorchStep, rotated

SOFTCAP = 15.0
HEAD_DIM = 128
MATRIX_RATE = 0.02
EMBEDDING_RATE, HEAD_RATE = 0.2, 0.004  # for 768 channels; they are proportional to 1 / √channels
A_RATE, B_RATE = 0.005, 0.5
MOMENTUM, FIRST_MOMENTUM, MOMENTUM_STEPS = 0.95, 0.85, 300


def rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],)).to(x.dtype)  # autocast may return float32


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c, self.d = config.n_embd, config.head_dim
        self.q, self.k, self.v, self.proj = (nn.Linear(c, c, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(c, config.ffn, bias=False), nn.Linear(config.ffn, c, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, c = x.shape
        n = rms(x)
        q, k, v = (part(n).view(b, t, -1, self.d).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rms(rotated(q, cos, sin)), rms(rotated(k, cos, sin))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        out: Tensor = x + self.down(F.relu(self.up(rms(x))).square())
        return out


class NanochatModel(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.a, self.b = (nn.Parameter(torch.empty(config.n_layer)) for _ in range(2))
        frequency = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).double() / config.head_dim)
        angle = torch.outer(torch.arange(config.block_size).double(), frequency)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def initialise(self, seed: int) -> None:
        """Layers that add to the residual stream begin at 0, and the head near 0. The generator is the CPU's, so the values do
        not depend on the device."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in self.named_parameters():
                value = torch.zeros(p.shape)
                if name == "wte.weight":
                    value.normal_(0.0, 1.0, generator=generator)
                elif name == "a":
                    value.fill_(1.0)
                elif name == "lm_head.weight":
                    value.normal_(0.0, 0.001, generator=generator)
                elif p.ndim == 2 and not name.endswith(("proj.weight", "down.weight")):
                    bound = math.sqrt(3.0 / p.shape[1])  # the standard deviation is 1 / √inputs
                    value.uniform_(-bound, bound, generator=generator)
                p.copy_(value)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        t = tokens.shape[1]
        cos, sin = self.get_buffer("cos")[:t], self.get_buffer("sin")[:t]
        x = rms(self.wte(tokens).to(self.dtype))
        x0 = x
        for i, block in enumerate(self.blocks):
            x = block(self.a[i] * x + self.b[i] * x0, cos, sin)
        logits = self.lm_head(rms(x)).float()
        logits = SOFTCAP * torch.tanh(logits / SOFTCAP)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.flatten())


def muon_directions(grads: Tensor, m: Tensor, momentum: Tensor, dtype: torch.dtype) -> Tensor:
    """Updates m, and returns √max(1, rows / columns) times the polar factor of Nesterov's momentum.     (n, rows, columns)"""
    m.lerp_(grads, 1.0 - momentum)
    u = torch.lerp(grads, m, momentum)
    rows, columns = u.shape[1:]
    x = (u.mT if rows > columns else u).to(dtype)
    x = x / (MARGINS["polar_express"] * x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for a, b, c in COEFFICIENTS["polar_express"]:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    o: Tensor = x.mT if rows > columns else x
    return o.to(u.dtype) * math.sqrt(max(1.0, rows / columns))


class Nanochat(TorchStep):
    """The training step of this peer. `learning_rate` is the rate of the matrices; the others are in proportion."""

    def __init__(
        self, config: ModelConfig, device: torch.device, *, seed: int, dtype: torch.dtype, compiled: bool
    ) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        with device:
            self.model = NanochatModel(config, dtype)
        self.model.initialise(seed)
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for p in self.model.blocks.parameters():
            by_shape.setdefault(p.shape, []).append(p)
        self._stacks = [(ps, torch.zeros(len(ps), *shape, device=device)) for shape, ps in by_shape.items()]
        scale, m = math.sqrt(768 / config.n_embd), self.model
        rates = (scale * EMBEDDING_RATE, scale * HEAD_RATE, A_RATE, B_RATE)
        self._factors = tuple(rate / MATRIX_RATE for rate in rates)
        groups: list[dict[str, object]] = [{"params": [p]} for p in (m.wte.weight, m.lm_head.weight, m.a, m.b)]
        self._adamw = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, fused=True)
        self._directions = torch.compile(muon_directions, dynamic=False) if compiled else muon_directions
        self._momentum, self._steps = torch.empty((), device=device), 0
        super().__init__(self.model, device, dtype, compiled=compiled)

    def submit(self, tokens: Tensor, targets: Tensor, learning_rate: float) -> None:
        loss = self._mean_loss(tokens, targets)
        loss.backward()
        for group, factor in zip(self._adamw.param_groups, self._factors, strict=True):
            group["lr"] = learning_rate * factor
        self._adamw.step()
        done = min(self._steps / MOMENTUM_STEPS, 1.0)
        self._momentum.fill_(FIRST_MOMENTUM + done * (MOMENTUM - FIRST_MOMENTUM))
        with torch.no_grad():
            for params, m in self._stacks:
                grads = torch.stack([p.grad for p in params if p.grad is not None])
                o = self._directions(grads, m, self._momentum, self.dtype)
                torch._foreach_add_([*params], list(o.unbind()), alpha=-learning_rate)
        self.model.zero_grad(set_to_none=True)
        self._steps += 1
        self._last = loss.detach()
