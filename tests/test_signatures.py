"""The signatures of all public names, which `signatures.txt` records.

A change of the record is a change of what users write. List it in examples/guides/changes.md, and
keep the promise that "Stability" gives there. This command writes the file anew:

    python -m tests.test_signatures
"""

import difflib
import functools
import importlib
import inspect
from pathlib import Path

from tests.faces import FACES

RECORD = Path(__file__).with_name("signatures.txt")
PACKAGES = {"hooks", "models", "interp"}


def is_ours(value):
    """Return whether a class or a function is defined in this project."""
    return getattr(value, "__module__", "").split(".")[0] in PACKAGES


def arguments(function):
    """Return the arguments of a function with their defaults, but without their types."""
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        is_plain = default is None or isinstance(default, (int, float, str))
        if default is not parameter.empty and not is_plain:
            parameter = parameter.replace(default=...)
        parameters.append(parameter.replace(annotation=parameter.empty))
    return str(inspect.Signature(parameters))


def members(kind):
    """Yield a line for the constructor of a class, its fields, and its methods and properties."""
    for name in getattr(kind, "_fields", ()) or getattr(kind, "__dataclass_fields__", ()):
        if not name.startswith("_"):
            yield f"    {name}"
    for name in sorted(dir(kind)):
        value = inspect.getattr_static(kind, name)
        function = getattr(value, "__func__", value)
        if name.startswith("_") and name not in ("__init__", "__call__", "__getitem__"):
            continue
        if inspect.isfunction(function) and is_ours(inspect.unwrap(function)):
            yield f"    {name}{arguments(function)}"
        elif isinstance(value, (property, functools.cached_property)):
            getter = getattr(value, "fget", None) or value.func
            if is_ours(getter):
                yield f"    {name}"


def lines():
    """Yield the lines of the record."""
    for module in (*FACES, "interp.graph"):
        package = importlib.import_module(module)
        yield module
        for name in sorted(package.__all__):
            value = getattr(package, name)
            if not is_ours(value):
                yield f"  {name}"
            elif inspect.isclass(value):
                bases = ", ".join(base.__name__ for base in value.__bases__)
                yield f"  class {name}({bases})"
                yield from members(value)
            elif inspect.isfunction(value):
                yield f"  {name}{arguments(value)}"
            else:
                yield f"  {name}"


def record():
    """Return the record as one text."""
    return "\n".join(lines()) + "\n"


def test_public_signatures_are_the_recorded_signatures():
    now, recorded = record().splitlines(), RECORD.read_text().splitlines()
    changed = [line for line in difflib.ndiff(recorded, now) if line[0] in "+-"]
    assert not changed, "\n".join([*changed, __doc__])


if __name__ == "__main__":
    RECORD.write_text(record())
