"""The classes that public functions give to users or accept, and that users do not import.

1. `received` yields the classes in the types of results, arguments and attributes of a function or
   class.
2. `returned` begins with the public names, and continues with the classes that it finds.
3. `DETAILS` are classes that users should not use, although they can reach them. No annotation
   names the classes of `HELD`: see `tests.test_held_classes`. The reference lists all of them.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import sys
import typing

from tests.faces import MODULES, is_ours

HELD = {"TokenMetric", "ViewBlock"}
DETAILS = {
    *("Added", "AllBut", "AttachSettings", "AttachedContext", "BlockBranch", "BlockLayout"),
    *("Bound", "Bounds", "Branch", "Content", "Continuations"),
    *("DividedAttention", "Forward", "Frequencies", "FrozenRun", "InterchangeRuns"),
    *("LayerCache", "LazyValues", "Linear", "LogitTerms", "ModelIdentity", "Origin", "Piece"),
    *("Placement", "ReadsText", "Rule", "Selection", "Stack", "Stored", "StoredPairs"),
    *("StoredTexts", "TextMasks", "Unembedding", "ValueSource", "ViewContext", "Writers"),
    *HELD,
}


def received(value, path, is_made=False):
    """Yield the classes that a function or an object gives to users or takes, each with a path.

    Args:
        value: the function, or the class of the object.
        path: the path to the value.
        is_made: whether users make objects of the class, so that its constructor is public.
    """
    if inspect.isclass(value):
        for base in filter(is_ours, value.__mro__):
            # The type of the items, such as Entry in `class Entries(tuple[Entry, ...])`.
            for generic in vars(base).get("__orig_bases__", ()):
                for kind in typing.get_args(generic):
                    yield from ((each, f"{path}[i]") for each in classes_in(kind, base))
            for name, kind in inspect.get_annotations(base).items():
                if not name.startswith("_"):
                    yield from ((each, f"{path}.{name}") for each in classes_in(kind, base))
        for name in sorted(dir(value)):
            member = inspect.getattr_static(value, name)
            getter = getattr(member, "fget", None) or getattr(member, "func", member)
            if is_made:
                getter = getattr(getter, "__func__", getter)
            is_public = not name.startswith("_") or name in ("__getitem__", "__iter__", "__call__")
            is_public = is_public or (is_made and name == "__init__")
            if is_public and inspect.isfunction(getter):
                yield from received(getter, f"{path}.{name}")
    elif inspect.isfunction(value) and is_ours(inspect.unwrap(value)):
        signature = inspect.signature(value)
        yield from ((kind, path) for kind in classes_in(signature.return_annotation, value))
        for name, parameter in signature.parameters.items():
            # The record contains the keywords of a dictionary of options.
            is_options = parameter.kind is parameter.VAR_KEYWORD
            if not (name.startswith("_") or is_options):
                kinds = classes_in(parameter.annotation, value)
                yield from ((kind, f"{path}({name}=)") for kind in kinds)


def classes_in(kind, owner, names=()):
    """Yield the classes of this project in a type.

    Args:
        kind: the type.
        owner: the function or the class with the annotation.
        names: the names of types that contain this type, such as `Selector` in a list of selectors.
    """
    if isinstance(kind, typing.ForwardRef):
        kind = kind.__forward_arg__
    if isinstance(kind, str):
        if kind in names:
            return
        names = (*names, kind)
        kind = eval(kind, names_in(inspect.unwrap(owner).__module__))
    if inspect.isclass(kind) and not typing.get_args(kind):
        if is_ours(kind):
            yield kind
    elif typing.get_origin(kind) is not typing.Literal:
        for part in typing.get_args(kind):
            yield from classes_in(part, owner, names)


@functools.cache
def names_in(module):
    """Return the values of the names in a module, with the names of its imports for types only."""
    names = {**vars(sys.modules[module])}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in node.body:
                # A library of an extra may be missing. Types of other libraries are not ours.
                with contextlib.suppress(ImportError):
                    exec(ast.unparse(statement), names)
    return names


@functools.cache
def public_values():
    """Return the public values, each with its name."""
    values = []
    for name in MODULES:
        module = importlib.import_module(name)
        values += [(getattr(module, each), f"{name}.{each}") for each in sorted(module.__all__)]
    return values


@functools.cache
def reached():
    """Return all classes that users reach and do not import, each with the paths to it."""
    public = [value for value, _ in public_values()]
    waiting = [*public_values()]
    paths = {}
    for value, path in waiting:
        is_made = any(value is other for other in public)
        for kind, place in received(value, path, is_made):
            if not any(kind is other for other in public):
                if kind not in paths and kind.__name__ not in DETAILS:
                    waiting.append((kind, kind.__name__))
                paths.setdefault(kind, []).append(place)
    return paths


def returned():
    """Return the classes that belong to the promise of stability, by name."""
    kinds = [kind for kind in reached() if kind.__name__ not in DETAILS]
    return sorted(kinds, key=lambda kind: kind.__name__)
