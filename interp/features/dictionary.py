"""Dictionaries: sparse autoencoders and transcoders of one layer.

1. A dictionary reads a vector x, possibly normed, and makes pre-activations `pre = (x - b_dec) @ W_enc + b_enc`.
2. Its nonlinearity makes features of them, most of them 0.
3. It writes `features @ W_dec + b_dec`, and adds `x @ W_skip` if it has a skip connection.

A sparse autoencoder writes what it reads (Bricken et al. 2023, "Towards Monosemanticity"; Cunningham et al. 2023); a
transcoder writes what a sublayer adds (Dunefsky et al. 2024). `load_sae` makes them from files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from hooks.base import Words, require_integer, require_kind, shown
from interp import pictures
from interp.features.activations import Features, Gated, JumpReLU, TopK
from interp.pictures import objects

NormKind = Literal["none", "constant_norm_rescale", "layer_norm"]


@dataclass(frozen=True)
class Origin:
    """Facts of where a dictionary was trained.

    Attributes:
        reads, writes: names of the points that it was trained on; None if unknown.
        head: the head whose values it reads; None for all.
        transcodes: whether it is a transcoder; None if its points or sizes say so.
        config: what its files say about it.
    """

    reads: str | None = None
    writes: str | None = None
    head: int | None = None
    transcodes: bool | None = None
    config: Mapping[str, Any] | None = None


class Dictionary(pictures.Shown, nn.Module):
    """A sparse autoencoder or a transcoder. Its weights are frozen.

    Args:
        W_enc: encoder, [d_in feature].
        W_dec: decoder, [feature d_out].
        b_enc, b_dec: biases of both.
        activation: makes features from pre-activations; see `interp.features.activations`.
        W_skip: the skip connection of a transcoder, [d_in d_out].
        subtracts_b_dec: whether `b_dec` is subtracted from what is read.
        norm: what is done to x first, and undone at the output of an autoencoder: `constant_norm_rescale` makes its
            length √d_in, but that of zeros, and `layer_norm` its mean 0 and its standard deviation 1.
        origin: where it was trained, such as `reads="blocks.3.resid_post"`; see `Origin`. Each is an attribute too.

    Raises:
        ValueError: if a weight has another size, or `k` is more than the features.
        TypeError: if there is no such keyword; it has close matches.

    >>> import torch
    >>> autoencoder = Dictionary(
    ...     W_enc=torch.tensor([[1.0, -1.0]]), W_dec=torch.tensor([[1.0], [-1.0]]), b_enc=torch.zeros(2),
    ...     b_dec=torch.tensor([3.0]), activation=nn.ReLU(), subtracts_b_dec=True)
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
        **origin: Any,
    ) -> None:
        super().__init__()
        Words(Origin).require(origin, ("W_skip", "subtracts_b_dec", "norm"), "Dictionary")
        require_kind("activation", activation, nn.Module, "a module", "torch.nn.ReLU() or TopK(k)")
        _require_matrix("W_enc", W_enc, "d_in feature")
        _require_matrix("W_dec", W_dec, "feature d_out")
        sizes = {"d_in": W_enc.shape[0], "feature": W_enc.shape[1], "d_out": W_dec.shape[1]}
        _require_sizes(
            sizes,
            {
                "W_dec": (W_dec, "feature d_out"),
                "b_enc": (b_enc, "feature"),
                "b_dec": (b_dec, "d_in" if subtracts_b_dec else "d_out"),
                "W_skip": (W_skip, "d_in d_out"),
                **{name: (tensor, "feature") for name, tensor in activation.named_buffers()},
            },
        )
        if isinstance(activation, TopK):
            require_integer("k", activation.k, most=sizes["feature"])
        self.register_buffer("W_enc", W_enc)
        self.register_buffer("W_dec", W_dec)
        self.register_buffer("b_enc", b_enc)
        self.register_buffer("b_dec", b_dec)
        self.register_buffer("W_skip", W_skip)
        self.activation = activation
        self.norm = norm
        self.subtracts_b_dec = subtracts_b_dec
        trained = Origin(**origin)
        self.reads = trained.reads
        self.writes = trained.writes
        self.head = trained.head
        self.transcodes = trained.transcodes
        self.config = dict(trained.config or {})
        self.eval()

    def view(self) -> pictures.View:
        """What it is, and how long its rows are."""
        return objects.dictionary(self)

    @property
    def d_in(self) -> int:
        """The size of what is read."""
        return self.W_enc.shape[0]

    @property
    def d_out(self) -> int:
        """The size of what is written."""
        return self.W_dec.shape[1]

    @property
    def n_features(self) -> int:
        """The number of features."""
        return self.W_enc.shape[1]

    @property
    def is_transcoder(self) -> bool:
        """Whether it writes something else than it reads."""
        if self.transcodes is not None:
            return self.transcodes
        return self.W_skip is not None or self.reads != self.writes or self.d_in != self.d_out

    @property
    def offset(self) -> Float[Tensor, " feature"]:
        """What is added to `x @ W_enc`, where there is no norm."""
        return self.b_enc - self.b_dec @ self.W_enc if self.subtracts_b_dec else self.b_enc

    def pre_activations(self, x: Float[Tensor, "*rows d_in"]) -> Features:
        """Return what the nonlinearity is given."""
        if not isinstance(x, Tensor) or x.shape[-1:] != (self.d_in,):
            reads = f"cache[{self.reads!r}]" if self.reads else "a value of a cache"
            raise ValueError(
                f"a dictionary must read a tensor [..., {self.d_in}], such as {reads}; got {shown(x)}"
            )
        x = self._normed(x.to(self.W_enc.dtype))
        if self.subtracts_b_dec:
            x = x - self.b_dec
        return x @ self.W_enc + self.b_enc

    def encode(self, x: Float[Tensor, "*rows d_in"]) -> Features:
        """Return the features of each row, in the dtype of the dictionary."""
        features: Tensor = self.activation(self.pre_activations(x))
        return features

    def write(
        self, features: Features, x: Float[Tensor, "*rows d_in"]
    ) -> Float[Tensor, "*rows d_out"]:
        """Return what features add to the output: the linear part of `decode`.

        Args:
            features: any features, or differences of them.
            x: what was read. It matters only with a norm.
        """
        return self._in_units_of(x, features @ self.W_dec)

    def decode(
        self, features: Features, x: Float[Tensor, "*rows d_in"] | None = None
    ) -> Float[Tensor, "*rows d_out"]:
        """Return the output that has these features.

        Args:
            features: the features.
            x: what was read. It matters with a norm or a skip connection alone.

        Raises:
            ValueError: if it matters and is not given.
        """
        n_features = len(self.W_dec)
        if not isinstance(features, Tensor) or features.shape[-1:] != (n_features,):
            raise ValueError(
                f"a dictionary must decode a tensor [..., {n_features}], such as encode gives; "
                f"got {shown(features)}"
            )
        if x is None:
            if self._undoes_norm or self.W_skip is not None:
                raise ValueError(
                    "decode needs x, what was read: the dictionary has a norm or a skip"
                )
            x = features.new_zeros(*features.shape[:-1], self.d_in)
        return self.write(features, x) + self._constant(x)

    def forward(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_out"]:
        """Return the output: of an autoencoder the reconstruction of `x`, of a transcoder that of what it replaces."""
        if not isinstance(self.activation, TopK):
            return self.decode(self.encode(x), x)
        # Few features of many: their rows are added up, and no tensor of all features is made.
        kept, numbers = self.activation.top(self.pre_activations(x))
        rows, weights = numbers.flatten(0, -2), kept.flatten(0, -2)
        sums = embedding_bag(rows, self.W_dec, per_sample_weights=weights, mode="sum")
        return self._in_units_of(x, sums.view(*x.shape[:-1], -1)) + self._constant(x)

    def with_input_gain(self, gain: Float[Tensor, " d_in"]) -> "Dictionary":
        """Return a dictionary that reads `x * gain` as this one reads `x`.

        Transcoders trained on the output of a norm before its gain (Gemma Scope 1) read our point `ln2.normalized`
        this way: `load_sae(path).with_input_gain(block.ln2.weight)`.

        >>> import torch
        >>> identity = Dictionary(torch.eye(1), torch.eye(1), torch.zeros(1), torch.zeros(1), nn.ReLU())
        >>> identity.with_input_gain(torch.tensor([2.0]))(torch.tensor([6.0]))
        tensor([3.])
        """
        skip = None if self.W_skip is None else self.W_skip / gain[:, None]
        if self.norm != "none" or self.subtracts_b_dec:
            raise ValueError(
                "a gain goes into the encoder only without a norm and a bias before it"
            )
        reads = self.reads and self.reads.replace("hook_normalized", "normalized")
        return self._with(W_enc=self.W_enc / gain[:, None], W_skip=skip, reads=reads)

    def with_unit_decoder(self) -> "Dictionary":
        """Return a dictionary of the same function whose decoder rows have length 1, as Neuronpedia shows features.

        Features, their biases and thresholds are multiplied by what the rows' lengths were. Rows of zeros stay.

        Raises:
            ValueError: if other features would win, or features are no function of one pre-activation each: of top-k with
                rows of different lengths, or with steps.

        >>> import torch
        >>> double = Dictionary(torch.eye(1), 2 * torch.eye(1), torch.zeros(1), torch.zeros(1), nn.ReLU())
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
                f"rows of the decoder must have one length, as {activation} compares features; "
                f"got lengths from {length.min():.3g} to {length.max():.3g}"
            )
        return self._with(
            W_enc=self.W_enc * length, b_enc=self.b_enc * length, W_dec=self.W_dec / length[:, None], activation=activation,
        )  # fmt: skip

    def _with(self, **changes: Any) -> "Dictionary":
        """This dictionary with other weights or settings."""
        weights = ("W_enc", "W_dec", "b_enc", "b_dec", "activation", "W_skip")
        settings = ("subtracts_b_dec", "norm", *(field.name for field in fields(Origin)))
        same = {name: getattr(self, name) for name in (*weights, *settings)}
        return Dictionary(**same | changes)

    def extra_repr(self) -> str:
        """Sizes and points, for the printed module."""
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
        return self.norm != "none" and not self.is_transcoder

    def _in_units_of(
        self, x: Float[Tensor, "*rows d_in"], written: Float[Tensor, "*rows d_out"]
    ) -> Float[Tensor, "*rows d_out"]:
        """What is written, with the norm of an autoencoder undone."""
        return written * self._scale(x) if self._undoes_norm else written

    def _scale(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows 1"]:
        """What the norm divides by, without what keeps it from 0."""
        x = x.to(self.W_enc.dtype)
        if self.norm == "layer_norm":
            return x.std(-1, keepdim=True)
        return x.norm(dim=-1, keepdim=True) / self.d_in**0.5

    def _normed(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_in"]:
        if self.norm == "layer_norm":
            return (x - x.mean(-1, keepdim=True)) / (self._scale(x) + 1e-5)
        if self.norm == "none":
            return x
        scale = self._scale(x)
        return x / scale.where(scale > 0, 1.0)  # zeros, as values at padding may be, stay zeros

    def _constant(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "..."]:
        """What is written whatever the features are."""
        x = x.to(self.W_enc.dtype)
        constant = self.b_dec
        if self._undoes_norm:
            constant = constant * self._scale(x)
            if self.norm == "layer_norm":
                constant = constant + x.mean(-1, keepdim=True)
        return constant if self.W_skip is None else constant + x @ self.W_skip


def _require_matrix(name: str, weight: object, axes: str) -> None:
    """Refuse what is no tensor of two axes."""
    hint = "load_sae(path) reads a dictionary"
    require_kind(name, weight, Tensor, f"a tensor [{axes}]", hint)
    assert isinstance(weight, Tensor)
    if weight.ndim != 2:
        raise ValueError(f"{name} must be [{axes}]; got {[*weight.shape]}")


def _require_sizes(
    sizes: Mapping[str, int], weights: Mapping[str, tuple[Tensor | None, str]]
) -> None:
    """Refuses weights of another size: PyTorch would stretch those of size 1."""
    for name, (weight, axes) in weights.items():
        wanted = [sizes[axis] for axis in axes.split()]
        one_for_all = name == "threshold" and weight is not None and weight.ndim == 0
        if weight is not None and [*weight.shape] != wanted and not one_for_all:
            raise ValueError(f"{name} must be [{axes}], {wanted}; got {[*weight.shape]}")
