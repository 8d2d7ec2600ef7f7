import sys
import types

h = types.ModuleType("hypothesis")
st = types.ModuleType("hypothesis.strategies")


class Any_:
    def __getattr__(self, n):
        if n.startswith("__"):
            raise AttributeError(n)
        return self

    def __call__(self, *a, **k):
        return self


def _ga(n):
    if n.startswith("__"):
        raise AttributeError(n)
    return Any_()


st.__getattr__ = _ga
st.composite = lambda f: f
h.strategies = st
sys.modules["hypothesis"] = h
sys.modules["hypothesis.strategies"] = st
if "pytest" not in sys.modules:
    try:
        import pytest
    except ImportError:
        p = types.ModuleType("pytest")
        m = Any_()
        p.mark = m
        p.importorskip = lambda *a, **k: None
        p.fixture = lambda f: f
        p.MonkeyPatch = object

        class M:
            def __getattr__(self, n):
                def deco(*a, **k):
                    if len(a) == 1 and callable(a[0]) and not k:
                        return a[0]
                    return lambda f: f

                return deco

        p.mark = M()
        sys.modules["pytest"] = p
