"""Jinja2's sandbox for chat templates, which are untrusted code. Each text that a template writes has two limits:

    MAX_LINES    the most lines of code that run
    MAX_SIZE     the largest sum of the sizes of all strings and lists that are made, even temporary ones; a character
                 has size 1, an element of a list 8

Operators, calls and filters whose result can be much larger than their arguments are checked before they run, by an upper bound
on the size of the result. Afterwards the size of every result is counted: the value of each operator, call, filter, ~, slice
and literal, and each part of the output.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import cache, wraps
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import TraceFunction
    from jinja2 import Environment
    from jinja2.compiler import Frame
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.runtime import Context

MAX_LINES = 1_000_000
MAX_SIZE = 1 << 26
_ELEMENT = 8
_NUMBER = re.compile(r"\d+")
_NO_TEXT = (  # filters that choose, order or count elements, and do not convert them to text
    "abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items", "last", "length",
    "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "round", "select", "selectattr", "slice", "sort",
    "sum", "unique",
)  # fmt: skip
_PRODUCTS = ("expandtabs", "indent", "pprint", "tojson", "translate", "urlize", "wordwrap", "xmlattr")
# These types are not abstract: isinstance runs Python code for abstract types, and its lines would be counted.
_VIEWS = tuple(map(type, (dict[str, str]().keys(), dict[str, str]().values(), dict[str, str]().items())))
_COLLECTIONS: tuple[type[Collection[object]], ...] = (list, tuple, set, frozenset, dict, range, *_VIEWS)
_COUNTED: tuple[type[Collection[object]], ...] = (str, *_COLLECTIONS)
T = TypeVar("T")


@dataclass(slots=True)
class _Use:
    lines: int = 0
    size: int = 0


_use: ContextVar[_Use] = ContextVar("_use")


@contextmanager
def limits() -> Iterator[None]:
    """Stop a template at MAX_LINES and MAX_SIZE. Lines of this module are not counted."""
    use = _Use()

    def count(frame: FrameType, _event: str, _argument: object) -> TraceFunction | None:
        if frame.f_globals is globals():
            return None
        use.lines += 1
        if use.lines > MAX_LINES:
            raise ValueError(f"the template ran more than {MAX_LINES:,} lines")
        return count

    _use.set(use)
    outer = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(outer)


def _check(size: float, what: str) -> None:
    """Refuse a value of this size if the total would exceed MAX_SIZE."""
    if _use.get().size + size > MAX_SIZE:
        raise ValueError(f"{what} makes strings or lists of more than {MAX_SIZE:,} characters")


def _made(value: T, what: str) -> T:
    """Count the size of a new value, without the sizes of its elements, and return the value."""
    size = _own_size(value)
    _check(size, what)
    _use.get().size += size
    return value


def _own_size(value: object) -> int:
    """The size of a value without the sizes of its elements."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 8
    return _ELEMENT * len(value) if isinstance(value, _COLLECTIONS) else 0


def _size(value: object) -> int:
    """The size of a value with all nested elements. Counting stops above MAX_SIZE."""
    total, waiting = 0, [value]
    while waiting and total <= MAX_SIZE:
        one = waiting.pop()
        one = object.__getattribute__(one, "_Namespace__attrs") if type(one).__name__ == "Namespace" else one
        total += _own_size(one)
        if isinstance(one, _COLLECTIONS) and total <= MAX_SIZE:
            waiting.extend(one)
            waiting.extend(one.values() if isinstance(one, dict) else ())
    return total


def _bound(name: str, value: object, given: Collection[object], *, named: bool = False) -> float:
    """An upper bound of the size of value.name(given), of value|name(given) and of value % given.
    named: some of `given` are keyword arguments, so their order is not known."""
    size = _own_size if name in _NO_TEXT else _size
    length, others = size(value), sum(map(size, given))
    number = max((abs(one) for one in given if isinstance(one, int)), default=0)
    if name in ("%", "format", "format_map"):
        _check(length, name)
        text = str(value)
        fields, widths = text.count("%") + text.count("{"), map(int, _NUMBER.findall(text))
        return length + fields * (max(widths, default=0) + number + others)
    if name == "join":
        count = max(len(one) if isinstance(one, _COUNTED) else 0 for one in (value, *given))
        return length + others + count * min(length, others)
    if name == "replace" and len(given) > 1 and not named:
        _check(length, name)
        old, new, *_ = given
        return length + str(value).count(str(old)) * _size(new)
    if name in (*_PRODUCTS, "replace"):
        return (length + 1) * (1 + number + others)
    return length + number + others


def _operator_bound(operator: str, left: object, right: object) -> float:
    if operator == "%":
        return _bound("%", left, right if isinstance(right, tuple) else (right,)) if isinstance(left, str) else 0
    if operator == "**":
        return left.bit_length() * abs(right) / 8 if isinstance(left, int) and isinstance(right, int) else 0
    if operator == "*" and isinstance(left, int) != isinstance(right, int):
        number, other = (left, right) if isinstance(left, int) else (right, left)
        return number * _own_size(other) if isinstance(number, int) else 0
    return _own_size(left) + _own_size(right)


def _bounded(name: str, function: Callable[..., object], passed: tuple[type, ...]) -> Callable[..., object]:
    """The filter with a check of MAX_SIZE. Jinja2 passes some filters an extra first argument, of one of the types `passed`."""

    @wraps(function)
    def bounded(*args: object, **kwargs: object) -> object:
        first = isinstance(args[0], passed)
        value, *given = args[first:]
        value = [*value] if name == "join" and isinstance(value, Iterator) else value
        _check(_bound(name, value, (*given, *kwargs.values()), named=bool(kwargs)), name)
        return _made(function(*args[:first], value, *given, **kwargs), name)

    return bounded


def _raise_exception(message: str) -> None:
    """Templates call this to refuse a conversation."""
    raise ValueError(message)


@cache
def jinja() -> tuple[ModuleType, Environment]:
    """The module jinja2, and the sandbox. The sandbox also reads {% generation %} … {% endgeneration %}."""
    # Longer than 60 lines because Jinja2 is optional: subclasses of its classes can only be defined after it is imported.
    try:
        import jinja2
        from jinja2 import compiler, ext, nodes, sandbox
    except ImportError as error:
        raise ImportError(
            "data: got conversations and a chat template, which needs Jinja2: pip install 'tilegrad[chat]'"
        ) from error

    class Generation(ext.Extension):
        tags = {"generation"}  # noqa: RUF012, because Jinja2 declares a mutable class attribute

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("marked", [nodes.ContextReference()])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def marked(self, context: Context, caller: Callable[[], str]) -> str:
            begin, end = context["generation_marks"]
            return f"{begin}{caller()}{end}"

    class Generator(compiler.CodeGenerator):
        """Counts the sizes of values that the sandbox cannot intercept: ~, slices and literals."""

        def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
            self.write("environment.tilde(context, (")
            for one in node.nodes:
                self.visit(one, frame)
                self.write(", ")
            self.write("))")

        def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
            self._counted(super().visit_Getitem, node, frame, "a slice" if isinstance(node.arg, nodes.Slice) else "")

        def visit_List(self, node: nodes.List, frame: Frame) -> None:
            self._counted(super().visit_List, node, frame, "a list")

        def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
            self._counted(super().visit_Tuple, node, frame, "a tuple" if node.ctx == "load" else "")

        def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
            self._counted(super().visit_Dict, node, frame, "a dict")

        def _counted(self, visit: Callable[..., None], node: Node, frame: Frame, what: str) -> None:
            self.write("environment.made(" if what else "")
            visit(node, frame)
            self.write(f", {what!r})" if what else "")

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "*", "**", "%"})
        code_generator_class = Generator
        made = staticmethod(_made)

        def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
            _check(_operator_bound(operator, left, right), operator)
            return _made(super().call_binop(context, operator, left, right), operator)

        def call(self, context: Context, called: object, /, *args: object, **kwargs: object) -> object:
            method = getattr(called, "__wrapped__", called)  # the sandbox wraps str.format
            owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "a call")
            if isinstance(owner, str | bytes | int):
                args = tuple([*one] if isinstance(one, Iterator) else one for one in args)
                _check(_bound(name, owner, (*args, *kwargs.values()), named=bool(kwargs)), name)
            return _made(super().call(context, called, *args, **kwargs), name)

        def tilde(self, context: Context, values: Iterable[object]) -> str:
            return self.concat(str(_finalize(context, one)) for one in values)

        @staticmethod
        def concat(parts: Iterable[str]) -> str:
            return "".join([_made(part, "its text") for part in parts])

    @jinja2.pass_context  # so that Jinja2 computes no constants when it compiles a template
    def _finalize(_context: Context, value: object) -> object:
        if not isinstance(value, str):
            _check(_size(value), "its text")
        return value

    made = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        finalize=_finalize,
        optimized=False,
    )
    passed = (jinja2.runtime.Context, jinja2.Environment, nodes.EvalContext)
    made.filters = {name: _bounded(name, function, passed) for name, function in made.filters.items()}
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    made.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "sort_keys": False}
    return jinja2, made
