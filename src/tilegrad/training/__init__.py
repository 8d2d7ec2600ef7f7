"""The step and the loop: data → forward → loss → backward → reduce → clip → AdamW → checkpoint.

The package is also a function, `tilegrad.train(config)`, which is `tilegrad.training.api.train`: a package and a function of one
name are one attribute of `tilegrad`, so this one can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from .api import train

        return train(*arguments, **options)


sys.modules[__name__].__class__ = _CallablePackage
