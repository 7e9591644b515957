"""Analyses of what happens inside a model, through its hook points and `interp.protocol`.

The analyses are in `effects` (values are changed), `reading` (caches are read), `spectral`
(singular values and weights), `features` (dictionaries), `directions`, `alignment` and `tracing`
(attribution graphs); `store` keeps values of many texts. Read `protocol` first, which says what a
model must have; then `inputs` (texts and positions in them), `metrics`, `pairs` of texts, `edits`
and `results`, the tables that `pictures` draws; and then the `graph` of a model and `runs` (sweeps,
masked runs, gradients). Every analysis stands on these and on `numbers`, and can be read alone
after them; `cli` has a file for each command.

A name is imported when it is first used. `__init__.pyi` says where each is.
"""

import ast as _ast
import importlib as _importlib
import sys as _sys
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path
from typing import Any as _Any

from interp import shadowed as _shadowed


def _modules() -> dict[str, str]:
    """The module of each public name, as `__init__.pyi` imports it."""
    stub = _Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    modules = {}
    for statement in _ast.parse(stub).body:
        if isinstance(statement, _ast.ImportFrom) and statement.module is not None:
            modules |= {alias.name: statement.module for alias in statement.names}
    return modules


_MODULES = _modules()

__all__ = [name for name in _MODULES if not name.startswith("_")]


def __getattr__(name: str) -> _Any:
    """Import a public name, or a module of this package.

    Raises:
        AttributeError: if there is none; with close matches.
    """
    module = _importlib.import_module(_MODULES.get(name, __name__))
    # A name of a module may not be imported yet by the package that has it.
    if name in vars(module):
        value = vars(module)[name]
    elif not name.startswith("_") and _find_spec(f"{module.__name__}.{name}"):
        value = _importlib.import_module(f"{module.__name__}.{name}")
    else:
        from hooks.base import missing_name

        return missing_name(__name__, __all__)(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# The command line makes these checks itself, and prints their errors without a traceback.
if _sys.argv[:1] != ["-m"]:
    _shadowed.require_own("hooks")
    _shadowed.warn_of_another_models()
