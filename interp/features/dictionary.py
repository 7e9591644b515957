"""Dictionaries: sparse autoencoders and transcoders of one layer.

1. A dictionary reads a vector x, which may be normalized, and computes the pre-activations
   `pre = (x - b_dec) @ W_enc + b_enc`.
2. A nonlinearity computes the features from the pre-activations. Most features are 0.
3. The dictionary writes `features @ W_dec + b_dec`, and adds `x @ W_skip` if it has a skip
   connection.

A sparse autoencoder reconstructs the vector that it reads (Bricken et al. 2023, "Towards
Monosemanticity"; Cunningham et al. 2023). A transcoder computes the output of a sublayer from its
input (Dunefsky et al. 2024). `load_sae` loads both from files.
"""

import os
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from hooks.base import HintedClass, refuse, require_integer, require_kind, shown, storage
from interp import plots
from interp.features import saving
from interp.features.activations import FeatureValues, Gated, JumpReLU, TopK
from interp.json_form import Table, form
from interp.plots import objects

NormKind = Literal["none", "constant_norm_rescale", "layer_norm"]


class DictionaryOrigin(TypedDict, total=False):
    """The place where a dictionary was trained.

    Attributes:
        reads, writes: the names of the points that the dictionary was trained to read and write.
            Default: unknown.
        head: the head whose values the dictionary reads. Default: all heads.
        transcodes: whether the dictionary is a transcoder. Default: inferred from the points and
            sizes.
        config: the config in the files of the dictionary. Default: empty.
    """

    reads: str | None
    writes: str | None
    head: int | None
    transcodes: bool | None
    config: Mapping[str, Any] | None


class DictionarySettings(DictionaryOrigin, total=False):
    """The keywords that classes of dictionaries pass on to `Dictionary`; see there."""

    norm: NormKind


class Dictionary(plots.Shown, nn.Module, metaclass=HintedClass):
    """A sparse autoencoder or a transcoder with frozen weights.

    Args:
        W_enc: the encoder, [d_in feature].
        W_dec: the decoder, [feature d_out].
        b_enc, b_dec: the biases of the encoder and the decoder.
        activation: the nonlinearity that computes features from pre-activations; see
            `interp.features.activations`.
        W_skip: the skip connection of a transcoder, [d_in d_out]. Default: no skip connection.
        subtracts_b_dec: whether `b_dec` is subtracted from the input. Default: False.
        norm: the normalization of the input, which is undone at the output of an autoencoder.
            `constant_norm_rescale` scales the input to the length √d_in, except that zeros stay
            zeros. `layer_norm` sets the mean to 0 and the standard deviation to 1. Default: `none`.
        origin: the fields of `DictionaryOrigin`, such as `reads="blocks.3.resid_post"`. Each field
            becomes an attribute of the dictionary. For an autoencoder, `reads` and `writes` are the
            same point; if they differ, or only one is known, the dictionary is a transcoder.

    Raises:
        ValueError: if a weight has the wrong size, or `k` is larger than the number of features.
        TypeError: if a keyword is unknown. The error lists close matches.

    >>> import torch
    >>> autoencoder = Dictionary(
    ...     W_enc=torch.tensor([[1.0, -1.0]]),
    ...     W_dec=torch.tensor([[1.0], [-1.0]]),
    ...     b_enc=torch.zeros(2),
    ...     b_dec=torch.tensor([3.0]),
    ...     activation=nn.ReLU(),
    ...     subtracts_b_dec=True,
    ... )
    >>> autoencoder.encode(torch.tensor([[7.0], [1.0]]))
    tensor([[4., 0.],
            [0., 2.]])
    >>> autoencoder(torch.tensor([[7.0], [1.0]])).flatten()
    tensor([7., 1.])
    """

    W_enc: Tensor
    W_dec: Tensor
    b_enc: Tensor
    b_dec: Tensor
    W_skip: Tensor | None
    activation: nn.Module
    subtracts_b_dec: bool
    norm: NormKind
    reads: str | None
    writes: str | None
    head: int | None
    transcodes: bool | None
    config: dict[str, Any]

    def __init__(
        self,
        W_enc: Float[Tensor, "d_in feature"],
        W_dec: Float[Tensor, "feature d_out"],
        b_enc: Float[Tensor, " feature"],
        b_dec: Float[Tensor, " d_out"],
        activation: nn.Module,
        *,
        W_skip: Float[Tensor, "d_in d_out"] | None = None,
        subtracts_b_dec: bool = False,
        norm: NormKind = "none",
        **origin: Unpack[DictionaryOrigin],
    ) -> None:
        super().__init__()
        unknown = [name for name in origin if name not in DictionaryOrigin.__annotations__]
        refuse(unknown, Dictionary.__init__, "Dictionary")
        require_kind(
            "activation",
            activation,
            kind=nn.Module,
            words="a module",
            call="torch.nn.ReLU() or TopK(k)",
        )
        _require_matrix("W_enc", W_enc, "d_in feature")
        _require_matrix("W_dec", W_dec, "feature d_out")
        weights = {
            "W_enc": (W_enc, "d_in feature"),
            "W_dec": (W_dec, "feature d_out"),
            "b_enc": (b_enc, "feature"),
            "b_dec": (b_dec, "d_in" if subtracts_b_dec else "d_out"),
            "W_skip": (W_skip, "d_in d_out"),
        }
        thresholds = {name: (tensor, "feature") for name, tensor in activation.named_buffers()}
        require_sizes(_sizes(W_enc, W_dec, b_enc), {**weights, **thresholds})
        if isinstance(activation, TopK):
            require_integer("k", activation.k, most=W_enc.shape[1])
        for name, (weight, _) in weights.items():
            self.register_buffer(name, weight)
        self.activation = activation
        self.norm = norm
        self.subtracts_b_dec = subtracts_b_dec
        self.reads = origin.get("reads")
        self.writes = origin.get("writes")
        self.head = origin.get("head")
        self.transcodes = origin.get("transcodes")
        self.config = dict(origin.get("config") or {})
        self.eval()

    def view(self) -> plots.View:
        """Return a view of the sizes and settings, and of the lengths of the decoder rows."""
        return objects.dictionary(self)

    @property
    def d_in(self) -> int:
        """The size of the input."""
        return self.W_enc.shape[0]

    @property
    def d_out(self) -> int:
        """The size of the output."""
        return self.W_dec.shape[1]

    @property
    def n_features(self) -> int:
        """The number of features."""
        return self.W_enc.shape[1]

    @property
    def is_transcoder(self) -> bool:
        """True if the dictionary is a transcoder, so that its output is not a reconstruction of its
        input.
        """
        if self.transcodes is not None:
            return self.transcodes
        return self.W_skip is not None or self.reads != self.writes or self.d_in != self.d_out

    @property
    def offset(self) -> Float[Tensor, " feature"]:
        """The vector that is added to `x @ W_enc` in the pre-activations of a dictionary without a
        norm.
        """
        return self.b_enc - self.b_dec @ self.W_enc if self.subtracts_b_dec else self.b_enc

    def pre_activations(self, x: Float[Tensor, "*rows d_in"]) -> FeatureValues:
        """Return the pre-activations of each row, the input of the nonlinearity.

        Raises:
            TypeError: if `x` is no tensor.
            ValueError: if its last axis is not d_in.
        """
        if not isinstance(x, Tensor) or x.shape[-1:] != (self.d_in,):
            reads = f"cache[{self.reads!r}]" if self.reads else "a value of a cache"
            error = ValueError if isinstance(x, Tensor) else TypeError
            raise error(
                f"a dictionary must read a tensor [..., {self.d_in}], such as {reads}; got "
                f"{shown(x)}"
            )
        x = self._normed(x.to(self.W_enc.dtype))
        if self.subtracts_b_dec:
            x = x - self.b_dec
        return x @ self.W_enc + self.b_enc

    def encode(self, x: Float[Tensor, "*rows d_in"]) -> FeatureValues:
        """Return the features of each row, in the dtype of the dictionary."""
        features: Tensor = self.activation(self.pre_activations(x))
        return features

    def write(
        self, features: FeatureValues, x: Float[Tensor, "*rows d_in"]
    ) -> Float[Tensor, "*rows d_out"]:
        """Return the contribution of features to the output, which is the linear part of `decode`.

        Args:
            features: any features, or differences of features.
            x: the input of the dictionary. It is only used if the dictionary has a norm.
        """
        return self._in_units_of(x, features @ self.W_dec)

    def decode(
        self, features: FeatureValues, x: Float[Tensor, "*rows d_in"] | None = None
    ) -> Float[Tensor, "*rows d_out"]:
        """Return the output for some features.

        Args:
            features: the features.
            x: the input of the dictionary. It is only needed if the dictionary undoes a norm or has
                a skip connection.

        Raises:
            TypeError: if the features or `x` are no tensor.
            ValueError: if `x` is needed and missing, or the features have another size.
        """
        n_features = len(self.W_dec)
        require_kind("x", x, (Tensor, type(None)), "a tensor, the input of the dictionary")
        if not isinstance(features, Tensor) or features.shape[-1:] != (n_features,):
            error = ValueError if isinstance(features, Tensor) else TypeError
            raise error(
                f"decode needs a tensor [..., {n_features}], as encode returns it; "
                f"got {shown(features)}"
            )
        if x is None:
            if self._undoes_norm or self.W_skip is not None:
                raise ValueError(
                    "decode needs x, the input, because the dictionary has a norm or a skip "
                    "connection"
                )
            x = features.new_zeros(*features.shape[:-1], self.d_in)
        return self.write(features, x) + self._constant(x)

    def bypass(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_out"] | None:
        """Return the part of the output that goes from the input past the features: the output of
        the skip connection, or None if there is no such part.
        """
        return None if self.W_skip is None else x.to(self.W_skip.dtype) @ self.W_skip

    def forward(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_out"]:
        """Return the output: the reconstruction of `x` by an autoencoder, or the output of the
        sublayer that a transcoder replaces.
        """
        if not isinstance(self.activation, TopK):
            return self.decode(self.encode(x), x)
        # Only a few features are active. It is faster to add up their decoder rows than to create a
        # tensor of all features.
        values, numbers = self.activation.top(self.pre_activations(x))
        sums = embedding_bag(
            numbers.flatten(0, -2),
            self.W_dec,
            per_sample_weights=values.flatten(0, -2),
            mode="sum",
        )
        return self._in_units_of(x, sums.view(*x.shape[:-1], -1)) + self._constant(x)

    def with_input_gain(self, gain: Float[Tensor, " d_in"]) -> "Dictionary":
        """Return a dictionary whose output for `x * gain` is the output of this dictionary for `x`.

        Transcoders of Gemma Scope 1 were trained on the output of a norm before its gain. This
        method makes them fit our point `ln2.normalized`, which includes the gain:
        `load_sae(path).with_input_gain(block.ln2.weight)`.

        Raises:
            ValueError: if the dictionary has a norm, or subtracts `b_dec`.

        >>> import torch
        >>> one, zero = torch.eye(1), torch.zeros(1)
        >>> identity = Dictionary(one, one, zero, zero, nn.ReLU())
        >>> identity.with_input_gain(torch.tensor([2.0]))(torch.tensor([6.0]))
        tensor([3.])
        """
        skip = None if self.W_skip is None else self.W_skip / gain[:, None]
        if self.norm != "none" or self.subtracts_b_dec:
            raise ValueError(
                "a gain cannot be multiplied into the encoder of a dictionary that has a norm or "
                "subtracts b_dec"
            )
        reads = self.reads and self.reads.replace("hook_normalized", "normalized")
        return self._with(W_enc=self.W_enc / gain[:, None], W_skip=skip, reads=reads)

    def with_unit_decoder(self) -> "Dictionary":
        """Return a dictionary with the same outputs whose decoder rows have length 1, as
        Neuronpedia shows features.

        Features, biases and thresholds are multiplied by the original lengths of the rows. Rows of
        zeros are unchanged.

        Raises:
            ValueError: if the rows have different lengths and the nonlinearity compares features,
                as top-k does, because other features would be selected; or for matching pursuit.

        >>> import torch
        >>> one, zero = torch.eye(1), torch.zeros(1)
        >>> double = Dictionary(one, 2 * one, zero, zero, nn.ReLU())
        >>> unit = double.with_unit_decoder()
        >>> unit.encode(torch.tensor([3.0])), unit(torch.tensor([3.0])), double(torch.tensor([3.0]))
        (tensor([6.]), tensor([6.]), tensor([6.]))
        """
        length = self.W_dec.norm(dim=1)
        length = length.where(length > 0, 1.0)
        activation = self.activation
        if isinstance(activation, JumpReLU | Gated):
            activation = activation.scaled(length)
        elif not isinstance(activation, nn.ReLU | nn.Identity) and not length.allclose(length[0]):
            raise ValueError(
                f"all rows of the decoder must have the same length, because {activation} compares "
                f"features; got lengths from {length.min():.3g} to {length.max():.3g}"
            )
        return self._with(
            W_enc=self.W_enc * length,
            b_enc=self.b_enc * length,
            W_dec=self.W_dec / length[:, None],
            activation=activation,
        )

    def _with(self, **changes: Any) -> "Dictionary":
        """Return this dictionary with some weights or settings replaced."""
        weights = ("W_enc", "W_dec", "b_enc", "b_dec", "activation", "W_skip")
        settings = ("subtracts_b_dec", "norm", *DictionaryOrigin.__annotations__)
        same = {name: getattr(self, name) for name in (*weights, *settings)}
        return Dictionary(**same | changes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a folder that `load_sae` reads; or the page or the JSON form, if the path ends in
        `.html` or `.json`.

        The loaded dictionary has the same weights and settings, bit by bit. (`load_sae` returns
        half precision as float32 unless its `dtype` is given.) If SAELens has an architecture that
        computes the same, the folder contains the files of SAELens 6, `cfg.json` and
        `sae_weights.safetensors`, and `SAE.load_from_disk` reads them too. Otherwise it contains
        `dictionary.safetensors`. The config in the files becomes the attribute `config` of the
        loaded dictionary.

        Args:
            path: the folder, which is created if it does not exist, or the file.

        Raises:
            ValueError: if the path ends in the suffix of another kind of file, such as `.png`, and
                is not an existing folder; or for a temporal dictionary.
            TypeError: if the activation is a class of your own, or a fact in the config does not
                fit JSON.

        >>> import tempfile
        >>> import torch
        >>> from interp.features import load_sae
        >>> eye, zeros = torch.eye(2), torch.zeros(2)
        >>> mine = Dictionary(eye, eye, zeros, zeros, TopK(1), reads="embed", writes="embed")
        >>> mine.save(folder := tempfile.mkdtemp())
        >>> load_sae(folder)
        Dictionary(
          2 -> 2 features -> 2, at embed
          (activation): TopK(k=1, by='value', relu=True)
        )
        """
        files = (".html", ".json")
        if storage.path_of(path).suffix.lower() in files:
            super().save(path)
        else:
            storage.require_folder(path, files)
            saving.save(storage.path_of(path), self, self._as_sae_lens())

    def _as_sae_lens(self) -> saving.SAELensParts | None:
        """Return the fields and weights of SAELens that are special to the architecture, or None if
        SAELens has no architecture that computes the same.
        """
        return saving.as_sae_lens(self)

    def as_json(self) -> dict[str, Any]:
        """Return the length of each feature's rows, in the JSON form of all results; see
        `interp.json_form`.
        """
        tables = {
            "encoder.norm": Table(self.W_enc.norm(dim=0), "feature", "norm"),
            "decoder.norm": Table(self.W_dec.norm(dim=1), "feature", "norm"),
        }
        about = {"reads": self.reads, "writes": self.writes, "activation": f"{self.activation}"}
        return form("Dictionary", tables, {**about, "config": self.config})

    def extra_repr(self) -> str:
        """The sizes and points, for the printed module."""
        skip = ", skip" if self.W_skip is not None else ""
        norm = f", norm={self.norm!r}" if self.norm != "none" else ""
        place = self.reads if self.reads == self.writes else f"{self.reads} -> {self.writes}"
        model = (self.config.get("metadata") or self.config).get("model_name")
        of = f" of {model}" if model else ""
        return (
            f"{self.d_in} -> {self.n_features} features -> {self.d_out}{skip}{norm}, at {place}{of}"
        )

    @property
    def _undoes_norm(self) -> bool:
        """True if the output is returned to the scale and the mean of the input."""
        return self.norm != "none" and not self.is_transcoder

    def _in_units_of(
        self, x: Float[Tensor, "*rows d_in"], written: Float[Tensor, "*rows d_out"]
    ) -> Float[Tensor, "*rows d_out"]:
        """Return an output with the norm of an autoencoder undone."""
        return written * self._scale(x) if self._undoes_norm else written

    def _scale(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows 1"]:
        """Return the divisor of the norm, without the constant that prevents a division by 0."""
        x = x.to(self.W_enc.dtype)
        if self.norm == "layer_norm":
            return x.std(-1, keepdim=True)
        return x.norm(dim=-1, keepdim=True) / self.d_in**0.5

    def _normed(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_in"]:
        """Return the normalized input; see `norm`."""
        if self.norm == "layer_norm":
            return (x - x.mean(-1, keepdim=True)) / (self._scale(x) + 1e-5)
        if self.norm == "none":
            return x
        scale = self._scale(x)
        # Do not divide vectors of zeros by 0. Values at padding may be zero.
        return x / scale.where(scale > 0, 1.0)

    def _constant(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "..."]:
        """Return the part of the output that does not depend on the features."""
        x = x.to(self.W_enc.dtype)
        constant = self.b_dec
        if self._undoes_norm:
            constant = constant * self._scale(x)
            if self.norm == "layer_norm":
                constant = constant + x.mean(-1, keepdim=True)
        bypass = self.bypass(x)
        return constant if bypass is None else constant + bypass


def _require_matrix(name: str, weight: object, axes: str) -> None:
    """Check that a weight is a tensor with two axes.

    Raises:
        TypeError: if the weight is no tensor.
        ValueError: if it does not have two axes.
    """
    hint = "load_sae(path) reads a dictionary"
    require_kind(name, weight, kind=Tensor, words=f"a tensor [{axes}]", call=hint)
    assert isinstance(weight, Tensor)
    if weight.ndim != 2:
        raise ValueError(f"{name} must be [{axes}]; got {[*weight.shape]}")


def _sizes(W_enc: Tensor, W_dec: Tensor, b_enc: object) -> dict[str, int]:
    """Return the size of each axis of the weights.

    The length of `b_enc` is the number of features. If a matrix has this length along its other
    axis, the user has passed it transposed. The result has the sizes that the matrix should have,
    so that the error of `require_sizes` names this matrix.
    """
    d_in, n_features = W_enc.shape
    n_biases = b_enc.numel() if isinstance(b_enc, Tensor) else n_features
    if n_features != n_biases and d_in == n_biases:
        n_features, d_in = W_enc.shape
    d_out = W_dec.shape[1]
    if W_dec.shape[0] != n_features and d_out == n_features:
        d_out = W_dec.shape[0]
    return {"d_in": d_in, "feature": n_features, "d_out": d_out}


def require_sizes(
    sizes: Mapping[str, int], weights: Mapping[str, tuple[Tensor | None, str]]
) -> None:
    """Check that each weight has the sizes of its axes. PyTorch would broadcast an axis of size 1.

    Args:
        sizes: the size of each axis.
        weights: the weights and their axes, by name.

    Raises:
        ValueError: if a weight has the wrong size.
    """
    for name, (weight, axes) in weights.items():
        wanted = [sizes[axis] for axis in axes.split()]
        one_for_all = name == "threshold" and weight is not None and weight.ndim == 0
        if weight is not None and [*weight.shape] != wanted and not one_for_all:
            is_turned = weight.ndim == 2 and [*weight.mT.shape] == wanted
            hint = f", which is transposed: pass {name}.T" if is_turned else ""
            raise ValueError(f"{name} must be [{axes}], {wanted}; got {[*weight.shape]}{hint}")
