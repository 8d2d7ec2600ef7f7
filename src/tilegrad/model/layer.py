"""The parts of layers: parameters, and the declaration of every buffer that a program on (b, t) tokens uses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor

from ..kernels.attention.context import Ranks
from ..kernels.fp8_linear import Factor
from ..kernels.fp8_linear.state import STATE
from ..kernels.residual import keep_gradient, keep_gradient_workspace
from ..kernels.scratch import Form, Scratch, Shapes, accumulation_dtype
from ..memory.planned.trace import Handle
from ..memory.types import BufferType, Role
from ..text.untrusted import check_choice
from .config import ModelConfig

if TYPE_CHECKING:
    from .fp8 import RoundedWeight
    from .lora import LoraConfig

Linear = Literal["plain", "fp8", "fp8-all"]  # products in float8: none; y and dx; y, dx and dW
HeadProducts = Literal["plain", "fp8"]  # products of the head in float8: none; all
Buffer: TypeAlias = Tensor  # a Handle while the program is traced; layers and ops are written for tensors
Kept = Literal["float32", "bfloat16"]
Masters = Literal["float32", "none"]
_SPLIT = 1 << 20  # the most elements drawn at once, to avoid a second copy of a large matrix


@dataclass(frozen=True, slots=True)
class Normal:
    """N(0, std²), drawn on the CPU, so that all devices get the same values."""

    std: float

    def fill(self, x: Tensor, generator: torch.Generator) -> None:
        for part in x.view(-1).split(_SPLIT):
            part.copy_(torch.randn(part.shape, generator=generator).mul_(self.std))


@dataclass(frozen=True, slots=True)
class Constant:
    value: float

    def fill(self, x: Tensor, _generator: torch.Generator) -> None:
        x.fill_(self.value)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform in ±bound, drawn on the CPU."""

    bound: float

    def fill(self, x: Tensor, generator: torch.Generator) -> None:
        for part in x.view(-1).split(_SPLIT):
            part.copy_(torch.rand(part.shape, generator=generator).mul_(2 * self.bound).sub_(self.bound))


Init: TypeAlias = Normal | Uniform | Constant
WEIGHT = Normal(0.02)  # embeddings, the head, and linear layers that do not write to the residual stream


@dataclass(frozen=True, slots=True)
class States:
    """The dtypes of the moments, master and gradient that training keeps for each parameter. In float64 training all are
    float64.

    moments     AdamW's m and v; in bfloat16 they are rounded stochastically (kernels/stochastic_rounding.py)
    masters     "none": the parameters are bfloat16, and rounded stochastically after each update
    gradients   "bfloat16": an op writes a gradient in float32, which is then added to a sum in bfloat16

    >>> States().lean, States(moments="bfloat16").lean
    (False, True)
    """

    moments: Kept = "float32"
    masters: Masters = "float32"
    gradients: Kept = "float32"

    def __post_init__(self) -> None:
        for name, kinds in (("moments", Kept), ("masters", Masters), ("gradients", Kept)):
            check_choice(self, name, get_args(kinds), " or ")

    @property
    def lean(self) -> bool:
        return self != FULL

    @property
    def rounds(self) -> bool:
        """Whether an update rounds stochastically."""
        return self.moments == "bfloat16" or self.masters == "none"

    @property
    def multiple(self) -> int:
        """The space of a parameter in an arena is a multiple of this many elements, which is a multiple of 64 bytes in every
        dtype. So the layouts in elements are the same."""
        return 32 if self.lean else 1


FULL = States()


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter. Ops read `value` and add to `grad`; the optimizer updates `master`. By default `grad` and `master` are
    float32 or float64.

    `master` is `value` itself, except with a shorter compute dtype on CUDA; on a CPU the ops round what they read. With
    accumulate=False the first op of a backward that computes `grad` overwrites it.

    Without masters (States.masters), `master` is `value` in the compute dtype, on every device. With gradients in bfloat16,
    `grad` has the gradient of one micro-batch, which an op overwrites, and `keep` adds it to `total`, the sum of a step.

    A frozen parameter has no gradient or moment: `grad` is None, and `master` is `value`, in the compute dtype on CUDA and
    without masters.

    `matrices` are the (rows, columns) of the matrices in the weight of a linear layer, one after the other, which Muon updates.
    The weight of q, k and v together has three matrices. Other parameters have none.
    """

    name: str
    value: Buffer
    grad: Buffer | None
    master: Buffer
    init: Init
    accumulate: bool
    matrices: tuple[tuple[int, int], ...] = ()
    total: Buffer | None = None
    adds: bool = True  # False in the first micro-batch of a step
    keep_scratch: Scratch = field(default_factory=dict)

    @property
    def kept_grad(self) -> Buffer | None:
        """The gradient of a step, which the optimizer reads."""
        return self.grad if self.total is None else self.total

    def keep(self, *, again: bool = False) -> None:
        """total += grad, or total = grad in the first micro-batch of a step; again: `total` already has the `grad` of another
        op."""
        if self.total is not None and self.grad is not None:
            accumulate, scratch = self.adds or again, self.keep_scratch
            keep_gradient(self.grad, total=self.total, accumulate=accumulate, scratch=scratch)


@dataclass(frozen=True, slots=True)
class Packed:
    """The documents of packed rows: tokens attend only to their own document, and positions begin at 0 in each document.

    cu_seqlens   (B·documents + 1,) int32: 0, then the end of each document in the B·T tokens; unused entries are B·T
    positions    (B, T) int64
    """

    cu_seqlens: Buffer
    positions: Buffer


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The KV cache of a decoder: keys and values of `sequences` sequences with at most `capacity` tokens each."""

    sequences: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Declare:
    """Declares the handles of a program on b sequences of t tokens. Handles with the same name are one buffer.

    accumulate      False: the program is the first micro-batch of a step and overwrites parameter gradients
    linear          "fp8": the blocks' linear layers compute y and dx in float8; "fp8-all": dW too
    deterministic   False: attention's backward may add in any order, which may be faster
    context         the ranks that share each sequence, t tokens on each; None: this rank has whole sequences
    documents       the most documents in a row of t tokens; 0: a row is one sequence
    lora            adapters of the linear layers of the blocks; every other parameter is frozen
    freeze          fnmatch patterns of the names of frozen parameters
    invariant       the bits of a row of the forward depend only on the tokens of its sequence up to that row
    windows         windows of other programs on the same buffers: the scratch of attention is large enough for all of them
    cache           a program of a decoder: the prefill of packed prompts (documents > 0), or a step on one token of each
                    sequence. Every parameter is frozen
    states          dtypes of masters and gradients
    shares_gradients  gradients share memory with activations, and live only from the backward to the update
    head            "fp8": the head's products are in float8
    scales          the scale states of tensors that are rounded to float8, by name
    factors         which factor of a product each of these tensors is
    rounded         the weights that are rounded to float8 once a step, by name
    """

    config: ModelConfig
    b: int
    t: int
    dtype: torch.dtype
    device: torch.device
    accumulate: bool = True
    linear: Linear = "plain"
    deterministic: bool = True
    context: Ranks | None = None
    documents: int = 0
    lora: LoraConfig | None = None
    freeze: tuple[str, ...] = ()
    invariant: bool = False
    windows: tuple[int | None, ...] = ()
    cache: CacheSize | None = None
    states: States = FULL
    shares_gradients: bool = False
    head: HeadProducts = "plain"
    params: dict[str, Param] = field(default_factory=dict)
    scales: dict[str, Buffer] = field(default_factory=dict)
    factors: dict[str, Factor] = field(default_factory=dict)
    rounded: dict[str, RoundedWeight] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """The number of rows of the residual stream."""
        return self.b * self.t

    @property
    def packed(self) -> Packed | None:
        if not self.documents:
            return None
        ends = self.buffer("inputs.cu_seqlens", (self.b * self.documents + 1,), torch.int32, role="inputs")
        return Packed(ends, self.buffer("inputs.positions", (self.b, self.t), torch.int64, role="inputs"))

    @property
    def decodes(self) -> bool:
        """Whether this program is the step of a decoder, in which each sequence continues its cache by one token."""
        return self.cache is not None and not self.documents

    @property
    def tokens(self) -> Buffer:
        return self.buffer("inputs.tokens", (self.b, self.t), torch.int64, role="inputs")

    @property
    def positions(self) -> Buffer | None:
        """The position (B, T) of each token; None: the positions of a row are 0 … T − 1."""
        if not self.decodes:
            return self.packed.positions if self.packed else None
        return self.buffer("inputs.positions", (self.b, self.t), torch.int64, role="inputs")

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """The dtype of gradients, statistics and master weights."""
        return accumulation_dtype(self.dtype)

    @property
    def onto_stream(self) -> Normal:
        """The initial values of the 2·n_layer projections onto the residual stream, whose sum has the variance of one
        WEIGHT."""
        return Normal(WEIGHT.std / math.sqrt(2 * self.config.n_layer))

    def param(self, name: str, *shape: int, init: Init, matrices: tuple[tuple[int, int], ...] = ()) -> Param:
        """The parameter `name`, with its gradient unless it is frozen. The first call with a name declares it."""
        accumulate = self.accumulate and self.states.gradients == "float32"
        if name not in self.params and self.is_frozen(name):
            lean = self.device.type != "cpu" or self.states.masters == "none"
            rounded = lean or (self.cache is not None and not self.invariant)
            value = self.buffer(name, shape, self.dtype if rounded else self.accumulation_dtype, role="frozen")
            self.params[name] = Param(name, value, None, value, init, accumulate, matrices, adds=self.accumulate)
        elif name not in self.params:
            acc, states = self.accumulation_dtype, self.states
            has_master = states.masters != "none"
            master = self.buffer(name, shape, acc if has_master else self.dtype, role="params")
            copied = has_master and self.dtype != acc and self.device.type != "cpu"
            value = self.buffer(f"{name} (compute)", shape, self.dtype, role="params") if copied else master
            in_bfloat16 = states.gradients == "bfloat16"
            role: Role = "activations" if self.shares_gradients else "grads"
            kept = self.buffer(f"d {name}", shape, torch.bfloat16 if in_bfloat16 else acc, role=role, flat=True)
            grad, total = (self.buffer(f"d {name} (float32)", shape, acc), kept) if in_bfloat16 else (kept, None)
            scratch = (
                self.scratch("keep", keep_gradient_workspace(Form(shape, acc, self.device))) if in_bfloat16 else {}
            )
            total_fields = (total, self.accumulate, scratch)
            self.params[name] = Param(name, value, grad, master, init, accumulate, matrices, *total_fields)
        return self.params[name]

    def is_frozen(self, name: str) -> bool:
        base = self.lora is not None and not is_adapter(name)
        return base or self.cache is not None or any(fnmatchcase(name, pattern) for pattern in self.freeze)

    def scale(self, name: str, factor: Factor) -> Buffer:
        """The scale state of a tensor that is rounded to float8."""
        self.factors[name] = factor
        self.scales[name] = self.buffer(f"scale.{name}", STATE, torch.float32, role="optimizer")
        return self.scales[name]

    def form(self, columns: int) -> Form:
        """The shape and dtype of (N, columns) in the compute dtype, for a workspace query."""
        return Form((self.n, columns), self.dtype, self.device)

    def rows(self, name: str, columns: int, type: BufferType = BufferType.TEMP) -> Buffer:
        """(N, columns) in the compute dtype."""
        return self.buffer(name, (self.n, columns), type=type)

    def buffer(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        *,
        type: BufferType = BufferType.TEMP,
        role: Role = "activations",
        pitch: int | None = None,
        flat: bool = False,
    ) -> Buffer:
        """A buffer of the program. flat: it is in one flat range with the buffers of other parameters."""
        layer = _layer_of(name)
        if self.decodes and (role == "activations" or name.startswith("inputs.")):
            name = f"step.{name}"  # because the prefill has a buffer of this name with another size
        multiple = self.states.multiple if role == "params" or flat else 1
        where = (type, role, layer, self.device, pitch, multiple)
        return cast(Buffer, Handle(name, shape, dtype or self.dtype, *where))

    def scratch(self, name: str, shapes: Shapes, types: dict[str, BufferType] | None = None) -> Scratch:
        """A buffer for each entry of the workspace of an op."""
        kinds = types or {}
        return {
            key: self.buffer(f"scratch.{name}.{key}", shape, dtype, type=kinds.get(key, BufferType.TEMP))
            for key, (shape, dtype) in shapes.items()
        }


def is_adapter(name: str) -> bool:
    """Whether a parameter is an A or a B of model/lora.py."""
    return name.endswith((".lora_a", ".lora_b"))


def _layer_of(name: str) -> str:
    """The block or layer of a parameter: blocks.3 for blocks.3.attn.qkv.weight, ln_f for ln_f.weight."""
    parts = name.removeprefix("d ").split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]
