"""The peer of a training step: the same model in PyTorch, eager or under `torch.compile`.

The peer trains as nanoGPT does: float32 parameters under `torch.autocast`, `F.scaled_dot_product_attention`, one fused linear
layer for q, k, v, a tied head, cross-entropy on all logits at once, `clip_grad_norm_`, fused AdamW. With GQA, k and v are
repeated if torch then selects a better kernel. Two choices of nanoGPT differ from those of the engine:

                 nanoGPT                       like for like
    GELU         exact (erf)                   tanh, as in the engine
    residual     float32 (autocast leaves it)  bfloat16, as in the engine

Parameters have the same names as in the engine, so that both begin with the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilegrad.model.config import ModelConfig
from tilegrad.model.transformer import parameters

Gelu = Literal["exact", "tanh"]
Residual = Literal["float32", "bfloat16"]
Sdpa = Literal["default", "cudnn", "flash"]
_SIZES = {"vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_kv_head", "ffn_dim"}
# The peer reads these keys of a config; all other keys must have their defaults.
_READ = _SIZES | {"activation", "norm", "position", "bias", "tie_embeddings", "norm_eps", "rope_theta"}
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True, slots=True)
class PeerForm:
    """The options of the peer; the defaults are those of nanoGPT. sdpa="default": the kernel that torch selects."""

    gelu: Gelu = "exact"
    residual: Residual = "float32"
    sdpa: Sdpa = "default"

    def __str__(self) -> str:
        return f"{self.gelu} GELU, {self.residual} residual stream, SDPA {self.sdpa}"


LIKE_FOR_LIKE = PeerForm(gelu="tanh", residual="bfloat16")


def initial_parameters(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """The initial parameters of the engine for this seed, in float32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    params = {}
    for name, p in parameters(config).items():
        params[name] = torch.empty(p.master.shape)
        p.init.fill(params[name], generator)
    return params


def sdpa_backend(config: ModelConfig, batch_size: int, seq_len: int, device: torch.device, *, gqa: bool) -> str:
    """The name of the kernel that torch selects, such as CUDNN_ATTENTION. gqa: k and v keep their number of heads."""
    heads = config.kv_heads if gqa else config.n_head
    q, k = (
        torch.empty(batch_size, h, seq_len, config.head_dim, dtype=torch.bfloat16, device=device, requires_grad=True)
        for h in (config.n_head, heads)
    )
    choice = torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=heads < config.n_head)
    return str(SDPBackend(choice).name)


def apart(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters or gradients of the engine, with up and gate as two tensors."""
    found: dict[str, Tensor] = {}
    for name, x in params.items():
        if ".up_gate." in name:
            found |= {name.replace("up_gate", part): own for part, own in zip(("up", "gate"), x.chunk(2), strict=True)}
        else:
            found[name] = x
    return found


class Norm(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.rms, self.eps = config.norm == "rmsnorm", config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.n_embd))
        self.bias = nn.Parameter(torch.zeros(config.n_embd)) if config.bias and not self.rms else None

    def forward(self, x: Tensor) -> Tensor:
        if self.rms:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, *, gqa: bool) -> None:
        super().__init__()
        self.config, self.gqa = config, gqa and config.kv_heads < config.n_head
        c, d = config.n_embd, config.head_dim
        self.sizes = [config.n_head * d, config.kv_heads * d, config.kv_heads * d]
        self.qkv = nn.Linear(c, sum(self.sizes), bias=config.bias)
        self.proj = nn.Linear(c, c, bias=config.bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        b, t, c = x.shape
        d = self.config.head_dim
        q, k, v = (part.view(b, t, -1, d).transpose(1, 2) for part in self.qkv(x).split(self.sizes, dim=2))
        if rope is not None:
            q, k = rotated(q, *rope), rotated(k, *rope)
        group = self.config.n_head // self.config.kv_heads
        if group > 1 and not self.gqa:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.gqa)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(b, t, c))
        return out


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x · (cos + i·sin), with the halves of D as real and imaginary parts.       x (B, H, T, D)   cos, sin (T, D/2) float32"""
    real, imag = x.chunk(2, dim=-1)
    return torch.cat([real * cos - imag * sin, imag * cos + real * sin], -1).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig, gelu: Gelu) -> None:
        super().__init__()
        self.activation, self.approximate = config.activation, "tanh" if gelu == "tanh" else "none"
        self.up = nn.Linear(config.n_embd, config.ffn, bias=config.bias)
        if config.activation == "swiglu":
            self.gate = nn.Linear(config.n_embd, config.ffn, bias=config.bias)
        self.down = nn.Linear(config.ffn, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        a = F.silu(self.gate(x)) * h if self.activation == "swiglu" else F.gelu(h, approximate=self.approximate)
        out: Tensor = self.down(a)
        return out


class Block(nn.Module):
    def __init__(self, config: ModelConfig, gelu: Gelu, *, gqa: bool) -> None:
        super().__init__()
        self.ln1, self.attn = Norm(config), Attention(config, gqa=gqa)
        self.ln2, self.ffn = Norm(config), FeedForward(config, gelu)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attn(self.ln1(x), rope)
        x = x + self.ffn(self.ln2(x))
        return x


class PeerModel(nn.Module):
    """tokens, targets (B, T) → the mean cross-entropy; target −1 is ignored."""

    def __init__(self, config: ModelConfig, form: PeerForm, *, gqa: bool = True) -> None:
        super().__init__()
        for key in fields(config):
            value = getattr(config, key.name)
            if key.name not in _READ and value != key.default:
                raise ValueError(f"{key.name}: got {value!r}; accepted: {key.default!r}, which the peer has")
        if config.activation not in ("gelu", "swiglu"):
            raise ValueError(f"activation: got {config.activation!r}; accepted: 'gelu' or 'swiglu', which the peer has")
        self.config, self.residual = config, form.residual
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if config.position == "learned":
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        else:
            d = config.head_dim
            frequency = config.rope_theta ** (-torch.arange(0, d, 2).double() / d)
            angle = torch.outer(torch.arange(config.block_size).double(), frequency)
            self.register_buffer("cos", angle.cos().float(), persistent=False)
            self.register_buffer("sin", angle.sin().float(), persistent=False)
        self.blocks = nn.ModuleList(Block(config, form.gelu, gqa=gqa) for _ in range(config.n_layer))
        self.ln_f = Norm(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight

    def load(self, params: Mapping[str, Tensor]) -> None:
        """Copies parameters of the engine, which have the same names, except that up and gate are two layers here."""
        own = dict(self.named_parameters())  # a tied weight is listed once, as the weight of wte
        params = apart(params)
        if own.keys() != params.keys():
            other = ", ".join(sorted(own.keys() ^ params.keys()))
            raise ValueError(f"params: got names that differ from the peer's: {other}; accepted: the engine's names")
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(params[name])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, t = self.wte(tokens), tokens.shape[1]
        rope = None
        if self.config.position == "learned":
            x = x + self.wpe(torch.arange(t, device=tokens.device))
        else:
            rope = self.get_buffer("cos")[:t], self.get_buffer("sin")[:t]
        if self.residual == "bfloat16":
            x = x.to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, rope)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.flatten(), ignore_index=-1)


class TorchStep:
    """A training step in PyTorch: `model`, on `device`, in float32 under autocast to `dtype`. Copies from pinned memory do not
    block."""

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype, *, compiled: bool) -> None:
        self.device, self.dtype = device, dtype
        self._forward = torch.compile(model) if compiled else model
        self._last = torch.full((), torch.nan)

    def loss(self) -> float:
        """The loss of the last step; waits for it."""
        return float(self._last)

    def evaluate(self, tokens: Tensor, targets: Tensor) -> float:
        """The mean loss of a batch."""
        with torch.no_grad():
            return float(self._mean_loss(tokens, targets))

    def _mean_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, y = (given.to(self.device, non_blocking=True) for given in (tokens, targets))
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)
        with self._attention(), autocast:
            loss: Tensor = self._forward(x, y)
        return loss

    def _attention(self) -> AbstractContextManager[object]:
        """The context in which SDPA runs."""
        return nullcontext()


class Peer(TorchStep):
    """The training step of the peer: forward, backward, clipping to norm 1, AdamW."""

    def __init__(
        self, config: ModelConfig, batch_size: int, seq_len: int, device: torch.device, *, seed: int, form: PeerForm,
        compiled: bool, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.sdpa = form.sdpa
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        with self._attention():
            few, self.backend = (sdpa_backend(config, batch_size, seq_len, device, gqa=gqa) for gqa in (True, False))
        with device:
            self.model = PeerModel(config, form, gqa=few == self.backend)
        self.model.load(initial_parameters(config, seed))
        params = list(self.model.parameters())
        groups: list[dict[str, object]] = [
            {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
        super().__init__(self.model, device, dtype, compiled=compiled)

    def submit(self, tokens: Tensor, targets: Tensor, learning_rate: float) -> None:
        loss = self._mean_loss(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._last = loss.detach()

    def _attention(self) -> AbstractContextManager[object]:
        return nullcontext() if self.sdpa == "default" else sdpa_kernel(BACKENDS[self.sdpa])
