"""The JSON form of all results: `as_json()`, `save("x.json")`, and `--json` of the command line.

    {
      "kind": "Probe",
      "version": 1,
      "tables": {
        "auroc": {
          "axes": ["point", "example"],
          "labels": {"point": ["blocks.2.resid_post"]},
          "unit": "AUROC",
          "values": [[1.0, 1.0, 1.0]]
        },
        "auroc.mean": {"axes": ["point"], ...}
      },
      "about": {"by": "logistic probe", "rows": 12, "yes": 6}
    }

1. `kind` is the class of the result, and `version` is the version of this form.
2. `tables` contains all numbers and texts by name. The `values` of a table are nested lists, with
   one level for each axis. A table without axes contains a single value. If an entry has no fixed
   size, such as the tokens of a text, it is a list.
3. `labels` contains the labels of an axis. An axis that is missing there is counted from 0.
4. `unit` is the unit of the numbers. It is empty for texts and for numbers without a unit.
5. A `Result` with the name x fills several tables. `x` has a number for each example. `x.mean`,
   `x.low` and `x.high` are the mean over examples and the ends of its 95% interval. `x.base` and
   `x.target` are the metrics of the two runs, if they exist. `x.words.pos` contains the text at
   each index of the axis `pos`, if it is known.
6. `about` contains all other facts, as JSON types.

The JSON is strict. NaN and infinity are null: the number is unknown, or the interval has no bound.
Effects at padding are null too.
Weights, activations and other large tensors are left out: `save` writes them to other files.
`SCHEMA` is this form as JSON Schema.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from hooks.base import shown, strict_json

R = TypeVar("R")

VERSION = 1
"""The version of the form. It changes if a field is renamed or removed."""

_TABLE = {
    "type": "object",
    "required": ["axes", "labels", "unit", "values"],
    "additionalProperties": False,
    "properties": {
        "axes": {"type": "array", "items": {"type": "string"}},
        "labels": {"type": "object", "additionalProperties": {"type": "array"}},
        "unit": {"type": "string"},
        "values": {},
    },
}
SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["kind", "version", "tables", "about"],
    "additionalProperties": False,
    "properties": {
        "kind": {"type": "string"},
        "version": {"const": VERSION},
        "tables": {"type": "object", "additionalProperties": _TABLE},
        "about": {"type": "object"},
    },
}
"""The form as JSON Schema, draft 2020-12."""


@dataclass(frozen=True)
class Table:
    """A table of numbers or texts.

    Attributes:
        values: a tensor, nested lists, or a single value without axes.
        axes: the names of the axes, separated by spaces.
        unit: the unit of the numbers.
        labels: by axis, a number or a text for each index. Default: numbers from 0.

    >>> Table([0.5, float("nan")], "head", "nats", {"head": ["a0.h0", "a0.h1"]}).as_dict()["values"]
    [0.5, None]
    """

    values: Any
    axes: str = ""
    unit: str = ""
    labels: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the table as JSON types.

        Raises:
            ValueError: if the values do not have the axes, or an axis does not have one label for
                each index.
            TypeError: if a value or a label does not fit JSON.
        """
        axes = self.axes.split()
        values = json_value(self.values)
        sizes = _sizes(self.values, values, axes)
        labels = {}
        for axis, of_axis in self.labels.items():
            if axis not in axes:
                continue
            if len(of_axis) != sizes[axis]:
                raise ValueError(
                    f"axis {axis!r} must have {sizes[axis]} labels; got {len(of_axis)}"
                )
            if [*of_axis] != [*range(len(of_axis))]:
                labels[axis] = json_value(of_axis)
        return {"axes": axes, "labels": labels, "unit": self.unit, "values": values}


def form(
    kind: str, tables: Mapping[str, Table], about: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the form of a result; see the docstring of the module.

    Args:
        kind: the class of the result.
        tables: the tables, by name.
        about: other facts. Default: none.

    Raises:
        ValueError, TypeError: for the reasons of `Table.as_dict`. The error names the table.

    >>> form("Answer", {"value": Table(float("inf"))}, {"text": "part KV8"})["tables"]
    {'value': {'axes': [], 'labels': {}, 'unit': '', 'values': None}}
    """
    contents = {}
    for name, table in tables.items():
        try:
            contents[name] = table.as_dict()
        except (TypeError, ValueError) as error:
            raise type(error)(f"table {name!r} of {kind}: {error}") from None
    return {"kind": kind, "version": VERSION, "tables": contents, "about": json_value(about or {})}


def columns(
    axis: str,
    records: Sequence[Any],
    names: str,
    units: Mapping[str, str] | None = None,
    labels: Sequence[Any] | None = None,
) -> dict[str, Table]:
    """Return a table for each attribute of some records: `test.status`, `test.measured` and so on.

    Args:
        axis: the axis of the records, which is the first part of the names of the tables.
        records: the records.
        names: the names of the attributes, separated by spaces.
        units: the units of attributes. Default: no units.
        labels: a label for each record. Default: numbers from 0.

    >>> columns("point", [1 + 2j, 3j], "real imag")["point.imag"].values
    [2.0, 3.0]
    """
    known = {} if units is None else units
    of_axis = {} if labels is None else {axis: labels}
    tables = {}
    for name in names.split():
        values = [getattr(record, name) for record in records]
        tables[f"{axis}.{name}"] = Table(values, axis, known.get(name, ""), of_axis)
    return tables


def records(axis: str, kind: Callable[..., R], tables: Mapping[str, Any]) -> list[R]:
    """Return the records whose attributes `columns` wrote to the tables of a form.

    Args:
        axis: the axis of the records.
        kind: the class of the records, whose arguments are the attributes in order.
        tables: the tables of the form, as JSON types.

    Raises:
        KeyError: if an attribute has no table.

    >>> from collections import namedtuple
    >>> Size = namedtuple("Size", "width height")
    >>> written = form("Sizes", columns("size", [Size(3, 5), Size(2, 7)], "width height"))
    >>> records("size", Size, written["tables"])
    [Size(width=3, height=5), Size(width=2, height=7)]
    """
    names = inspect.signature(kind).parameters
    values = [tables[f"{axis}.{name}"]["values"] for name in names]
    return [kind(*record) for record in zip(*values, strict=True)]


def as_json(value: Any) -> dict[str, Any]:
    """Return the JSON form of anything that an analysis returns.

    This is `value.as_json()`, where it exists. A tensor, a number or a text is the table `value`. A
    mapping, a list or a named tuple contains the tables of all parts: `NAME.TABLE`.

    Args:
        value: a result, a tensor, a number, or a collection of them.

    Returns:
        The keys `kind`, `version`, `tables` and `about`. Each table has its axes, labels, unit and
        values, as JSON types; NaN and infinity are None.

    Raises:
        TypeError: if the value has no JSON form, for instance a model.

    >>> import torch
    >>> as_json(torch.tensor([1.0, torch.nan]))["tables"]["value"]["values"]
    [1.0, None]
    >>> [*as_json({"first": 1.5, "second": torch.eye(2)})["tables"]]
    ['first.value', 'second.value']
    """
    if hasattr(value, "as_json") and not isinstance(value, type):
        return dict(value.as_json())
    kind = type(value).__name__
    parts = _parts(value)
    if parts is None:
        n_axes = value.ndim if isinstance(value, Tensor) else 0
        axes = " ".join(f"axis{number}" for number in range(n_axes))
        return form(kind, {"value": Table(value, axes)})
    tables: dict[str, Any] = {}
    about: dict[str, Any] = {}
    for name, part in parts.items():
        inner = as_json(part)
        tables |= {f"{name}.{table}": content for table, content in inner["tables"].items()}
        about |= {str(name): inner["about"]} if inner["about"] else {}
    return {"kind": kind, "version": VERSION, "tables": tables, "about": about}


def json_value(value: Any) -> Any:
    """Return a value as JSON types, with None for NaN and infinity.

    Raises:
        TypeError: if the value does not fit JSON.

    >>> json_value({2: (1.0, float("-inf")), "names": range(2)})
    {'2': [1.0, None], 'names': [0, 1]}
    """
    if isinstance(value, Tensor):
        return _numbers(value)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return strict_json.finite(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [json_value(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(json_value, value))
    raise TypeError(f"a result must contain numbers, texts, lists and mappings; got {shown(value)}")


def _numbers(values: Tensor) -> Any:
    """Return the numbers of a tensor as lists, with None for NaN and infinity."""
    if not values.is_floating_point():
        return values.tolist()
    double = values.detach().cpu().double().numpy()
    numbers = double.astype(object)
    numbers[~np.isfinite(double)] = None
    return numbers.tolist()


def _sizes(given: Any, values: Any, axes: Sequence[str]) -> dict[str, int]:
    """Return the size of each axis of a table.

    Args:
        given: the values as they were given.
        values: the values as JSON types.
        axes: the names of the axes.

    Raises:
        ValueError: if the values do not have these axes.
    """
    if isinstance(given, Tensor):
        sizes = [*given.shape]
    else:
        sizes = []
        level = values
        while len(sizes) < len(axes) and isinstance(level, list):
            sizes.append(len(level))
            level = level[0] if level else None
            if level is None:
                sizes += [0] * (len(axes) - len(sizes))
    if len(sizes) != len(axes):
        raise ValueError(f"values must have the axes {[*axes]}; got the sizes {sizes}")
    return dict(zip(axes, sizes, strict=True))


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """Return the parts of a collection by name; None for a single value."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        parts: Mapping[Any, Any] = value._asdict()
        return parts
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return None
