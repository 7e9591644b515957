"""Directions: vectors at points, facts about their origin, and their files."""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Number
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor

from hooks import CacheError, Point, UnknownNameError
from hooks.base import layer_of, number_of, require_kind, shown, storage, unknown_name
from interp import plots
from interp.json_form import Table, form
from interp.plots.view import told
from interp.results.result import Result

_KIND = "direction"

# A direction with more points prints only its longest vectors.
_MOST_POINTS = 8


@dataclass(frozen=True, eq=False, repr=False)
class Direction(plots.Shown):
    """A vector at each of some points, usually one point in each layer.

    `edits.add` steers along it.

    Attributes:
        vectors: the vectors, by the names of points.
        offsets: numbers by the names of points, which make the direction a classifier: a value
            belongs to the first kind of texts (`yes`) if `value @ vector + offset` is above 0.
        about: facts about the method that found the direction, as JSON types.

    >>> point = "blocks.2.resid_post"
    >>> v = Direction({point: torch.tensor([3.0, 4.0])}, {point: -5.0})
    >>> v[2]
    tensor([3., 4.])
    >>> v.unit()[2], v.unit().offsets
    (tensor([0.6000, 0.8000]), {'blocks.2.resid_post': -1.0})
    """

    vectors: Mapping[str, Float[Tensor, " d"]]
    offsets: Mapping[str, float] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_kind(
            "vectors", self.vectors, kind=Mapping, words="a vector for each of some names of points"
        )
        require_kind(
            "offsets", self.offsets, kind=Mapping, words="a number for each of some points"
        )
        require_kind("about", self.about, kind=Mapping, words="a mapping of facts")
        for name, vector in self.vectors.items():
            require_kind(f"the vector at {name}", vector, kind=Tensor, words="a tensor [d]")

    def __getitem__(self, place: int | str | tuple[str, int]) -> Float[Tensor, " d"]:
        """Return the vector at a point.

        Args:
            place: the name of the point; a layer; or a short name and a layer, such as
                `("resid_post", 2)`, as in a cache. Layer -1 is the last layer that has a vector.

        Raises:
            UnknownNameError: if the direction has no vector there. The error contains close
                matches.
            ValueError: if the direction has several points in the layer.
            TypeError: if `place` has another form.

        >>> v = Direction({f"blocks.{n}.resid_post": torch.tensor([float(n)]) for n in range(3)})
        >>> v["blocks.1.resid_post"], v["resid_post", 1], v[1], v[-1]
        (tensor([1.]), tensor([1.]), tensor([1.]), tensor([2.]))
        """
        return self.vectors[self._name(place)]

    def at(self, *places: int | str | tuple[str, int]) -> "Direction":
        """Return a direction with the vectors of some points only.

        Args:
            places: for each point its name, its layer, or a short name and a layer, such as
                `("resid_post", 2)`. Layer -1 is the last layer that has a vector.

        Raises:
            UnknownNameError: if the direction has no vector there. The error contains close
                matches.
            ValueError: if the direction has several points in the layer.
            TypeError: if a place has another form.
        """
        names = [self._name(place) for place in places]
        offsets = {name: self.offsets[name] for name in names if name in self.offsets}
        return Direction({name: self.vectors[name] for name in names}, offsets, self.about)

    def unit(self) -> "Direction":
        """Return the same direction with vectors of length 1.

        Raises:
            ValueError: if a vector is zero or not finite.
        """
        sizes = {name: float(vector.norm()) for name, vector in self.vectors.items()}
        if wrong := [name for name, size in sizes.items() if not 0 < size < math.inf]:
            raise ValueError(
                f"the length of a vector must be above 0 and finite; got {sizes[wrong[0]]} at "
                f"{wrong[0]}"
            )
        vectors = {name: vector / sizes[name] for name, vector in self.vectors.items()}
        offsets = {name: offset / sizes[name] for name, offset in self.offsets.items()}
        return Direction(vectors, offsets, self.about)

    def __mul__(self, factor: float) -> "Direction":
        """Return the same direction with vectors, and offsets, times a number.

        >>> (Direction({"resid": torch.tensor([3.0, 4.0])}) * 2)["resid"]
        tensor([6., 8.])
        """
        if not isinstance(factor, Number):
            return NotImplemented
        vectors = {name: vector * factor for name, vector in self.vectors.items()}
        offsets = {name: offset * factor for name, offset in self.offsets.items()}
        return Direction(vectors, offsets, self.about)

    __rmul__ = __mul__

    def __add__(self, other: "Direction") -> "Direction":
        """Return the sum of two directions at the same points.

        Raises:
            ValueError: if the directions have vectors at different points.

        >>> v = Direction({"resid": torch.tensor([3.0, 4.0])})
        >>> (v + v * 2)["resid"]
        tensor([ 9., 12.])
        """
        if not isinstance(other, Direction):
            return NotImplemented
        if self.vectors.keys() != other.vectors.keys():
            raise ValueError(
                "directions must have vectors at the same points to be added; got "
                f"{', '.join(self.vectors)} and {', '.join(other.vectors)}"
            )
        vectors = {name: vector + other.vectors[name] for name, vector in self.vectors.items()}
        offsets = {}
        for name in vectors:
            if name in self.offsets or name in other.offsets:
                offsets[name] = self.offsets.get(name, 0.0) + other.offsets.get(name, 0.0)
        return Direction(vectors, offsets)

    def __sub__(self, other: "Direction") -> "Direction":
        """Return the difference of two directions at the same points; for errors see `+`."""
        return self + other * -1.0 if isinstance(other, Direction) else NotImplemented

    def vector_at(self, point: Point) -> Float[Tensor, " d"]:
        """Return the vector at a hook point. Edits call this method.

        To look up a vector by name, use `direction[name]`.

        Raises:
            TypeError: if the point is not a `Point`, for example a name.
            UnknownNameError: if the direction has no vector there. The error contains close
                matches.
        """
        require_kind(
            "point", point, kind=Point, words="a Point", call="direction[name] takes a name"
        )
        return self[point.name]

    def scores(self, values: Mapping[str, Float[Tensor, "..."]]) -> dict[str, Float[Tensor, "..."]]:
        """Return `value @ vector + offset` at each point of the direction that `values` contains.

        `values` can be a cache. Values have the axes `*rows d`, or `head` and `d_head` in place of
        `d`. Scores have the axes `*rows`.

        >>> import torch
        >>> v = Direction({"resid": torch.tensor([3.0, 4.0])}, {"resid": -5.0})
        >>> v.scores({"resid": torch.tensor([[1.0, 1.0], [0.0, 1.0]])})
        {'resid': tensor([ 2., -1.])}
        """
        require_kind("values", values, Mapping, "a cache, or a mapping from points to values")
        scores = {}
        for name, vector in self.vectors.items():
            if name in values:
                rows = _flat(values[name], len(vector)).to(vector)
                scores[name] = rows @ vector + self.offsets.get(name, 0.0)
        return scores

    def as_json(self) -> dict[str, Any]:
        """Return the length and the offset at each point, in the JSON form of all results; see
        `interp.json_form`. `save` writes the vectors.
        """
        labels = {"point": [*self.vectors]}
        lengths = [float(vector.norm()) for vector in self.vectors.values()]
        offsets = [self.offsets.get(name) for name in self.vectors]
        tables = {
            "length": Table(lengths, "point", "norm of the point", labels),
            "offset": Table(offsets, "point", labels=labels),
        }
        return form("Direction", tables, self.about)

    def view(self) -> plots.View:
        """Return a view of the facts about the direction, and of the length of each vector."""
        lengths = torch.stack([vector.norm().float().cpu() for vector in self.vectors.values()])
        result = Result(
            lengths[:, None],
            ("point", "example"),
            labels={"point": [name.removeprefix("blocks.") for name in self.vectors]},
            unit="length",
        )
        return plots.View("a direction", plots.effects(result).parts, says=[*told(self.about)])

    def _writers(self) -> dict[str, Callable[[Path], object]]:
        """Return the functions that write files, by suffix."""
        files = dict.fromkeys(storage.SAFETENSORS, self._save)
        return {**super()._writers(), **files, ".gguf": self.to_gguf}

    def _save(self, path: Path) -> None:
        """Write the direction as safetensors."""
        facts = {"offsets": dict(self.offsets), "about": dict(self.about)}
        storage.save(path, _KIND, self.vectors, facts)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Direction":
        """Load a direction from a file of `save`.

        A file with the suffix `.gguf` is read by `from_gguf`.

        Raises:
            FileNotFoundError: if the file does not exist.
            CacheError: if the file is damaged or does not contain a direction.
        """
        if storage.path_of(path).suffix.lower() == ".gguf":
            return cls.from_gguf(path)
        with storage.opened(storage.path_of(path), _KIND) as (vectors, facts):
            return cls(vectors, facts["offsets"], facts["about"])

    def to_gguf(self, path: str | os.PathLike[str], model_hint: str = "") -> None:
        """Write the direction as a control vector of llama.cpp and repeng.

        This needs the package gguf.

        llama.cpp adds `direction.l` to the output of layer l, so all points must be `resid_post`.
        The format has no control vector for layer 0, so a vector at layer 0 raises an error.

        Args:
            path: the path of the file, with the suffix `.gguf`.
            model_hint: the architecture of the model, such as `llama`.

        Raises:
            ValueError: if a point is not a `resid_post` of layer 1 or a later layer, or if the path
                has another suffix.
        """
        import gguf

        storage.suffix_of(path, [".gguf"])

        layers: dict[int, Any] = {}
        for name, vector in self.vectors.items():
            layer = layer_of(name)
            if layer in (None, 0) or not name.endswith("resid_post"):
                raise ValueError(
                    f"every point must be resid_post of layer 1 or a later layer; got {name}"
                )
            layers[layer] = vector.detach().cpu().float().numpy()
        with storage.replacing(storage.path_of(path)) as partial:
            writer = gguf.GGUFWriter(partial, "controlvector")
            writer.add_string("controlvector.model_hint", model_hint)
            writer.add_uint32("controlvector.layer_count", len(layers))
            for layer, numbers in sorted(layers.items()):
                writer.add_tensor(f"direction.{layer}", numbers)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> "Direction":
        """Load a control vector of llama.cpp or repeng. This needs the package gguf.

        The vectors are converted to float32 from any type. Tensors with other names than
        `direction.l` are ignored.

        Raises:
            FileNotFoundError: if the file does not exist.
            CacheError: if the file is damaged or is not a control vector, or if the directions are
                not vectors of one length.
        """
        import gguf

        class CheckedReader(gguf.GGUFReader):
            def _get(
                self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None
            ) -> Any:
                numbers = super()._get(offset, dtype, count, override_order)
                # With a wrong length, the library would read beyond the end of the file.
                if len(numbers) < count:
                    raise ValueError(f"the file must have {count} numbers at byte {offset}")
                return numbers

        with storage.one_error(path, "be a complete control vector in GGUF", CacheError):
            reader = CheckedReader(path)
            architecture = reader.fields.get("general.architecture")
            if architecture is None or architecture.contents() != "controlvector":
                raise ValueError(
                    f"a control vector must have the architecture controlvector; got {path}"
                )
            vectors = {}
            for tensor in reader.tensors:
                kind, _, layer = tensor.name.partition(".")
                if kind == "direction":
                    numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
                    vectors[f"blocks.{int(layer)}.resid_post"] = torch.tensor(numbers).float()
            shapes = sorted({tuple(vector.shape) for vector in vectors.values()})
            if [len(shape) for shape in shapes] != [1]:
                raise ValueError(f"directions must be vectors of one length; got shapes {shapes}")
        return cls(vectors, about={"read from": os.fspath(path)})

    def _name(self, place: int | str | tuple[str, int]) -> str:
        """Return the name of the point at a place; see `direction[place]`.

        Raises:
            UnknownNameError, ValueError, TypeError: as in `direction[place]`.
        """
        match place:
            case str():
                names = [name for name in self.vectors if name == place]
            case SupportsIndex():
                names = _in_layer(self.vectors, index(place))
            case (str(short), SupportsIndex() as layer):
                ending = [name for name in self.vectors if f".{name}".endswith(f".{short}")]
                names = _in_layer(ending, index(layer))
            case _:
                raise TypeError(
                    "a place of a direction must be a layer, the name of a point, or a pair such "
                    f"as ('resid_post', 2); got {shown(place)}"
                )
        if not names:
            name = place if isinstance(place, str) else str(place)
            error = unknown_name(name, self.vectors, "point of this direction")
            error.args = (f"{error.args[0]} (direction[name] is a vector for any point)",)
            layers = sorted({n for other in self.vectors if (n := layer_of(other)) is not None})
            if isinstance(place, SupportsIndex) and layers:
                listed = ", ".join(map(str, layers))
                error = UnknownNameError(
                    f"no point of this direction is in layer {place}; its layers are {listed}",
                    place,
                )
            raise error
        if len(names) > 1:
            raise ValueError(f"layer {place} must have one point; got {' and '.join(names)}")
        return names[0]

    def __repr__(self) -> str:
        lines = [
            f"Direction at {number_of(len(self.vectors), 'point')}"
            + "".join(f", {name} {value}" for name, value in self.about.items())
        ]
        lengths = {name: float(vector.norm()) for name, vector in self.vectors.items()}
        printed = [*lengths]
        if len(lengths) > _MOST_POINTS:
            printed = sorted(lengths, key=lambda name: -lengths[name])[:_MOST_POINTS]
        lines += [f"  {name}: length {lengths[name]:.4g}" for name in printed]
        if len(lengths) > len(printed):
            lines.append(
                f"  the {len(printed)} longest of {len(lengths)} vectors; .vectors contains all"
            )
        return "\n".join(lines)


def _in_layer(names: Iterable[str], layer: int) -> list[str]:
    """Return the names in a layer. A negative layer counts from the last layer of the names."""
    layer_of_name = {name: n for name in names if (n := layer_of(name)) is not None}
    if layer < 0:
        layer += max(layer_of_name.values(), default=-1) + 1
    return [name for name, n in layer_of_name.items() if n == layer]


def _flat(value: Float[Tensor, "..."], size: int) -> Float[Tensor, "*_rows {size}"]:
    """Flatten the axes `head` and `d_head` of a value, unless its last axis has the size `size`."""
    return value if value.shape[-1] == size or value.ndim < 2 else value.flatten(-2)
