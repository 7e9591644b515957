"""Crosscoders: dictionaries whose features write to several models, or to several layers.

1. A crosscoder reads a value of each member. The members are several models, which are read at the
   same point; or they are several layers of one model.
2. A feature reads the values of all members, and their pre-activations are added up. In a weakly
   causal crosscoder, a feature reads the value of a single member.
3. A nonlinearity computes the features, which all members share.
4. Each member has its own decoder, which reconstructs the value of this member.

Crosscoders were introduced by Lindsey et al. (2024, "Sparse Crosscoders for Cross-Layer Features
and Model Diffing"). `load_crosscoder` reads them from files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import ActivationCache
from hooks.base import require_kind, shown, to_device, unknown_name
from interp import plots
from interp.features.activations import FeatureValues
from interp.features.dictionary import Dictionary, require_sizes
from interp.json_form import Table, form
from interp.plots import objects

MemberValues = (
    Sequence[Float[Tensor, "*rows d_model"]] | Mapping[str, Float[Tensor, "*rows d_model"]]
)
"""A value of each member, in the order of `Crosscoder.names` or by name."""

_SMALL = 1e-8
"""dictionary_learning adds this number to the scale when it decodes."""


class Crosscoder(plots.Shown, nn.Module):
    """A crosscoder with frozen weights.

    A member is a model, or a layer of a model. Each member is given by its name or its index.

    Args:
        W_enc: the encoder of each member, [member d_model feature]. In a weakly causal crosscoder,
            the last axis only contains the features that read this member. The features of the
            first member come first in all other tensors.
        W_dec: the decoder of each member, [member feature d_model].
        b_enc: the bias of the encoder, [feature].
        b_dec: the bias of each decoder, [member d_model].
        activation: the nonlinearity that computes features from pre-activations.
        names: the names of the members. Default: `"0"`, `"1"` and so on.
        points: the point that each member reads, such as `blocks.13.resid_post`. Default: unknown.
        center, scale: numbers that normalize the values, [member d_model] and [member]. The
            crosscoder reads `(value - center) * scale`, and its output is returned to the units of
            the value. Default: no normalization.
        config: the config in the files of the crosscoder. Default: empty.

    Raises:
        ValueError: if a weight has the wrong size, or names are not distinct.

    >>> import torch
    >>> one = torch.ones(1, 1)
    >>> both = Crosscoder(
    ...     W_enc=torch.stack([one, one]),
    ...     W_dec=torch.stack([one, 3 * one]),
    ...     b_enc=torch.zeros(1),
    ...     b_dec=torch.zeros(2, 1),
    ...     activation=nn.ReLU(),
    ...     names=["base", "tuned"],
    ... )
    >>> features = both.encode([torch.tensor([[2.0]]), torch.tensor([[5.0]])])
    >>> features, both.decode(features)
    (tensor([[7.]]), [tensor([[7.]]), tensor([[21.]])])
    """

    W_enc: Tensor
    W_dec: Tensor
    b_enc: Tensor
    b_dec: Tensor
    center: Tensor | None
    scale: Tensor | None
    activation: nn.Module
    names: tuple[str, ...]
    points: tuple[str | None, ...]
    config: dict[str, Any]

    def __init__(
        self,
        W_enc: Float[Tensor, "member d_model _read"],
        W_dec: Float[Tensor, "member feature d_model"],
        b_enc: Float[Tensor, " feature"],
        b_dec: Float[Tensor, "member d_model"],
        activation: nn.Module,
        *,
        names: Sequence[str] | None = None,
        points: Sequence[str | None] | None = None,
        center: Float[Tensor, "member d_model"] | None = None,
        scale: Float[Tensor, " member"] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        n_members, n_features, d_model = _sizes(W_enc, W_dec)
        weights = {
            "W_enc": (W_enc, "member d_model read"),
            "W_dec": (W_dec, "member feature d_model"),
            "b_enc": (b_enc, "feature"),
            "b_dec": (b_dec, "member d_model"),
            "center": (center, "member d_model"),
            "scale": (scale, "member"),
        }
        thresholds = {name: (tensor, "feature") for name, tensor in activation.named_buffers()}
        sizes = {
            "member": n_members,
            "feature": n_features,
            "d_model": d_model,
            "read": W_enc.shape[2],
        }
        require_sizes(sizes, {**weights, **thresholds})
        self.names = _names(names, n_members)
        self.points = tuple(points) if points is not None else (None,) * n_members
        if len(self.points) != n_members:
            raise ValueError(f"points must have {n_members} names; got {len(self.points)}")
        for name, (weight, _) in weights.items():
            self.register_buffer(name, weight)
        self.activation = activation
        self.config = dict(config or {})
        self.eval()

    @property
    def n_features(self) -> int:
        """The number of features."""
        return self.W_dec.shape[1]

    @property
    def d_model(self) -> int:
        """The size of the value of each member."""
        return self.W_dec.shape[2]

    @property
    def is_joint(self) -> bool:
        """True if each feature reads all members, and False if each feature reads one member."""
        return self.W_enc.shape[2] == self.n_features

    def index(self, member: str | int) -> int:
        """Return the index of a member.

        Args:
            member: the name of the member, or its index.

        Raises:
            UnknownNameError: if there is no such member. The error lists close matches.
        """
        if isinstance(member, int) and 0 <= member < len(self.names):
            return member
        if member not in self.names:
            raise unknown_name(str(member), self.names, "member of the crosscoder")
        return self.names.index(str(member))

    def listed(self, values: MemberValues) -> list[Float[Tensor, "*rows d_model"]]:
        """Return a value of each member in the order of `names`.

        Raises:
            ValueError: if a member has no value, or a value has the wrong size.
            UnknownNameError: if a value belongs to no member.
        """
        if isinstance(values, Mapping):
            by_index = {self.index(member): value for member, value in values.items()}
            values = [by_index[index] for index in sorted(by_index)]
        if isinstance(values, Tensor) or len(values) != len(self.names):
            number = f"a tensor {[*values.shape]}" if isinstance(values, Tensor) else len(values)
            raise ValueError(
                f"values must be a list with a value of each member, {', '.join(self.names)}; got "
                f"{number}"
            )
        for name, value in zip(self.names, values, strict=True):
            self._require_value(name, value)
        return [*values]

    def normalized(
        self, member: str | int, value: Float[Tensor, "*rows d_model"]
    ) -> Float[Tensor, "*rows d_model"]:
        """Return the value of a member as the encoder reads it, in the dtype of the crosscoder.

        Args:
            member: the member.
            value: its value.

        Raises:
            ValueError: if the value has the wrong size.
        """
        index = self.index(member)
        self._require_value(self.names[index], value)
        value = to_device(value, self.W_enc.device).to(self.W_enc.dtype)
        if self.center is not None:
            value = value - self.center[index]
        return value if self.scale is None else value * self.scale[index]

    def share(
        self, member: str | int, value: Float[Tensor, "*rows d_model"]
    ) -> Float[Tensor, "*rows feature"]:
        """Return the share of one model (or layer) in the pre-activation of each feature.

        It is `x @ W_enc`, where x is the normalized value and `W_enc` the encoder of this model.
        The pre-activations are the sum of the shares of all models, plus `b_enc`.

        Args:
            member: the name or index of the model, or of the layer.
            value: the value that the crosscoder reads from it.
        """
        index = self.index(member)
        read = self.normalized(index, value) @ self.W_enc[index]
        if self.is_joint:
            return read
        n_read = self.W_enc.shape[2]
        before = index * n_read
        return nn.functional.pad(read, (before, self.n_features - before - n_read))

    def pre_activations(self, values: MemberValues) -> FeatureValues:
        """Return the pre-activations, the input of the nonlinearity."""
        pre = self.b_enc
        for member, value in enumerate(self.listed(values)):
            pre = pre + self.share(member, value)
        return pre

    def encode(self, values: MemberValues) -> FeatureValues:
        """Return the features, in the dtype of the crosscoder.

        Args:
            values: the value of each member, in the order of `names` or by name.

        Raises:
            ValueError: if a value is missing, or has the wrong size.
        """
        features: Tensor = self.activation(self.pre_activations(values))
        return features

    def decode(self, features: FeatureValues) -> list[Float[Tensor, "*rows d_model"]]:
        """Return the reconstruction of the value of each member, in the order of `names`."""
        if not isinstance(features, Tensor) or features.shape[-1:] != (self.n_features,):
            raise ValueError(
                f"decode needs a tensor [..., {self.n_features}], as encode returns it; "
                f"got {shown(features)}"
            )
        outputs = []
        for member in range(len(self.names)):
            W_dec, b_dec = self.decoder(member)
            outputs.append(features @ W_dec + b_dec)
        return outputs

    def forward(self, values: MemberValues) -> list[Float[Tensor, "*rows d_model"]]:
        """Return the reconstruction of the value of each member."""
        return self.decode(self.encode(values))

    def decoder(
        self, member: str | int
    ) -> tuple[Float[Tensor, "feature d_model"], Float[Tensor, " d_model"]]:
        """Return the decoder of a member and its bias, in the units of the value.

        Without a normalization, these are `W_dec[member]` and `b_dec[member]`.
        """
        index = self.index(member)
        W_dec, b_dec = self.W_dec[index], self.b_dec[index]
        if self.scale is not None:
            unit = self.scale[index] + _SMALL
            W_dec, b_dec = W_dec / unit, b_dec / unit
        return W_dec, b_dec if self.center is None else b_dec + self.center[index]

    def relative_norms(
        self, member: str | int, other: str | int | None = None
    ) -> Float[Tensor, " feature"]:
        """Return the relative decoder norm of each feature, from 0 to 1.

        The number is 0 if only `other` has the feature, 0.5 if both decoders have the same length,
        and 1 if only `member` has the feature. With the lengths a and b of the two decoder rows, it
        is `(1 + (a - b) / max(a, b)) / 2` (Minder et al. 2025, arXiv 2504.02922), and 0.5 if both
        rows are zero. A length of 0 can also be an artifact of training: see `latent_scaling`.

        Args:
            member: the member whose features are near 1.
            other: the other member. Default: the other one of two members.

        Raises:
            ValueError: if there are several other members, and `other` is not given.
        """
        index = self.index(member)
        against = self.other(index) if other is None else self.index(other)
        lengths = self.W_dec.float().norm(dim=2)
        a, b = lengths[index], lengths[against]
        return (1 + ((a - b) / torch.maximum(a, b)).nan_to_num()) / 2

    def cosines(
        self, member: str | int, other: str | int | None = None
    ) -> Float[Tensor, " feature"]:
        """Return the cosine of each feature's decoder rows in two members.

        A small cosine shows a feature with the same cause and another effect, which relative norms
        do not show. The cosine is 0 if a row is zero.

        Args:
            member: a member.
            other: the other member. Default: the other one of two members.

        Raises:
            ValueError: if there are several other members, and `other` is not given.
        """
        index = self.index(member)
        against = self.other(index) if other is None else self.index(other)
        rows = self.W_dec.float()
        return nn.functional.cosine_similarity(rows[index], rows[against], dim=1)

    def other(self, member: str | int) -> int:
        """Return the index of the other one of two members.

        Raises:
            ValueError: if the number of members is not 2.
        """
        if len(self.names) != 2:
            raise ValueError(
                f"other must be one of the members {', '.join(self.names)}, because there are "
                f"{len(self.names)}; got None"
            )
        return 1 - self.index(member)

    def dictionary(
        self,
        member: str | int,
        others: Mapping[str, Float[Tensor, "batch pos d_model"] | ActivationCache],
        *,
        point: str | None = None,
    ) -> Dictionary:
        """Return the crosscoder as a dictionary of one member, for runs of the same texts.

        `splice` accepts this dictionary. The features read the live value of the member and the
        given values of all other members, and only write to the member.

        Args:
            member: the member.
            others: the value of each other member on the texts of the run: a tensor
                [batch pos d_model], or a cache that contains the point of the member.
            point: the point of the member. Default: the point in the files.

        Raises:
            ValueError: if the value of a member is missing, or the point of a cache is unknown.
            UnknownNameError: if a name is no member, or a cache has no such point.

        >>> one = torch.ones(1, 1)
        >>> both = Crosscoder(
        ...     torch.stack([one, one]), torch.stack([one, 3 * one]), one[0], 0 * one[[0, 0]],
        ...     nn.ReLU(), names=["base", "tuned"],
        ... )
        >>> tuned = both.dictionary("tuned", {"base": torch.tensor([[[2.0], [4.0]]])})
        >>> tuned(torch.tensor([[[5.0], [0.0]]])).flatten()
        tensor([24., 15.])
        """
        index = self.index(member)
        values = {self.index(name): value for name, value in others.items()}
        wanted = {*range(len(self.names))} - {index}
        if values.keys() != wanted:
            names = [self.names[number] for number in sorted(wanted)]
            got = [self.names[number] for number in sorted(values)]
            raise ValueError(
                f"others must contain the values of {', '.join(names) or 'none'}; got "
                f"{', '.join(got) or 'none'}"
            )
        offset: Tensor | None = None
        for number, value in values.items():
            if isinstance(value, ActivationCache):
                place = self.points[number] or point
                if place is None:
                    raise ValueError(
                        f"the point of {self.names[number]} is unknown: give point=, or a tensor "
                        "instead of the cache"
                    )
                value = value[place]
            term = self.share(number, value)
            offset = term if offset is None else offset + term
        return MemberDictionary(self, index, offset, point or self.points[index])

    def view(self) -> plots.View:
        """Return a view of the sizes and settings, and of the relative decoder norms."""
        return objects.crosscoder(self)

    def as_json(self) -> dict[str, Any]:
        """Return the length of each decoder row of each member, in the JSON form of all results;
        see `interp.json_form`.
        """
        norms = self.W_dec.norm(dim=2)
        tables = {"decoder.norm": Table(norms, "member feature", "norm", {"member": self.names})}
        about = {"points": [*self.points], "activation": f"{self.activation}"}
        return form("Crosscoder", tables, {**about, "config": self.config})

    def extra_repr(self) -> str:
        """The sizes and names, for the printed module."""
        reads = "" if self.is_joint else ", each feature reads one member"
        at = ", ".join(dict.fromkeys(point for point in self.points if point)) or "unknown points"
        return (
            f"{self.n_features} features of {', '.join(self.names)} (d_model {self.d_model}), at "
            f"{at}{reads}"
        )

    def _require_value(self, name: str, value: object) -> None:
        """Check that the value of a member is a tensor [..., d_model].

        Raises:
            ValueError: if it is not. The error names the member.
        """
        if not isinstance(value, Tensor) or value.shape[-1:] != (self.d_model,):
            raise ValueError(
                f"the value of {name} must be a tensor [..., {self.d_model}]; got {shown(value)}"
            )


class MemberDictionary(Dictionary):
    """A crosscoder as a dictionary of one member, made by `Crosscoder.dictionary`.

    The values of the other members are constants, so the dictionary can only read values of the
    same texts.

    Args:
        crosscoder: the crosscoder.
        member: the index of the member.
        offset: the terms of the pre-activations that depend on the other members,
            [batch pos feature], or None if there are no other members.
        point: the point of the member, or None if it is unknown.
    """

    def __init__(
        self,
        crosscoder: Crosscoder,
        member: int,
        offset: Float[Tensor, "batch pos feature"] | None,
        point: str | None,
    ) -> None:
        W_dec, b_dec = crosscoder.decoder(member)
        W_enc = crosscoder.W_enc[member]
        if not crosscoder.is_joint:
            n_read = W_enc.shape[1]
            before = member * n_read
            W_enc = nn.functional.pad(W_enc, (before, len(W_dec) - before - n_read))
        super().__init__(
            W_enc=W_enc,
            W_dec=W_dec,
            b_enc=crosscoder.b_enc,
            b_dec=b_dec,
            activation=crosscoder.activation,
            reads=point,
            writes=point,
            config=crosscoder.config,
        )
        # The crosscoder must not become a submodule, because `.to` would then move its weights.
        self._crosscoder = (crosscoder,)
        self.member = member
        self.others = offset

    def pre_activations(self, x: Float[Tensor, "*rows d_in"]) -> FeatureValues:
        """Return the pre-activations of each row.

        Raises:
            ValueError: if `x` does not have a row for each row of the other members' values.
        """
        (crosscoder,) = self._crosscoder
        pre = crosscoder.share(self.member, x) + crosscoder.b_enc
        if self.others is None:
            return pre
        if pre.shape != self.others.shape:
            raise ValueError(
                "the values of the other members must be of the texts of this run, "
                f"{[*pre.shape[:-1]]}; got values of {[*self.others.shape[:-1]]} texts and "
                "positions (runs that change the number of rows, such as sweeps, are not supported)"
            )
        return pre + self.others

    @property
    def offset(self) -> Float[Tensor, " feature"]:
        """Raise an error, because the offset is different at each token."""
        raise ValueError(
            "a dictionary of a crosscoder has no single offset, because its features also read the "
            "values of other members"
        )

    def _with(self, **changes: Any) -> Dictionary:
        """Raise an error, because a changed dictionary would lose the values of other members."""
        raise ValueError(
            f"{', '.join(changes)} of a dictionary of a crosscoder cannot be changed; change the "
            "weights of the crosscoder"
        )


def _sizes(W_enc: object, W_dec: object) -> tuple[int, int, int]:
    """Return the number of members, the number of features and the size of values.

    Raises:
        TypeError: if a weight is no tensor.
        ValueError: if the weights do not have three axes, or do not fit together.
    """
    for name, weight in (("W_enc", W_enc), ("W_dec", W_dec)):
        require_kind(
            name,
            weight,
            kind=Tensor,
            words="a tensor with three axes",
            call="load_crosscoder(path) reads a crosscoder",
        )
    assert isinstance(W_enc, Tensor)
    assert isinstance(W_dec, Tensor)
    sizes = f"got {[*W_enc.shape]} and {[*W_dec.shape]}"
    if W_enc.ndim != 3 or W_dec.ndim != 3:
        raise ValueError(
            f"W_enc must be [member d_model feature] and W_dec [member feature d_model]; {sizes}"
        )
    n_members, n_features, d_model = W_dec.shape
    n_read = W_enc.shape[2]
    fits = n_features in (n_read, n_read * n_members)
    if W_enc.shape[:2] != (n_members, d_model) or not fits:
        raise ValueError(
            f"W_enc must be [{n_members} {d_model} {n_features}] to fit W_dec, or have the "
            f"features of one member on its last axis; {sizes}"
        )
    return n_members, n_features, d_model


def _names(names: Sequence[str] | None, n: int) -> tuple[str, ...]:
    """Return the names of `n` members.

    Raises:
        ValueError: if there are more or fewer names, or two names are equal.
    """
    listed = tuple(map(str, range(n))) if names is None else tuple(names)
    if isinstance(names, str) or len(listed) != n or len({*listed}) != n:
        raise ValueError(f"names must be {n} different names of the members; got {names!r}")
    return listed
