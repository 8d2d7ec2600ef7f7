"""The loss of causal language models of transformers without logits, by `register(linear_cross_entropy=True)`.

While a model is in training mode and gets labels, its lm_head returns a `Logits`: the hidden states and the weights, not yet
multiplied. A model may scale or cap logits and select rows of them; a `Logits` records these operations. torch's
`cross_entropy` of a `Logits` calls `tilegrad.linear_cross_entropy`. So transformers' own loss function is unchanged: it shifts
labels, ignores −100 and divides by num_items_in_batch. Without labels, or in evaluation mode, logits are computed as usual.

`_wrap` changes the forward of every class named …ForCausalLM or …LMHeadModel, even of a class that is defined later.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..functional.linear_cross_entropy import linear_cross_entropy

NAMES = ("ForCausalLM", "LMHeadModel")
_ACCEPTED = (
    "a causal language model whose logits are only scaled, capped and given to cross_entropy; "
    "call register(linear_cross_entropy=False) for this model"
)
_enabled = False
_watching = False


class Logits:
    """Logits that are not computed: l = inner · (x wᵀ + bias), or with a cap outer · tanh(inner · (x wᵀ + bias))."""

    def __init__(
        self, x: Tensor, w: Tensor, bias: Tensor | None, inner: float = 1.0, outer: float | None = None
    ) -> None:
        self.x, self.w, self.bias, self.inner, self.outer = x, w, bias, inner, outer

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.x.shape[:-1], self.w.shape[0]))

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Logits:
        return self

    def to(self, other: torch.dtype | torch.device) -> Logits:
        if isinstance(other, torch.device) and other != self.device:
            _refuse(f"were moved to {other}")
        return self

    def view(self, *shape: int) -> Logits:
        if shape[-1] != self.w.shape[0]:
            _refuse(f"were viewed as {shape}, but the vocabulary has {self.w.shape[0]} tokens")
        return self._of(self.x.reshape(*shape[:-1], self.x.shape[-1]))

    reshape = view

    def __getitem__(self, key: Any) -> Logits:
        keys = key if isinstance(key, tuple) else (key,)
        rows = len(keys) < self.x.ndim if Ellipsis not in keys else keys[-1] is Ellipsis
        if not rows and keys[-1] != slice(None):
            _refuse(f"were indexed by {key!r}, which selects columns")
        return self._of(self.x[key])

    def __mul__(self, factor: float) -> Logits:
        if not isinstance(factor, int | float):
            _refuse(f"were multiplied by a {type(factor).__name__}")
        if self.outer is None:
            return Logits(self.x, self.w, self.bias, self.inner * factor)
        return Logits(self.x, self.w, self.bias, self.inner, self.outer * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Logits:
        if not isinstance(divisor, int | float):
            _refuse(f"were divided by a {type(divisor).__name__}")
        return self * (1.0 / divisor)

    def tanh(self) -> Logits:
        if self.outer is not None:
            _refuse("were capped twice")
        return Logits(self.x, self.w, self.bias, self.inner, 1.0)

    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: Any = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """torch.nn.functional.cross_entropy of these logits."""
        if weight is not None or size_average is not None or reduce is not None:
            _refuse("were given to cross_entropy with weight, size_average or reduce")
        factor = self.inner * (1.0 if self.outer is None else self.outer)
        x, bias = self.x, self.bias
        if abs(factor - 1.0) > 1e-12:
            x, bias = x * factor, None if bias is None else bias * factor
        return linear_cross_entropy(
            x,
            self.w,
            target,
            bias=bias,
            softcap=self.outer,
            label_smoothing=label_smoothing,
            reduction=reduction,
            ignore_index=ignore_index,
        )

    float = contiguous  # a no-op, because the loss is float32 anyway

    def _of(self, x: Tensor) -> Logits:
        return Logits(x, self.w, self.bias, self.inner, self.outer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"were asked for .{name}")

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        methods: dict[Any, Callable[..., Any]] = {torch.tanh: cls.tanh, cross_entropy: cls.cross_entropy}
        ours = methods.get(function)
        given = dict(kwargs or {})
        first = args[0] if args else given.pop("input", None)
        if ours is None or not isinstance(first, cls):
            _refuse(f"were given to {getattr(function, '__name__', function)}")
        return ours(first, *args[1:], **given)


def _refuse(got: str) -> NoReturn:
    raise NotImplementedError(
        f"logits: linear_cross_entropy does not form them in training with labels, and they {got}; accepted: {_ACCEPTED}"
    )


def use_linear_cross_entropy(*, enabled: bool) -> None:
    """Sets whether causal language models of transformers train without logits."""
    global _enabled, _watching
    _enabled = enabled
    if _watching or not enabled:
        return
    from transformers import PreTrainedModel

    define: Any = PreTrainedModel.__init_subclass__.__func__

    def define_and_wrap(cls: type[Any], /, **options: Any) -> None:
        define(cls, **options)
        _wrap(cls)

    PreTrainedModel.__init_subclass__ = classmethod(define_and_wrap)
    _watching = True
    found = [PreTrainedModel]
    while found:
        cls = found.pop()
        found += cls.__subclasses__()
        _wrap(cls)


def _wrap(cls: type[nn.Module]) -> None:
    """Wraps the forward that the class itself defines."""
    forward: Any = vars(cls).get("forward")
    if forward is None or not any(name in cls.__name__ for name in NAMES):
        return
    parameters = list(inspect.signature(forward).parameters)
    if "labels" not in parameters:
        return
    position = parameters.index("labels")

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = args[position - 1] if len(args) >= position else kwargs.get("labels")
        if not _enabled or labels is None or not self.training:
            return forward(self, *args, **kwargs)
        head = self.get_output_embeddings()
        _check_head(type(self).__name__, head)
        deferred = head.forward
        if not isinstance(deferred, _Deferred):
            deferred = head.forward = _Deferred(head)
        was_active, deferred.active = deferred.active, True
        try:
            return forward(self, *args, **kwargs)
        finally:
            deferred.active = was_active

    cls.forward = wrapped


class _Deferred:
    """The forward of an lm_head; while it is active it returns `Logits`. It is never removed from the lm_head, because
    torch.compile can't trace that."""

    def __init__(self, head: nn.Linear) -> None:
        self.head, self.active = head, False

    def __call__(self, x: Tensor) -> Logits | Tensor:
        if self.active:
            return Logits(x, self.head.weight, self.head.bias)
        return nn.functional.linear(x, self.head.weight, self.head.bias)


def _check_head(model: str, head: Any) -> None:
    plain = type(head) is nn.Linear and type(head.weight) in (Tensor, nn.Parameter)
    own = plain and isinstance(vars(head).get("forward", _Deferred(head)), _Deferred)
    if not own or head.weight.shape != (head.out_features, head.in_features):
        weight = getattr(head, "weight", None)
        kind = type(head).__name__ if weight is None else f"{type(head).__name__} with a {type(weight).__name__}"
        shape = f" of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else ""
        raise NotImplementedError(
            f"lm_head: linear_cross_entropy got {kind}{shape} in {model}; accepted: a torch.nn.Linear with its whole weight, "
            "without an adapter, quantization, sharding or offloading; call register(linear_cross_entropy=False) for this model"
        )
