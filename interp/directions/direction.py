"""Directions: vectors of points, how they were found, and files of them."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooks import CacheError, Point
from hooks.base import layer_of, require_kind, storage, unknown_name
from interp import pictures
from interp.pictures.view import told
from interp.results.result import Result

_KIND = "direction"


@dataclass(frozen=True, eq=False, repr=False)
class Direction(pictures.Shown):
    """A vector at each of some points, usually one a layer. `edits.add` steers along it.

    Attributes:
        vectors: by the names of points.
        offsets: by the same names: a value there is on the side of `yes` where `value @ vector + offset` is above 0.
        about: how it was found; it fits JSON.

    >>> v = Direction({"blocks.2.resid_post": torch.tensor([3.0, 4.0])}, {"blocks.2.resid_post": -5.0})
    >>> v[2]
    tensor([3., 4.])
    >>> v.unit()[2], v.unit().offsets
    (tensor([0.6000, 0.8000]), {'blocks.2.resid_post': -1.0})
    """

    vectors: Mapping[str, Float[Tensor, " d"]]
    offsets: Mapping[str, float] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_kind("vectors", self.vectors, Mapping, "a vector for each of some names of points")
        for name, vector in self.vectors.items():
            require_kind(f"the vector at {name}", vector, Tensor, "a tensor [d]")

    def __getitem__(self, place: int | str) -> Float[Tensor, " d"]:
        """The vector of a layer, or of a point by its name.

        Raises:
            UnknownNameError: if there is none; it has close matches.
            ValueError: if several points are in the layer.
        """
        return self.vectors[self._name(place)]

    def at(self, *places: int | str) -> "Direction":
        """Some of its vectors, by layer or name.

        Raises:
            UnknownNameError, ValueError: as for an index.
        """
        names = [self._name(place) for place in places]
        offsets = {name: self.offsets[name] for name in names if name in self.offsets}
        return Direction({name: self.vectors[name] for name in names}, offsets, self.about)

    def unit(self) -> "Direction":
        """The same with vectors of length 1.

        Raises:
            ValueError: if a vector is zero or has an infinite number.
        """
        sizes = {name: float(vector.norm()) for name, vector in self.vectors.items()}
        if wrong := [name for name, size in sizes.items() if not 0 < size < math.inf]:
            raise ValueError(
                f"a vector must have a length above 0 to get length 1; got {sizes[wrong[0]]} at {wrong[0]}"
            )
        vectors = {name: vector / sizes[name] for name, vector in self.vectors.items()}
        offsets = {name: offset / sizes[name] for name, offset in self.offsets.items()}
        return Direction(vectors, offsets, self.about)

    def vector_at(self, point: Point) -> Float[Tensor, " d"]:
        """The vector of a point, for edits. `direction[name]` gives it for a name.

        Raises:
            TypeError: if it is no point, such as a name.
            UnknownNameError: if it has none there; it has close matches.
        """
        require_kind("point", point, Point, "a Point", "direction[name] takes a name")
        return self[point.name]

    def scores(self, values: Mapping[str, Float[Tensor, "..."]]) -> dict[str, Float[Tensor, "..."]]:
        """`value @ vector + offset` at each point that the values have, such as those of a cache.

        Values have the axes `*rows d`, or heads and their numbers in place of `d`; scores have `*rows`.
        """
        return {
            name: _flat(values[name], len(vector)).to(vector) @ vector + self.offsets.get(name, 0.0)
            for name, vector in self.vectors.items()
            if name in values
        }

    def view(self) -> pictures.View:
        """How it was found, and the length of each vector."""
        lengths = torch.stack([vector.norm().float().cpu() for vector in self.vectors.values()])
        result = Result(
            lengths[:, None],
            ("point", "example"),
            labels={"point": [name.removeprefix("blocks.") for name in self.vectors]},
            unit="length",
        )
        return pictures.View(
            "a direction", pictures.effects(result).parts, says=[*told(self.about)]
        )

    def _writers(self) -> dict[str, Callable[[Path], object]]:
        files = dict.fromkeys(storage.SAFETENSORS, self._save)
        return {**super()._writers(), **files, ".gguf": self.to_gguf}

    def _save(self, path: Path) -> None:
        facts = {"offsets": dict(self.offsets), "about": dict(self.about)}
        storage.save(path, _KIND, self.vectors, facts)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Direction":
        """Read what `save` wrote. A path that ends in `.gguf` is read by `from_gguf`.

        Raises:
            FileNotFoundError: if there is no such file.
            CacheError: if it is another file, or damaged.
        """
        if storage.path_of(path).suffix.lower() == ".gguf":
            return cls.from_gguf(path)
        with storage.opened(storage.path_of(path), _KIND) as (vectors, facts):
            return cls(vectors, facts["offsets"], facts["about"])

    def to_gguf(self, path: str | os.PathLike[str], model_hint: str = "") -> None:
        """Write a control vector, as llama.cpp and repeng read it. It needs the package gguf.

        llama.cpp adds `direction.l` to the output of layer l, so all points must be `resid_post`. It has none for layer
        0, which is therefore refused.

        Args:
            path: the file; its name ends in `.gguf`.
            model_hint: the architecture of the model, such as `llama`.

        Raises:
            ValueError: if a point is no `resid_post` of a layer from 1 on, or the path has another
                suffix.
        """
        import gguf

        storage.suffix_of(path, [".gguf"])

        layers: dict[int, Any] = {}
        for name, vector in self.vectors.items():
            layer = layer_of(name)
            if layer in (None, 0) or not name.endswith("resid_post"):
                raise ValueError(
                    f"control vectors must be at resid_post of layers from 1 on; got {name}"
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
        """Read a control vector of llama.cpp or repeng. It needs the package gguf.

        The vectors are float32, whatever type the file has them in. Tensors of other names than `direction.l` are left.

        Raises:
            FileNotFoundError: if there is no such file.
            CacheError: if it is another file, or damaged, or a direction is no vector of the others' length.
        """
        import gguf

        class CheckedReader(gguf.GGUFReader):
            def _get(
                self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None
            ) -> Any:
                numbers = super()._get(offset, dtype, count, override_order)
                # The library would go on for as long as a wrong length says.
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

    def _name(self, place: int | str) -> str:
        names = [name for name in self.vectors if place in (name, layer_of(name))]
        if not names:
            raise unknown_name(str(place), self.vectors, "point of this direction")
        if len(names) > 1:
            raise ValueError(f"layer {place} must have one point; it has {' and '.join(names)}")
        return names[0]

    def __repr__(self) -> str:
        lines = [
            f"Direction at {len(self.vectors)} points"
            + "".join(f", {k} {v}" for k, v in self.about.items())
        ]
        lines += [
            f"  {name}: length {float(vector.norm()):.4g}"
            for name, vector in [*self.vectors.items()][:38]
        ]
        return "\n".join(lines)


def _flat(value: Float[Tensor, "..."], size: int) -> Float[Tensor, "*_rows {size}"]:
    """The value with its last two axes, heads and their numbers, in one row where a vector of `size` needs that."""
    return value if value.shape[-1] == size or value.ndim < 2 else value.flatten(-2)
