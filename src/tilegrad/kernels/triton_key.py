"""Keys of kernels in Triton's cache on disk, so that only a change of code compiles a kernel again.

Triton's own key has the text of a kernel and of every function that it calls, with comments and docstrings, and the line where
each of them starts. A new line at the top of a file would thus compile all its kernels again. The key that this module sets has
no comments, docstrings or lines. It also has the code of our builtins, which Triton's key lacks. A cached kernel keeps the line
numbers of the version that compiled it: a profiler may show them.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import threading
from typing import Any

_ONE_THREAD = threading.RLock()  # `ast.parse` may fail if two threads run it (functional/compile_ahead.py)
OWN = __name__.partition(".")[0] + "."


def set_key(kernel: Any) -> None:
    """Sets the key of a kernel before Triton does. Does nothing the second time, and in the interpreter."""
    if getattr(kernel, "hash", "") is None:
        with _ONE_THREAD, kernel._hash_lock:
            if kernel.hash is None:
                _set_key(kernel)


def _set_key(kernel: Any) -> None:
    source, line = kernel._src, kernel.starting_line_number
    code, builtins = _code(source), ""
    kernel.hash = "recursive"  # placeholder in the key of a function whose code names itself
    for name in sorted(set(re.findall(r"[^\W\d]\w*", code))):
        x = kernel.__globals__.get(name)
        if not getattr(x, "__module__", "").startswith(OWN):
            continue
        if getattr(x, "__triton_builtin__", False):
            builtins += f"\n# {name} {_code(textwrap.dedent(inspect.getsource(x)))!r}"
        else:
            set_key(x)
    kernel._src, kernel.starting_line_number = code + builtins, 0
    kernel.hash = None
    try:
        assert kernel.cache_key  # sets kernel.hash
    finally:
        kernel._src, kernel.starting_line_number = source, line


def _code(source: str) -> str:
    """The code of a function without comments and docstring."""
    tree = ast.parse(source)
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
