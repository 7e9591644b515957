"""Everything that users write, which `signatures.txt` records.

These are the signatures of all public names, the attributes and methods of the objects that public
functions return, the options of the command line, and the needed versions of libraries. A change of
the record is a change of what users write. List it in examples/guides/changes.md, and keep the
promise that "Stability" gives there. This command writes the file anew:

    python -m tests.test_signatures

1. `lines` writes each public module, then the classes that users receive but do not import
   (`returned`), the named unions of types, hook points, words, the command line, the form of
   results in JSON, and the needed versions. The names in files and tables follow (`file_names`).
2. `members` writes the constructor of a class, its attributes, methods and operators. It marks the
   optional methods of a protocol.
3. `arguments` writes a signature with the types and the values of all defaults.
"""

import argparse
import ast
import dataclasses
import difflib
import enum
import functools
import importlib
import inspect
import json
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Optional, ParamSpec, Unpack

import pytest
import torch
from jaxtyping import Int

import models
from hooks import ActivationCache, HookedRunner, Mode
from interp import Claim, json_form
from interp.attribution_graphs import AttributionGraph
from interp.cli import command
from interp.diffing import ModelChange
from interp.edits import Edit
from interp.features.bundled import NAMES
from interp.features.forms import CROSSCODERS, FORMS
from interp.plots import Shown
from models.checkpoints.packaged import PACKAGED
from models.running.generation import GenerationOptions
from tests import file_names, seeing
from tests.attachable import made
from tests.faces import MODULES, is_ours
from tests.reference import VARIANTS, variant
from tests.released import OPTIONAL
from tests.returned import (
    DETAILS,
    HELD,
    names_in,
    public_values,
    reached,
    received,
    returned,
)
from tests.written import members_of, type_text, value_text

pytest.importorskip("matplotlib", reason="the record contains pictures of the extra plots")

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_name("signatures.txt")

OPERATORS = {
    *("__call__", "__getitem__", "__len__", "__iter__", "__contains__", "__enter__", "__exit__"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
    *("__matmul__", "__neg__", "__or__", "__and__", "__lt__", "__bool__", "__float__"),
    *("__reversed__", "__invert__", "__setitem__", "__delitem__", "__array__"),
}

# Functions make these objects, from classes that every version may change.
MADE_BY_FUNCTIONS = (ActivationCache, AttributionGraph, Claim, Edit, ModelChange)

# The record shows the names of these types in place of the types.
NAMED_TYPES = (
    *("hooks.base.Texts", "hooks.base.Index", "hooks.Hook", "hooks.Hooks", "hooks.Selector"),
    *("interp.pairs.pairs.Answers", "interp.Metric", "models.Batches"),
)


def found(path):
    """Return the value at a path, such as `hooks.base.Texts`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@functools.cache
def named_types():
    """Return the texts of the members of each named type, by name."""
    named = {}
    for path in NAMED_TYPES:
        named[path.rpartition(".")[2]] = members_of(found(path), named)
    return named


def written(kind):
    """Return a type as text."""
    return type_text(kind, named_types())


def options_of(parameter):
    """Return the keywords behind `**options`, or the type if the keywords are not listed."""
    for kind in typing.get_args(parameter.annotation):
        if typing.is_typeddict(kind):
            fields = inspect.get_annotations(kind).items()
            return f"{{{', '.join(f'{name}: {written(type_)}' for name, type_ in fields)}}}"
    return written(parameter.annotation)


def argument(parameter, factories):
    """Return one argument with its type and its default."""
    star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = f"{star}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text += f": {options_of(parameter) if star == '**' else written(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return text
    if parameter.name in factories:
        return f"{text} = {factories[parameter.name].__name__}()"
    return f"{text} = {value_text(parameter.default)}"


def arguments(function, factories=()):
    """Return the arguments of a function and the type of its result.

    Arguments with an underscore are left out: every version may change them.

    Args:
        function: the function.
        factories: for the constructor of a dataclass, the functions that make defaults, by field.
    """
    signature = inspect.signature(function)
    parts = []
    kind = None
    for parameter in signature.parameters.values():
        if parameter.name.startswith("_"):
            continue
        was_positional_only = kind is parameter.POSITIONAL_ONLY
        kind = parameter.kind
        if was_positional_only and kind is not parameter.POSITIONAL_ONLY:
            parts.append("/")
        if kind is parameter.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        parts.append(argument(parameter, factories))
    result = signature.return_annotation
    arrow = "" if result is signature.empty else f" -> {written(result)}"
    return f"({', '.join(parts)}){arrow}"


def set_by(kind):
    """Yield the names of the attributes that the code of a class sets, itself or in its methods."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    for node in tree.body:
        if isinstance(node, ast.Assign) and not issubclass(kind, enum.Enum):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    for node in ast.walk(tree):
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and ast.unparse(node.value) == "self":
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "self.register_buffer":
            yield from (name.value for name in node.args[:1] if isinstance(name, ast.Constant))


def attributes(kind):
    """Return the types of the attributes of a class, by name; unknown types are None.

    These are the annotated names of the class, and the names that its code sets.
    """
    names = {}
    for base in filter(is_ours, reversed(kind.__mro__)):
        names |= inspect.get_annotations(base)
        for name in set_by(base):
            value = inspect.getattr_static(base, name, None)
            is_method = isinstance(value, (property, functools.cached_property))
            if not is_method and not inspect.isfunction(value):
                names.setdefault(name, None)
    return {name: type_ for name, type_ in names.items() if not name.startswith("_")}


def constructor(kind):
    """Yield the line of the constructor of a class, if the class has its own."""
    if kind in MADE_BY_FUNCTIONS:
        return
    if hasattr(kind, "_field_defaults"):
        yield f"    __new__{arguments(kind.__new__)}"
    elif is_ours(inspect.unwrap(kind.__init__)) or hasattr(kind, "__dataclass_fields__"):
        fields = getattr(kind, "__dataclass_fields__", {}).values()
        factories = {each.name: each.default_factory for each in fields}
        made = {name: make for name, make in factories.items() if make is not dataclasses.MISSING}
        yield f"    __init__{arguments(kind.__init__, made)}"


def members(kind, has_makers=True):
    """Yield a line for each attribute, method, property and operator of a class.

    Args:
        kind: the class.
        has_makers: whether users make objects of the class, also with its class methods.
    """
    if issubclass(kind, enum.Enum):
        yield from (f"    {member.name} = {member.value!r}" for member in kind)
    for name, type_ in attributes(kind).items():
        yield f"    {name}" + ("" if type_ is None else f": {written(type_)}")
    for name in sorted(dir(kind)):
        if name.startswith("_") and name not in OPERATORS:
            continue
        value = inspect.getattr_static(kind, name)
        function = getattr(value, "__func__", value)
        if isinstance(value, classmethod) and not has_makers:
            continue
        if inspect.isfunction(function) and is_ours(inspect.unwrap(function)):
            # The methods of a protocol without this mark, and its attributes, are required.
            mark = OPTIONAL if getattr(function, "is_optional", False) else ""
            yield f"    {name}{arguments(function)}{mark}"
        elif isinstance(value, (property, functools.cached_property)):
            # Some properties are made by a function, and have an annotation of the class.
            if name in attributes(kind):
                continue
            getter = getattr(value, "fget", None) or value.func
            if is_ours(getter):
                result = inspect.signature(getter).return_annotation
                yield f"    {name}: {written(result)}"


def title(kind):
    """Return the first line of a class."""
    return f"  class {kind.__name__}({', '.join(base.__name__ for base in kind.__bases__)})"


def options_of_commands():
    """Yield a line for each command of the command line, and for each of its options."""
    parser, commands = command._parsers()
    for name, of_command in {"hookscope": parser, **commands}.items():
        yield f"  {name}"
        for action in of_command._actions:
            if isinstance(action, argparse._SubParsersAction) or "--help" in action.option_strings:
                continue
            names = ", ".join(action.option_strings) or action.dest
            takes = "" if action.nargs is None else f" nargs={action.nargs}"
            choices = "" if action.choices is None else f" of {value_text([*action.choices])}"
            needed = " required" if action.required else ""
            default = "" if action.default is None else f" = {value_text(action.default)}"
            yield f"    {names}{takes}{choices}{needed}{default}"


def needed_versions():
    """Yield the versions of Python and of libraries that the package and its extras need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield f"  python{project['requires-python']}"
    yield from (f"  {name}" for name in project["dependencies"])
    for extra, names in project["optional-dependencies"].items():
        if extra not in ("dev", "docs"):
            yield f"  extra {extra}"
            yield from (f"    {name}" for name in names)


def hook_points(runners):
    """Yield the names and the axes of the hook points of some models."""
    axes_of = {}
    for runner in runners:
        for point in runner.points.values():
            axes_of[re.sub(r"\.\d+\.", ".L.", point.name)] = " ".join(point.axes)
    for name, axes in sorted(axes_of.items()):
        yield f"  {name} [{axes}]"


def attached():
    """Yield runners of attached models: with an encoder, with towers of images and sounds, and with
    experts.
    """
    for make in (seeing.t5, seeing.whisper, seeing.llava, lambda: (made("olmoe"), None)):
        model, example = make()
        models.attach(model, example=example)
        yield HookedRunner(model)


def words():
    """Yield the words that users write and whose types are only texts, by their meaning."""
    words_by_meaning = {
        "models of load": ["pydoc-4l", *PACKAGED],
        "configs of build": models.list_configs(),
        "dictionaries of load_sae and load_transcoders": NAMES,
        "formats of load_sae and load_transcoders": ["auto", *FORMS],
        "formats of load_crosscoder": ["auto", *CROSSCODERS],
    }
    for meaning, known in words_by_meaning.items():
        yield f"  {meaning} = {', '.join(sorted(known))}"


def lines():
    """Yield the lines of the record."""
    for module in MODULES:
        package = importlib.import_module(module)
        yield module
        for name in sorted(package.__all__):
            value = getattr(package, name)
            if inspect.isclass(value) and is_ours(value):
                yield title(value)
                yield from constructor(value)
                yield from members(value)
            elif inspect.isfunction(value):
                yield f"  {name}{arguments(value)}"
            elif inspect.ismodule(value) or inspect.isclass(value):
                yield f"  {name}"
            else:
                yield f"  {name} = {type_text(value)}"
    # The attributes and methods are stable, but not the constructors.
    yield "objects that functions return"
    for kind in returned():
        yield title(kind)
        yield from members(kind, has_makers=False)
    # Every version may change the classes below.
    yield "details"
    yield from (f"  class {name}" for name in sorted(DETAILS))
    yield "types"
    for path in NAMED_TYPES:
        yield f"  {path.rpartition('.')[2]} = {type_text(found(path))}"
    yield "hook points of plain transformers of all forms"
    yield from hook_points(HookedRunner(variant(name)) for name in VARIANTS)
    yield "hook points of attached models: T5, Whisper, LLaVA and OLMoE"
    yield from hook_points(attached())
    yield "words"
    yield from words()
    yield "commands"
    yield from options_of_commands()
    yield "JSON form"
    yield from (f"  {line}" for line in json.dumps(json_form.SCHEMA, indent=2).splitlines())
    yield "needed versions"
    yield from needed_versions()


def record():
    """Return the record as one text."""
    return "\n".join([*lines(), *file_names.lines()]) + "\n"


def require_same(recorded, now):
    """Fail if recorded lines differ from the lines of the code."""
    changed = [line for line in difflib.ndiff(recorded, now) if line[0] in "+-"]
    assert not changed, "\n".join([*changed, __doc__])


def test_public_signatures_are_the_recorded_signatures():
    before, heading, _ = RECORD.read_text().partition(f"{file_names.HEADING}\n")
    assert heading
    require_same(before.splitlines(), [*lines()])


@pytest.mark.filterwarnings("ignore:the circuit was found on")
@pytest.mark.parametrize("name", file_names.makers())
def test_names_in_files_and_tables_are_the_recorded_names(name):
    recorded = file_names.recorded(RECORD.read_text())
    require_same(recorded[name], [*file_names.makers()[name]()])


def test_each_method_as_json_is_called_for_the_record():
    pytest.importorskip("sklearn")
    recorded = set(re.findall(r"^    (?:.+: )?kind = '(\w+)'$", RECORD.read_text(), re.MULTILINE))
    have_form = {kind for kind in recorded_classes() if hasattr(kind, "as_json")} - {Shown}
    called = {kind.as_json for kind in have_form if kind.__name__ in recorded}
    assert len(called) > 40
    assert not [kind for kind in have_form if kind.as_json not in called]


def test_each_recorded_file_and_table_can_still_be_made():
    for library in ("datasets", "pandas", "sklearn"):
        pytest.importorskip(library, reason=f"some recorded tables need {library}")
    assert [*file_names.recorded(RECORD.read_text())] == [*file_names.makers()]


def recorded_classes():
    """Return the public classes, and the classes that users receive."""
    public = [value for value, _ in public_values() if inspect.isclass(value) and is_ours(value)]
    return [*dict.fromkeys([*public, *returned()])]


@pytest.mark.parametrize("kind", recorded_classes())
def test_each_attribute_of_a_recorded_class_has_a_type(kind):
    without = [line for line in members(kind) if "_empty" in line or line.strip().isidentifier()]
    assert not without


PUBLIC_CLASSES = [kind for kind, _ in public_values() if inspect.isclass(kind) and is_ours(kind)]


@pytest.mark.parametrize("kind", recorded_classes())
def test_a_protocol_that_isinstance_checks_has_no_optional_member(kind):
    """Without the member, an object of a user would be refused."""
    if getattr(kind, "_is_runtime_protocol", False):
        members = [inspect.getattr_static(kind, name) for name in dir(kind)]
        assert not any(getattr(member, "is_optional", False) for member in members)


def without_details(type_):
    """Return a type as text, with only the members of its unions that are stable or contain stable
    types.
    """
    detail = rf"\b(?:{'|'.join(sorted(DETAILS))})\b"
    return re.sub(rf"{detail} \| | \| (?:{detail}|None)", "", type_)


@pytest.mark.parametrize("kind", [kind for kind in PUBLIC_CLASSES if [*constructor(kind)]])
def test_each_argument_of_a_recorded_constructor_accepts_a_stable_value(kind):
    (line,) = constructor(kind)
    assert not {*re.findall(r"\w+", without_details(line))} & DETAILS


@pytest.mark.parametrize("kind", [kind for kind in PUBLIC_CLASSES if [*constructor(kind)]])
def test_the_arguments_of_a_recorded_constructor_before_the_last_public_one_are_public(kind):
    make = kind.__new__ if hasattr(kind, "_field_defaults") else kind.__init__
    first, *parameters = inspect.signature(make).parameters.values()
    assert first.name in ("self", "_cls")
    named = [each for each in parameters if each.kind is not each.KEYWORD_ONLY]
    are_private = [each.name.startswith("_") for each in named]
    assert are_private == sorted(are_private)
    for each in parameters:
        assert not each.name.startswith("_") or each.default is not each.empty


def needed(kind, owner, names=()):
    """Return the classes of this project that users need to make a value of a type, and that no
    public module exports.

    Of a union, users may choose a member. Every object with its members is a value of a protocol.

    Args:
        kind: the type.
        owner: the function with the annotation.
        names: the names of types that contain this type.
    """
    if isinstance(kind, typing.ForwardRef | str):
        name = kind if isinstance(kind, str) else kind.__forward_arg__
        if name in names:
            return set()
        names = (*names, name)
        kind = eval(name, names_in(inspect.unwrap(owner).__module__))
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return min(
            (needed(part, owner, names) for part in parts if part is not type(None)), key=len
        )
    if inspect.isclass(kind) and not parts:
        if not is_ours(kind) or getattr(kind, "_is_protocol", False):
            return set()
        return set() if any(issubclass(public, kind) for public in PUBLIC_CLASSES) else {kind}
    if origin in (typing.Literal, Callable):
        return set()
    return {each for part in parts for each in needed(part, owner, names)}


def needed_arguments(function):
    """Return the classes that a call of a function needs, with the names of their arguments."""
    parameters = inspect.signature(function).parameters.values()
    return {
        (kind.__name__, each.name)
        for each in parameters
        if each.kind is not each.VAR_KEYWORD and not each.name.startswith("_")
        for kind in needed(each.annotation, function)
    }


@pytest.mark.parametrize("kind", [kind for kind in PUBLIC_CLASSES if [*constructor(kind)]])
def test_the_arguments_of_a_recorded_constructor_can_be_made_from_public_classes(kind):
    make = kind.__new__ if hasattr(kind, "_field_defaults") else kind.__init__
    assert needed_arguments(make) == set()


PUBLIC_FUNCTIONS = {
    path: value for value, path in public_values() if inspect.isfunction(value) and is_ours(value)
}


@pytest.mark.parametrize("path", PUBLIC_FUNCTIONS)
def test_public_functions_take_public_classes_and_results_of_functions(path):
    given = {
        kind.__name__
        for kind, paths in reached().items()
        if any("=)" not in each for each in paths)
    }
    needs = needed_arguments(PUBLIC_FUNCTIONS[path])
    assert {kind for kind, _ in needs} <= given - DETAILS


def test_the_page_names_the_classes_whose_constructors_are_not_recorded():
    names = ", ".join(f"`{kind.__name__}`" for kind in MADE_BY_FUNCTIONS[:-1])
    last = MADE_BY_FUNCTIONS[-1].__name__
    page = (ROOT / "examples/guides/changes.md").read_text()
    assert f"The constructors of {names} and `{last}` are not stable" in page
    assert not [line for kind in MADE_BY_FUNCTIONS for line in constructor(kind)]


def plain(value, shares=(0.5, 1), *, dtype=torch.float32, make=dict, **others):
    """Return the value. The record of this function is in a test."""


def typed(
    tokens: Int[torch.Tensor, "batch pos"] | list[int],
    side: Literal["left", "right"] = "left",
    at: "Position | None" = None,
    *,
    apply: Callable[[int, str], Any] | None = None,
    dtype: torch.dtype | None = None,
    **options: Unpack[GenerationOptions],
) -> dict[str, tuple[int, ...]]:
    """Return nothing. The record of this function is in a test."""


@dataclasses.dataclass
class Config:
    """A config. Its record is in a test."""

    size: int
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    places: tuple[int, ...] = (1,)

    def __len__(self) -> int:
        return self.size


class Part:
    """A class with an attribute that only `__init__` names."""

    def __init__(self, width=3):
        self.width = width
        self._hidden = 2 * width


def test_the_record_of_a_function_has_the_values_of_its_defaults():
    recorded = "(value, shares = (0.5, 1), *, dtype = torch.float32, make = dict, **others)"
    assert arguments(plain) == recorded


def test_the_record_of_a_function_has_types_allowed_words_and_the_keywords_of_options():
    start, _, options = arguments(typed).partition(", **options: ")
    assert start == (
        '(tokens: Int[Tensor, "batch pos"] | list[int], '
        "side: Literal['left', 'right'] = 'left', at: Position | None = None, *, "
        "apply: Callable[[int, str], Any] | None = None, dtype: dtype | None = None"
    )
    assert options.startswith('{attention_mask: Shaped[Tensor, "batch pos"] | None, temperature: ')
    assert options.endswith(", compiled: Mapping[str, Any] | bool}) -> dict[str, tuple[int, ...]]")


class Rows(list["Part | None"]):
    """A list. The classes that users receive from it are in a test."""

    @property
    def config(self) -> Config | None:
        """A config, or nothing."""

    def parts(self, configs: "list[Config]", _part: Part) -> "dict[str, Part]":
        """Return parts by name."""

    def _hidden(self) -> int:
        """Return a number, which is private."""

    @classmethod
    def of(cls) -> "Rows":
        """Return a list. Users do not receive it."""


def test_users_receive_items_attributes_results_and_arguments(monkeypatch):
    monkeypatch.setattr("tests.faces.PACKAGES", {"tests"})
    items, config, parts, argument = received(Rows, "rows")
    assert argument == (Config, "rows.parts(configs=)")
    assert items == (Part, "rows[i]")
    assert config == (Config, "rows.config")
    assert parts == (Part, "rows.parts")


def test_each_detail_is_a_class_that_users_reach():
    assert {kind.__name__ for kind in reached()} >= DETAILS - HELD


def test_the_record_of_a_class_has_its_fields_factories_and_operators(monkeypatch):
    monkeypatch.setattr("tests.faces.PACKAGES", {"tests"})
    assert [*constructor(Config), *members(Config)] == [
        "    __init__(self, size: int, parts: dict[str, float] = dict(), "
        "places: tuple[int, ...] = (1,)) -> None",
        "    size: int",
        "    parts: dict[str, float]",
        "    places: tuple[int, ...]",
        "    __len__(self) -> int",
    ]
    assert [*constructor(Part), *members(Part)] == ["    __init__(self, width = 3)", "    width"]


def test_names_inside_types_are_recorded_as_they_are_written():
    parameters = ParamSpec("P")
    assert type_text(Optional["Part"]) == "Part | None"
    assert type_text(parameters.args) == type_text(parameters.kwargs) == "P"
    assert type_text(Callable[parameters, "Part"]) == "Callable[P, Part]"


def test_the_members_of_a_union_are_sorted_or_have_the_name_of_the_union():
    numbers = members_of(int | float | str)
    assert type_text(None | str | int) == type_text(int | str | None) == "int | str | None"
    assert type_text(str | bytes | float | int, {"Number": numbers}) == "Number | bytes"
    assert type_text(list[str | float | int], {"Number": numbers}) == "list[Number]"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1,), "(1,)"),
        (Config(2), "Config(size=2, parts={}, places=(1,))"),
        (frozenset({"b", "a"}), "frozenset('a', 'b')"),
        ({"a": [0.5, None]}, "{'a': [0.5, None]}"),
        (Mode.full, "Mode.full"),
        (len, "len"),
        (..., "..."),
    ],
)
def test_a_default_is_recorded_by_its_value(value, text):
    assert value_text(value) == text


def test_a_default_without_a_fixed_text_is_an_error():
    with pytest.raises(TypeError, match="whose text is known"):
        value_text(object())


if __name__ == "__main__":
    RECORD.write_text(record())
