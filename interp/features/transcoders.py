"""Transcoders of several layers: what both forms have in common, and sets of transcoders.

In a set, the features of a layer write to this layer only. In a cross-layer transcoder
(`cross_layer`), they also write to later layers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import layer_of, unknown_name
from interp.features.dictionary import Dictionary


class Transcoders(nn.Module, ABC):
    """Transcoders of several layers, as `load_transcoders` returns them and attribution graphs use
    them.

    There are two forms: `TranscoderSet` and `CrossLayerTranscoder`. `.to(device)` moves the weights
    of all layers.

    Attributes:
        reads, writes: the last part of the names of the points of each layer, such as
            `ln2.normalized` and `mlp_out`. None if it is unknown or differs between layers.
        config: the config in the files.

    >>> from interp.features import load_transcoders
    >>> transcoders = load_transcoders("pydoc-4l/transcoders")
    >>> transcoders.layers, transcoders.reads, transcoders.writes
    ([0, 1, 2, 3], 'ln2.normalized', 'mlp_out')
    >>> transcoders.dictionary(1).n_features
    1024
    """

    reads: str | None
    writes: str | None
    config: dict[str, Any]

    def __init__(
        self, reads: str | None, writes: str | None, config: Mapping[str, Any] | None
    ) -> None:
        super().__init__()
        self.reads = reads
        self.writes = writes
        self.config = dict(config or {})

    @property
    @abstractmethod
    def layers(self) -> list[int]:
        """The numbers of the layers, in increasing order."""

    @abstractmethod
    def dictionary(self, layer: int) -> Dictionary:
        """Return the features of a layer as a dictionary that writes to that layer only."""

    def encode(
        self, streams: list[Float[Tensor, "*rows _d_in"]]
    ) -> list[Float[Tensor, "*rows _feature"]]:
        """Return the features of each layer from the vectors that each layer reads."""
        layers = map(self.dictionary, self.layers)
        return [layer.encode(stream) for stream, layer in zip(streams, layers, strict=True)]

    def decode(
        self,
        features: list[Float[Tensor, "*rows _feature"]],
        streams: list[Float[Tensor, "*rows _d_in"]] | None = None,
    ) -> list[Float[Tensor, "*rows _d_out"]]:
        """Return the vectors that are written to each layer.

        Args:
            features: the features of each layer.
            streams: the vectors that each layer reads. Only skip connections need them.

        Raises:
            ValueError: if the transcoders have skip connections and `streams` is missing.
        """
        return self._decoded(features, streams)

    @abstractmethod
    def _decoded(self, features: list[Tensor], streams: list[Tensor] | None) -> list[Tensor]:
        """Return the vectors that `decode` returns."""


class TranscoderSet(Transcoders, Mapping[str, Dictionary]):
    """A transcoder for each of several layers: a mapping from the points that they write to
    dictionaries.

    Args:
        dictionaries: the transcoders by the points that they write, such as `blocks.1.mlp_out`.
        config: the config in the files. Default: empty.

    Raises:
        TypeError: if an object is no dictionary.
        ValueError: if the set is empty, a point has no number of a layer, or two points are in the
            same layer.

    >>> from interp.features import load_transcoders, splice
    >>> from models import load
    >>> transcoders = load_transcoders("pydoc-4l/transcoders")
    >>> [*transcoders][:2]
    ['blocks.0.mlp_out', 'blocks.1.mlp_out']
    >>> with splice(load("pydoc-4l"), transcoders) as runner:
    ...     cache = runner.capture("def f(x):", names="blocks.3.mlp_out.features")
    >>> cache["blocks.3.mlp_out.features"].shape
    torch.Size([1, 9, 1024])
    """

    dictionaries: nn.ModuleList

    def __init__(
        self, dictionaries: Mapping[str, Dictionary], config: Mapping[str, Any] | None = None
    ) -> None:
        point_of: dict[int, str] = {}
        for point, dictionary in dictionaries.items():
            if not isinstance(dictionary, Dictionary):
                raise TypeError(
                    f"{point} must be a Dictionary; got {type(dictionary).__name__}; "
                    "load_sae(path) reads one"
                )
            layer = layer_of(point)
            if layer is None or layer in point_of:
                raise ValueError(
                    "each point must be in another layer, such as blocks.0.mlp_out and "
                    f"blocks.1.mlp_out; got {', '.join(map(repr, dictionaries))}"
                )
            point_of[layer] = point
        if not point_of:
            raise ValueError("dictionaries must contain at least one transcoder; got none")
        reads = {_in_block(dictionary.reads) for dictionary in dictionaries.values()}
        writes = {_in_block(point) for point in dictionaries}
        super().__init__(
            reads=reads.pop() if len(reads) == 1 else None,
            writes=writes.pop() if len(writes) == 1 else None,
            config=config,
        )
        self._point_of = {layer: point_of[layer] for layer in sorted(point_of)}
        self.dictionaries = nn.ModuleList(dictionaries[name] for name in self._point_of.values())

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers, in increasing order."""
        return [*self._point_of]

    def dictionary(self, layer: int) -> Dictionary:
        """Return the transcoder of a layer.

        Raises:
            UnknownNameError: if the set has no transcoder of the layer.
        """
        if layer not in self._point_of:
            raise unknown_name(str(layer), map(str, self._point_of), "layer of the transcoders")
        return self[self._point_of[layer]]

    def _decoded(self, features: list[Tensor], streams: list[Tensor] | None) -> list[Tensor]:
        """Return the output of the transcoder of each layer.

        Args:
            features: the features of each layer.
            streams: the vector that each layer reads. Needed only for skip connections.
        """
        inputs = [None] * len(self) if streams is None else streams
        parts = zip(self.values(), features, inputs, strict=True)
        return [dictionary.decode(values, x) for dictionary, values, x in parts]

    def __getitem__(self, point: str) -> Dictionary:
        points = [*self._point_of.values()]
        if point not in points:
            raise unknown_name(point, points, "transcoder")
        dictionary = self.dictionaries[points.index(point)]
        assert isinstance(dictionary, Dictionary)
        return dictionary

    def __iter__(self) -> Iterator[str]:
        return iter(self._point_of.values())

    def __len__(self) -> int:
        return len(self._point_of)

    # Modules are compared by identity, and have a hash. Without these methods, `Mapping` would
    # compare the contents, and the set would have no hash.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def _in_block(point: str | None) -> str | None:
    """Return the name of a point inside its block, or None if the point is unknown.

    >>> _in_block("blocks.3.ln2.normalized")
    'ln2.normalized'
    """
    layer = None if point is None else layer_of(point)
    return point if point is None or layer is None else point.partition(f".{layer}.")[2]
