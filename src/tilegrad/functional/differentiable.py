"""Registers a pair of torch.library ops, <name>_fwd and <name>_bwd, with autograd, autocast, fake tensors and vmap.

Compilers, fake tensors, dispatch modes and autocast see the ops themselves. torch.func transforms see an autograd.Function
around each op. Second derivatives and forward mode raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .call import autocast

Op = Callable[..., Any]


def register(
    library: torch.library.Library,
    name: str,
    public_name: str,
    kernels: tuple[Op, Op],
    fakes: tuple[Op, Op],
    save: Callable[..., None],
    gradient: Op,
    vmaps: tuple[Op, Op],
    *,
    casts: bool = True,
) -> tuple[Op, Op]:
    """Registers both ops, whose schemas are already defined. Returns two functions that call the ops, under a torch.func
    transform each in an autograd.Function. With `casts`, the first arguments of both ops are q, k and v, and autocast casts
    them in the forward.

    `kernels`, `fakes` and `vmaps` are (forward, backward) pairs of functions. `save(ctx, inputs, output)` and
    `gradient(ctx, *grads)` are the forward op's setup_context and backward for autograd.
    """

    def no_second_derivative(*_: object) -> NoReturn:
        raise NotImplementedError(
            f"{public_name} has no second derivative: its backward is not differentiable; "
            "call backward or grad without create_graph=True"
        )

    def under_autocast(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> object:
        q, k, v = autocast(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            return forward(q, k, v, *rest)

    forward, backward = (getattr(torch.ops.tilegrad, f"{name}_{direction}") for direction in ("fwd", "bwd"))
    for device in ("CPU", "CUDA"):
        library.impl(f"{name}_fwd", kernels[0], device)
        library.impl(f"{name}_bwd", kernels[1], device)
        if casts:
            library.impl(f"{name}_fwd", under_autocast, f"Autocast{device}")
    for direction, fake, vmap in zip(("fwd", "bwd"), fakes, vmaps, strict=True):
        torch.library.register_fake(f"tilegrad::{name}_{direction}", fake, lib=library)
        torch.library.register_vmap(f"tilegrad::{name}_{direction}", vmap, lib=library)
    torch.library.register_autograd(f"tilegrad::{name}_fwd", gradient, setup_context=save, lib=library)
    torch.library.register_autograd(f"tilegrad::{name}_bwd", no_second_derivative, lib=library)
    nothing_saved = lambda ctx, inputs, output: None  # noqa: E731, ARG005
    return _for_transforms(public_name, forward, save, gradient), _for_transforms(
        public_name, backward, nothing_saved, no_second_derivative
    )


def _for_transforms(public_name: str, op: Op, save: Callable[..., None], gradient: Op) -> Op:
    """A function that calls an op or, under a torch.func transform, an autograd.Function around it."""

    class Function(torch.autograd.Function):
        generate_vmap_rule = True
        forward = staticmethod(lambda *arguments: op(*arguments))
        setup_context = staticmethod(save)
        backward = staticmethod(gradient)
        jvp = staticmethod(lambda *_: raise_forward_mode(public_name))  # type: ignore[assignment]  # torch's jvp has a ctx

    def call(*arguments: Any) -> Any:
        return (Function.apply if torch._C._are_functorch_transforms_active() else op)(*arguments)

    return call


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether forward-mode AD differentiates one of the tensors."""
    return forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )


def raise_forward_mode(public_name: str) -> NoReturn:
    raise NotImplementedError(
        f"{public_name} has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, dual tensors); "
        "use reverse mode: backward, torch.func.grad, vjp or jacrev"
    )


def batching_rule(op: Callable[..., Any], tensors: int, folds: Callable[..., bool]) -> Callable[..., Any]:
    """vmap of an op whose first `tensors` arguments have a batch dimension B at 0, or are None. If folds(in_dims, arguments) is
    true, samples are folded into B. Otherwise there is one call per sample."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        n = info.batch_size
        in_dims = tuple(d if isinstance(d, int) else None for d in in_dims)  # the in_dim of a list is a list of None
        first = [x if d is None else x.movedim(d, 0) for x, d in zip(arguments, in_dims, strict=True)]
        if folds(in_dims, arguments):
            own = [
                x if x is None else (x.expand(n, *x.shape) if d is None else x).flatten(0, 1)
                for x, d in zip(first[:tensors], in_dims, strict=False)
            ]
            results = op(*own, *arguments[tensors:])
            found = tuple(x.unflatten(0, (n, -1)) if x.ndim > 1 else x.expand(n, *x.shape) for x in results)
            return found, (0,) * len(found)
        calls = [op(*(x if d is None else x[i] for x, d in zip(first, in_dims, strict=True))) for i in range(n)]
        return tuple(map(torch.stack, zip(*calls, strict=True))), (0,) * len(calls[0])

    return rule
