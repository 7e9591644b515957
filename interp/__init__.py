"""Analyses of what happens inside a model: of changed values (`effects`), caches (`reading`),
weights and singular values (`spectral`), dictionaries (`features`), `directions`, two models
(`diffing`), `alignment`, `attribution_graphs` and `steps` of a text, with `claims` that test
findings, `store` for values of many texts and `many` for many examples.

Read `protocol` first, which defines the parts that a model needs, then `inputs`, `measuring`,
`metrics`, `pairs` and `edits`, the tables in `results` that `plots` draws, the `graph` of a model
and its `runs`, and then the analyses in any order. The other files are checks (`kinds`,
`shadowed`), numbers (`numbers`), the form of saved results (`json_form`), names of other libraries
(`hints`, `transformer_lens`), the page of `report`, the command line (`cli`, `__main__`), and the
former modules `pictures` and `tracing`, whose import raises an error with the new name.
"""

import ast as _ast
import importlib as _importlib
import sys as _sys
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path
from typing import Any as _Any

from interp import shadowed as _shadowed


def _modules() -> dict[str, str]:
    """Return the module of each public name, from the imports in `__init__.pyi`."""
    # The stub is always there: the wheel contains all files of the package, such as this stub and
    # the tables in JSON. A tool that packs a program into one file must include them as data.
    stub = _Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    modules = {}
    for statement in _ast.parse(stub).body:
        if isinstance(statement, _ast.ImportFrom) and statement.module is not None:
            modules |= {alias.name: statement.module for alias in statement.names}
    return modules


_MODULES = _modules()

__all__ = [name for name in _MODULES if not name.startswith("_")]

_PACKAGES = (
    *("alignment", "attribution_graphs", "claims", "diffing", "directions", "edits", "features"),
    *("plots", "store"),
)
"""The packages whose names are not in `interp` itself."""

_MOVED = {
    "accumulated": "interp.accumulated_logits",
    "auroc": "interp.circuit_auroc",
    "compare": "interp.compare_effects",
    "completeness": "interp.evaluate_circuit, whose result has .completeness",
    "curve": "interp.circuit_curve",
    "minimality": "interp.evaluate_circuit, whose result has .minimality",
    "pictures": "interp.plots",
    "spectra": "interp.svd_spectra",
    "tracing": "interp.attribution_graphs",
    "why_attends": "interp.attention_attribution",
}


def _elsewhere() -> list[str]:
    """Return the modules in which an error about an unknown name searches for this name."""
    others = [name for name in ("hooks", "models") if name in _sys.modules]
    return [f"{__name__}.{name}" for name in _PACKAGES] + others


def __getattr__(name: str) -> _Any:
    """Import a public name, or a module of this package.

    Raises:
        AttributeError: if the name does not exist. The error names close matches.
    """
    module = _importlib.import_module(_MODULES.get(name, __name__))
    # If the package does not have the name, it may be one of its modules, not imported yet.
    if name in vars(module):
        value = vars(module)[name]
    elif (
        name not in _MOVED and not name.startswith("_") and _find_spec(f"{module.__name__}.{name}")
    ):
        value = _importlib.import_module(f"{module.__name__}.{name}")
    else:
        from hooks.base import missing_name

        return missing_name(__name__, __all__, moved=_MOVED, elsewhere=_elsewhere())(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Python imports a package before its `__main__`. With `python -m interp`, the command line could
# not catch an error of these checks, and Python would print a traceback. So the command line runs
# the checks itself. `sys.argv[0]` is `-m` until Python has found `__main__`.
if _sys.argv[:1] != ["-m"]:
    _shadowed.require_own("hooks")
    _shadowed.warn_of_another_models()
