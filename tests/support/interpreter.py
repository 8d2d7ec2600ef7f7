"""Triton's interpreter. Triton chooses it at import; `interpreting` chooses it for some calls of a process.

Attention remembers the kernel of a call, so its tests run in a process of their own (`in_the_interpreter`).
"""

from __future__ import annotations

import importlib
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from support.forked import python
from tilegrad import kernels
from tilegrad.kernels import linear

KERNELS = Path(kernels.__file__).parent
Assign = Callable[[Any, str, Any], object]  # setattr, or a version of it that can be undone
INTEGERS, FLOATS = ("int32", "int64"), ("fp32", "fp64")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of in_the_interpreter")


def in_the_interpreter(*arguments: str) -> None:
    """Runs pytest with these arguments, of which the first is a file, in a process where Triton interprets."""
    quiet = ["-W", "ignore::DeprecationWarning", "-W", "ignore::RuntimeWarning"]  # warnings of numpy in the interpreter
    options = ["-q", "-p", "no:cacheprovider", "-n", "0", *quiet, *arguments]
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
            del os.environ[name]
        done = python("import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))", *options, timeout=3600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]


@contextmanager
def interpreting() -> Iterator[None]:
    """Triton's kernels are interpreted inside. It does nothing in a process where Triton always interprets."""
    if INTERPRETED:
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for file in (
        file for name in ("triton_ops", "few_rows", "round_both_orders") for file in KERNELS.glob(f"*/{name}.py")
    ):
        # @triton.jit of a module that is imported inside would interpret for ever
        importlib.import_module(f"tilegrad.kernels.{file.parent.name}.{file.stem}")
    made: dict[Any, Any] = {}

    def interpreted(jit: Any) -> Any:
        if jit.fn not in made:
            made[jit.fn] = InterpretedFunction(jit.fn)
        return made[jit.fn]

    with ExitStack() as changed, warnings.catch_warnings():
        for category in (DeprecationWarning, RuntimeWarning):  # warnings of numpy
            warnings.simplefilter("ignore", category)

        def assign(home: Any, name: str, value: Any) -> None:
            changed.enter_context(mock.patch.object(home, name, value))

        changed.enter_context(mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}))
        assign(JITFunction, "run", lambda jit, *args, **options: interpreted(jit).run(*args, **options))
        assign(JITFunction, "__call__", lambda jit, *args, **options: interpreted(jit)(*args, **options))
        changed.callback(prepare_the_language(assign).restore)
        round_bfloat16(assign)
        # Triton's loss pads rows for CUDA, and poisoned padding is NaN. On AMX oneDNN's products of bfloat16 read columns next
        # to a row and multiply them by zero, so such a product of an interpreted kernel would be NaN.
        assign(linear, "_has_bf16_products", lambda: False)
        yield


@contextmanager
def run_by(kernels: str, request: pytest.FixtureRequest) -> Iterator[None]:
    """If `kernels` is "triton", tables choose Triton's kernels inside, interpreted; else they choose as usual."""
    if kernels != "triton":
        yield
        return
    pytest.importorskip("triton", reason="needs Triton")
    if request.node.callspec.params.get("dtype") == torch.float64:
        pytest.skip("float64 runs torch's kernel there too")
    with interpreting():
        yield


def round_bfloat16(assign: Assign) -> None:
    """Makes the interpreter round bfloat16 as a device does. The interpreter stores it as the 16 bits of an integer.

    float32 is rounded to the nearest, ties to even. Without this the interpreter truncates: the error is twice as large and
    has one sign, which the closeness rule sees. Products (tl.dot) and arithmetic take the numbers, not the bits."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert, builder = interpreter._convert_float, interpreter.InterpreterBuilder
    dot, binary = builder.create_dot, builder.binary_op

    def rounded(x: NDArray[Any], source: Any, target: Any, mode: Any) -> NDArray[Any]:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(x, source, target, mode)  # type: ignore[no-any-return]
        bits = np.ascontiguousarray(x).view(np.uint32)
        nearest = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
        return np.where(np.isnan(x), (bits >> 16) | 0x40, nearest).astype(np.uint16).reshape(x.shape)

    def as_float32(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot_of_numbers(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, as_float32(a), as_float32(b), *rest)

    def binary_of_numbers(self: Any, x: Any, y: Any, op: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return binary(self, x, y, op)
        out = op(as_float32(x).data, as_float32(y).data)
        if out.dtype == bool:  # a comparison
            return interpreter.TensorHandle(out, x.dtype.scalar)
        return interpreter.TensorHandle(rounded(out, tl.float32, tl.bfloat16, None), tl.bfloat16)

    assign(interpreter, "_convert_float", rounded)
    assign(builder, "create_dot", dot_of_numbers)
    assign(builder, "binary_op", binary_of_numbers)


def prepare_the_language(assign: Assign) -> Any:
    """Makes the interpreter patch triton.language once, not at every call of a @triton.jit function, build each type and
    shape of a block once, and find the common type of two operands in fewer steps: tests of many small programs take less
    than half the time. No arithmetic changes. `restore()` of the returned object leaves triton.language as it was."""
    import triton.language as tl
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    TensorHandle = interpreter.TensorHandle
    both = FunctionType((lambda: None).__code__, {"tl": tl, "core": core})

    def patch_attr(home: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function, semantic = getattr(member, "__wrapped__", member), TritonSemantic(builder)

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*arguments, **named)

        scope.set_attr(home, name, call)

    with mock.patch.object(interpreter, "_patch_attr", patch_attr):
        prepared = interpreter._patch_lang(both)
    assign(interpreter, "_patch_lang", lambda _function: interpreter._LangPatchScope())

    # Sums and products of integers are computed again in int64, for an assertion that only options.debug would make.
    builder = interpreter.interpreter_builder
    assign(builder, "options", replace(builder.options, sanitize_overflow=False))

    dtypes: dict[str, Any] = {}
    find = interpreter._get_np_dtype

    def numpy_dtype(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = find(dtype)
        return dtypes[dtype.name]

    assign(interpreter, "_get_np_dtype", numpy_dtype)

    made: dict[tuple[Any, ...], dict[str, Any]] = {}
    make = core.block_type.__init__

    def extents(shape: Any) -> tuple[Any, Any]:  # numel and shape of a tensor
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(n) for n in shape])

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (type(element_ty), element_ty.name, *(getattr(n, "value", n) for n in shape))
        if key not in made:
            make(self, element_ty, shape)
            made[key] = vars(self) | {"extents": extents(self.shape)}
        self.__dict__.update(made[key])

    scalar = extents(())

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.extents if type.is_block() else scalar

    def like(x: Any, other: Any) -> Any:
        """x with the type of the tensor `other`, where that takes no more than a splat; else None."""
        if type(other) is not core.tensor or other.dtype.name not in INTEGERS + FLOATS:
            return None
        if type(x) is core.tensor:
            if x.type.name == other.type.name:
                return x
            if x.dtype.name != other.dtype.name or x.type.is_block():
                return None
            x = x.handle.data
        elif other.dtype.name in INTEGERS:
            if type(x) is not int or abs(x) >= 1 << 31:
                return None
        elif type(x) not in (int, float):
            return None
        shape = other.type.shape if other.type.is_block() else 1
        return core.tensor(TensorHandle(np.full(shape, x, dtype=numpy_dtype(other.dtype)), other.dtype), other.type)

    find_types = TritonSemantic.binary_op_type_checking_impl

    def operands(self: Any, left: Any, right: Any, *options: bool, **named: bool) -> Any:
        if not named and (len(options) < 3 or options[2]):  # both get one type
            if (made := like(right, left)) is not None:
                return left, made
            if (made := like(left, right)) is not None:
                return made, right
        return find_types(self, left, right, *options, **named)

    def splat(x: Any, shape: Any) -> Any:
        kind = x.handle.dtype.scalar
        data = np.full(shape, x.handle.data, dtype=numpy_dtype(kind))
        return core.tensor(TensorHandle(data, kind), core.block_type(x.dtype, shape))

    find_shape = TritonSemantic.broadcast_impl_value

    def of_one_shape(self: Any, left: Any, right: Any) -> Any:
        blocks = left.type.is_block(), right.type.is_block()
        if blocks == (True, False):
            return left, splat(right, left.type.shape)
        if blocks == (False, True):
            return splat(left, right.type.shape), right
        if blocks == (False, False) or left.type.shape.values == right.type.shape.values:
            return left, right
        return find_shape(self, left, right)

    assign(TritonSemantic, "binary_op_type_checking_impl", operands)
    assign(TritonSemantic, "broadcast_impl_value", of_one_shape)
    equal, unwrap = core.dtype.__eq__, core._unwrap_if_constexpr
    assign(core.dtype, "__eq__", lambda self, other: self is other or equal(self, other))
    plain = {bool, int, float, str, type(None), core.tensor, core.dtype, core.block_type}
    assign(core, "_unwrap_if_constexpr", lambda x: x if type(x) in plain else unwrap(x))
    assign(core.block_type, "__init__", block_type)
    assign(core.tensor, "__init__", tensor)
    return prepared
