"""An attention layer that may share its backward buffers with another layer, the `predecessor` of the specification.

    Q = x W_q'   K = x W_k'   V = x W_v'   attn = attention(Q, K, V)   output = attn W_o'          x, output (B, T, C)
    loss(y) = mean (output − y)²           grad_output = 2 (output − y) / (B·T·C)

    grad_W_o += grad_output' attn          grad_attn_output = grad_output W_o
    grad_V = P' grad_attn_output           grad_weights = grad_attn_output V'        grad_scores = P ∘ (grad_weights − delta)
    grad_Q = scale · grad_scores K         grad_K = scale · grad_scores' Q
    grad_W_q += grad_Q' x (and k, v)       grad_x = grad_Q W_q + grad_K W_k + grad_V W_v

Forward buffers belong to the layer. Backward buffers belong to a workspace, which lives until the last of its layers is freed.
Only one layer at a time may have gradients in the workspace: from the `loss` of this layer until its `backward` returns, `loss`
and `backward` of other layers raise. With materialize=True, `grad_weights` and `grad_scores` are (B, H, T, T) matrices, for
inspection. Otherwise both are the tile in which the kernel computes dP and then dS (empty if tiles stay in registers).
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..kernels.attention.api import attention_bwd, attention_fwd, attention_workspace
from ..kernels.attention.checks import MAX_HEAD_DIM
from ..kernels.attention.mask import Mask, attends, distance
from ..kernels.attention.problem import lse_dtype
from ..kernels.checks import check_tensor, is_count
from ..kernels.linear import linear_bwd_input, linear_bwd_weight, linear_fwd, linear_workspace
from ..memory.types import BufferStateError
from ..text.atomic import check_replaceable, save_tensors, whole_file
from .workspace import Lease, Workspace

WEIGHTS = ("W_q", "W_k", "W_v", "W_o")
SHARED = ("grad_output", "grad_attn_output", "grad_weights", "grad_scores", "grad_Q", "grad_K", "grad_V")
_DTYPES = (torch.float32, torch.float64)
_BETAS, _EPS, _DECAY = (0.9, 0.999), 1e-8, 0.01
_count = itertools.count()


class SharedAttention:
    """The layer that `init_attention` creates and `free_attention` frees. Weights are (C, C), out × in, without bias."""

    def __init__(
        self,
        seq_len: int,
        d_model: int,
        batch_size: int,
        is_causal: bool,
        predecessor: SharedAttention | None,
        *,
        n_head: int,
        device: torch.device | str,
        dtype: torch.dtype,
        seed: int,
        materialize: bool,
    ) -> None:
        _check_arguments(seq_len, d_model, batch_size, n_head, dtype, predecessor)
        self.seq_len, self.d_model, self.batch_size, self.n_head = seq_len, d_model, batch_size, n_head
        self.is_causal, self.materialize, self.dtype, self.seed = is_causal, materialize, dtype, seed
        self.device = torch.empty(0, device=device).device
        self.name = f"attention layer {next(_count)}"
        self.mask = Mask(causal=is_causal)
        self.owns_grad_buffers = predecessor is None

        b, t, c = batch_size, seq_len, d_model
        generator = torch.Generator().manual_seed(seed)
        for name in WEIGHTS:
            weight = torch.randn(c, c, generator=generator, dtype=torch.float64) / c**0.5
            setattr(self, name, weight.to(self.device, dtype))
            setattr(self, f"grad_{name}", torch.zeros(c, c, device=self.device, dtype=dtype))
        self.Q, self.K, self.V, self.attn_output, self.output = (self._new((b, t, c)) for _ in range(5))
        self.lse = self._new((b, n_head, t), lse_dtype(dtype))
        q = self._heads(self.Q)
        forward = {} if materialize else attention_workspace(q, q, q, self.mask, backward=False)
        self._forward_scratch = {name: self._new(shape, dtype) for name, (shape, dtype) in forward.items()}

        workspace = predecessor._live().workspace if predecessor is not None else Workspace(self._needs(), self.device)
        self._lease: Lease | None = workspace.acquire(self.name, self._needs(), self.device)
        self._optimizer = torch.optim.AdamW(self._weights(), betas=_BETAS, eps=_EPS, weight_decay=_DECAY)
        self._has_output = self._has_loss = False

    W_q: Tensor
    W_k: Tensor
    W_v: Tensor
    W_o: Tensor
    grad_W_q: Tensor
    grad_W_k: Tensor
    grad_W_v: Tensor
    grad_W_o: Tensor

    def __getattr__(self, name: str) -> Tensor:
        if name in SHARED:
            shared_tile = name == "grad_weights" and not self.materialize
            return self._live()["grad_scores" if shared_tile else name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output buffer (B, T, C), and return it."""
        self._live()
        self._check("x", x)
        x = x.reshape(-1, self.d_model)
        for w, y in ((self.W_q, self.Q), (self.W_k, self.K), (self.W_v, self.V)):
            linear_fwd(x, w, None, y=self._rows(y))
        self._attend()
        linear_fwd(self._rows(self.attn_output), self.W_o, None, y=self._rows(self.output))
        self._has_output = True
        return self.output

    def loss(self, y: Tensor) -> float:
        """mean (output − y)² of the last forward. Writes its gradient to `grad_output`. From then on the layer is pending."""
        lease = self._live()
        self._check("y", y)
        self._need_output("loss")
        lease.begin()
        error = torch.sub(self.output, y, out=lease["grad_output"])
        loss = float(error.square().mean())
        error.mul_(2.0 / error.numel())
        self._has_loss = True
        return loss

    def backward(self, x: Tensor, grad_x: Tensor | None = None, *, grad_output: Tensor | None = None) -> None:
        """Add to the gradients of the weights, and overwrite `grad_x`. `grad_output` is the gradient of the output, by default
        the gradient that `loss` wrote.

        `grad_x` may be `grad_output` of another layer on the same workspace, because `grad_x` is written last.
        """
        lease = self._live()
        self._check("x", x)
        self._need_output("backward")
        for name, given in (("grad_x", grad_x), ("grad_output", grad_output)):
            if given is not None:
                self._check(name, given)
        if grad_output is None and not self._has_loss:
            raise BufferStateError(f"{self.name}: backward without a gradient; call loss(y) first or pass grad_output=")
        lease.begin()
        try:
            self._backward(
                lease, x.reshape(-1, self.d_model), grad_x, lease["grad_output"] if grad_output is None else grad_output
            )
        finally:
            self._has_loss = False
            lease.end()

    def _backward(self, lease: Lease, x: Tensor, grad_x: Tensor | None, grad_output: Tensor) -> None:
        rows, scratch = self._rows, self._scratch(lease, "linear")
        dy = grad_output.reshape(-1, self.d_model)
        grad_attn, grad_q, grad_k, grad_v = (lease[n] for n in ("grad_attn_output", "grad_Q", "grad_K", "grad_V"))
        linear_bwd_weight(dy, rows(self.attn_output), self.W_o, dw=self.grad_W_o, scratch=scratch)
        linear_bwd_input(dy, self.W_o, dx=rows(grad_attn), accumulate=False, scratch=scratch)
        self._attend_backward(lease)
        linear_bwd_weight(rows(grad_q), x, self.W_q, dw=self.grad_W_q, scratch=scratch)
        linear_bwd_weight(rows(grad_k), x, self.W_k, dw=self.grad_W_k, scratch=scratch)
        linear_bwd_weight(rows(grad_v), x, self.W_v, dw=self.grad_W_v, scratch=scratch)
        if grad_x is not None:
            dx = grad_x.view(-1, self.d_model)
            torch.mm(rows(grad_q), self.W_q, out=dx)
            dx.addmm_(rows(grad_k), self.W_k).addmm_(rows(grad_v), self.W_v)

    def zero_gradients(self) -> None:
        self._live()
        for name in WEIGHTS:
            getattr(self, f"grad_{name}").zero_()

    def update_weights(self, learning_rate: float) -> None:
        """One AdamW step (betas 0.9 and 0.999, eps 1e-8, decay 0.01) from the accumulated gradients, which do not change."""
        self._live()
        for name, weight in zip(WEIGHTS, self._weights(), strict=True):
            weight.grad = getattr(self, f"grad_{name}")
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save weights, gradients and optimizer state as one safetensors file. Replaces only files that a layer has saved."""
        self._live()
        tensors = {name: weight.contiguous() for name, weight in zip(WEIGHTS, self._weights(), strict=True)}
        for name in WEIGHTS:
            tensors[f"grad_{name}"] = getattr(self, f"grad_{name}")
            for key, value in self._optimizer.state[getattr(self, name)].items():
                tensors[f"{key}.{name}"] = value.contiguous()
        names = ("seq_len", "d_model", "batch_size", "is_causal", "n_head", "seed", "materialize")
        shape = {name: getattr(self, name) for name in names}
        settings = json.dumps(shape | {"dtype": str(self.dtype).removeprefix("torch.")})
        path = Path(path)
        check_replaceable(path, "tilegrad.init_attention")
        own_path = path.with_name(f"{path.name}.{os.getpid()}")  # several processes may save to one path
        with whole_file(own_path) as staged:
            save_tensors(tensors, staged, {"tilegrad.init_attention": settings})
        own_path.replace(path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], batch_size: int | None = None, *, device: torch.device | str = "cpu"
    ) -> SharedAttention:
        """Load a saved layer, with buffers of its own; `batch_size` replaces the batch size of the saved layer."""
        with safe_open(path, "pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if "tilegrad.init_attention" not in metadata:
                raise ValueError(
                    f"path: got {str(path)!r}, which is not a saved layer; accepted: a file written by save(path)"
                )
            settings: dict[str, Any] = json.loads(metadata["tilegrad.init_attention"])
            settings["dtype"] = getattr(torch, settings["dtype"])
            if batch_size is not None:
                settings["batch_size"] = batch_size
            layer = cls(**settings, predecessor=None, device=device)
            saved = set(file.keys())
            for name in WEIGHTS:
                getattr(layer, name).copy_(file.get_tensor(name))
                getattr(layer, f"grad_{name}").copy_(file.get_tensor(f"grad_{name}"))
                state = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in saved]
                if state:
                    moments = {key: file.get_tensor(f"{key}.{name}") for key in state}
                    layer._optimizer.state[getattr(layer, name)] = moments
        return layer

    def free(self) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None
            for name in ("Q", "K", "V", "attn_output", "output", "lse", "_forward_scratch"):
                delattr(self, name)

    def _attend(self) -> None:
        q, k, v, o = (self._heads(x) for x in (self.Q, self.K, self.V, self.attn_output))
        if not self.materialize:
            attention_fwd(q, k, v, self.mask, o=o, lse=self.lse, scratch=self._forward_scratch)
            return
        scores = self._scores(q, k)
        self.lse.copy_(torch.logsumexp(scores, -1))
        o.copy_(torch.softmax(scores, -1) @ v)

    def _attend_backward(self, lease: Lease) -> None:
        q, k, v, o = (self._heads(x) for x in (self.Q, self.K, self.V, self.attn_output))
        do, dq, dk, dv = (self._heads(lease[n]) for n in ("grad_attn_output", "grad_Q", "grad_K", "grad_V"))
        if not self.materialize:
            scratch = self._scratch(lease, "attention")
            attention_bwd(
                q, k, v, o, self.lse, do, None, self.mask, dq=dq, dk=dk, dv=dv, scratch=scratch, deterministic=True
            )
            return
        scale = self.mask.scale_for(q.shape[-1])
        grad_weights, grad_scores = lease["grad_weights"], lease["grad_scores"]
        p = grad_scores.copy_(self._scores(q, k)).sub_(self.lse[..., None]).exp_()
        dv.copy_(p.mT @ do)
        torch.matmul(do, v.mT, out=grad_weights)
        grad_scores.mul_(grad_weights - (do * o).sum(-1, keepdim=True))
        dq.copy_(scale * (grad_scores @ k))
        dk.copy_(scale * (grad_scores.mT @ q))

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        index = torch.arange(self.seq_len, device=self.device)
        attended = attends(self.mask, distance(index, index, self.seq_len, self.seq_len))
        return (self.mask.scale_for(q.shape[-1]) * (q @ k.mT)).masked_fill_(~attended, -torch.inf)

    def _needs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """All backward buffers of the layer: the seven buffers of SHARED, and the scratch of its ops."""
        b, t, c, h = self.batch_size, self.seq_len, self.d_model, self.n_head
        x, q = self._rows(self.Q), self._heads(self.Q)
        scratch = {} if self.materialize else attention_workspace(q, q, q, self.mask, backward=True, deterministic=True)
        tile = scratch.pop("tiled.dp", ((0,), self.dtype))
        matrices = ("grad_weights", "grad_scores") if self.materialize else ("grad_scores",)
        needs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: ((b, t, c), self.dtype) for name in SHARED if name not in ("grad_weights", "grad_scores")
        }
        needs |= dict.fromkeys(matrices, ((b, h, t, t), self.dtype) if self.materialize else tile)
        needs |= {f"linear.{n}": buffer for n, buffer in linear_workspace(x, self.W_q, backward=True).items()}
        return needs | {f"attention.{n}": buffer for n, buffer in scratch.items()}

    def _scratch(self, lease: Lease, op: str) -> dict[str, Tensor]:
        scratch = {n.removeprefix(f"{op}."): lease[n] for n in self._needs() if n.startswith(f"{op}.")}
        if op == "attention":
            scratch["tiled.dp"] = lease["grad_scores"]
        return scratch

    def _live(self) -> Lease:
        if self._lease is None:
            raise BufferStateError(f"{self.name} was freed; create a new layer with init_attention")
        return self._lease

    def _need_output(self, call: str) -> None:
        if not self._has_output:
            raise BufferStateError(f"{self.name}: {call} without an output; call forward(x) first")

    def _check(self, name: str, x: Tensor) -> None:
        check_tensor(name, x, (self.batch_size, self.seq_len, self.d_model), self.dtype, self.device)

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def _weights(self) -> list[Tensor]:
        return [getattr(self, name) for name in WEIGHTS]

    def _rows(self, x: Tensor) -> Tensor:
        return x.view(-1, self.d_model)

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, C) viewed as (B, H, T, D)."""
        return x.view(self.batch_size, self.seq_len, self.n_head, -1).transpose(1, 2)


def _check_arguments(
    seq_len: int, d_model: int, batch_size: int, n_head: int, dtype: torch.dtype, predecessor: object
) -> None:
    for name, value in (("seq_len", seq_len), ("d_model", d_model), ("batch_size", batch_size), ("n_head", n_head)):
        if not is_count(value):
            raise ValueError(f"{name}: got {value!r}; accepted: an int ≥ 1")
    if d_model % n_head or d_model // n_head > MAX_HEAD_DIM:
        raise ValueError(
            f"n_head: got {n_head} for d_model {d_model}; accepted: a divisor with d_model / n_head ≤ {MAX_HEAD_DIM}"
        )
    if dtype not in _DTYPES:
        raise TypeError(f"dtype: got {dtype}; accepted: {' or '.join(map(str, _DTYPES))}")
    if predecessor is not None and not isinstance(predecessor, SharedAttention):
        raise TypeError(f"predecessor: got {type(predecessor).__name__}; accepted: None or a layer from init_attention")


def init_attention(
    seq_len: int,
    d_model: int,
    batch_size: int,
    is_causal: bool,
    predecessor: SharedAttention | None = None,
    *,
    n_head: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    materialize: bool = False,
) -> SharedAttention:
    """An attention layer with forward, loss, backward and update_weights. With a `predecessor`, it shares the backward buffers
    of that layer, which live until the last layer that uses them is freed. Layers may be freed in any order.

    >>> import torch, tilegrad
    >>> first = tilegrad.init_attention(16, 32, 2, True, n_head=4)
    >>> second = tilegrad.init_attention(16, 32, 2, True, first, n_head=4, seed=1)
    >>> first.owns_grad_buffers, second.owns_grad_buffers
    (True, False)
    >>> x, y = torch.randn(2, 2, 16, 32)
    >>> before = second.forward(first.forward(x)).sub(y).square().mean().item()
    >>> loss = second.loss(y)                                    # second is pending until its backward returns
    >>> second.backward(first.output, grad_x=first.grad_output)  # the gradient of the input of second, the output of first
    >>> first.backward(x, grad_output=first.grad_output)
    >>> first.update_weights(1e-2); second.update_weights(1e-2)
    >>> second.forward(first.forward(x)).sub(y).square().mean().item() < before
    True
    >>> tilegrad.free_attention(first); tilegrad.free_attention(second)
    """
    return SharedAttention(
        seq_len,
        d_model,
        batch_size,
        is_causal,
        predecessor,
        n_head=n_head,
        device=device,
        dtype=dtype,
        seed=seed,
        materialize=materialize,
    )


def free_attention(layer: SharedAttention) -> None:
    """Free a layer. Shared backward buffers are freed with the last layer that uses them. A second call does nothing; later use
    of the layer raises."""
    layer.free()
