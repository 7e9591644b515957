"""A family of Hugging Face checkpoints: how to translate its config, and the table of its keys."""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from models.checkpoints.assemble import TensorSource, expanded
from models.config import TransformerConfig
from models.rotary_scaling import RotaryBase, RotaryScaling

_DATA = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
ACTIVATION_NAMES: Mapping[str, str] = _DATA["activations"]
# Attributes that do not affect the function from tokens to logits.
IDLE = frozenset(" ".join(_DATA["idle"].values()).split())
# Attributes of any family, with the values that can be expressed.
FIXED: Mapping[str, Any] = _DATA["only"]
_FAMILIES: Mapping[str, Mapping[str, Any]] = _DATA["families"]
# The tables of a family that add to the tables of the family that it is like.
_TABLES = ("fields", "values", "rows", "only")
# The names in configs of Hugging Face for layers without a window, and for layers with a window.
FULL, SLIDING = KINDS = ("full_attention", "sliding_attention")


def _completed(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entry of a family, completed by the entry of the family that it is like."""
    if "like" not in facts:
        return facts
    base = _completed(_FAMILIES[facts["like"]])
    tables = {name: {**base.get(name, {}), **facts.get(name, {})} for name in _TABLES}
    return {**base, **facts, **tables}


FACTS: Mapping[str, Mapping[str, Any]] = {
    name: _completed(facts) for name, facts in _FAMILIES.items()
}


@dataclass(frozen=True)
class Family:
    """The translation of checkpoints of one `model_type`.

    Attributes:
        facts: the entry of the family in families.json:

            - `like`: the family whose entry completes this entry, if any;
            - `fields`: fields of our config, each with the attribute of config.json and, if the
              attribute may be absent, the default;
            - `values`: fields of our config with fixed values;
            - `rows`: the keys of the file for each parameter name; `N` stands for each layer, `*`
              for `weight` and `bias`;
            - `prefix`: the prefix of keys, unless the model was saved without its head;
            - `eos`: the token that ends a text, if the config has none;
            - `renamed`: keys in other versions;
            - `ignored`: patterns of keys, without the prefix, of buffers that old versions stored.

        more: a function that returns the fields that a table cannot express.
        converters: functions that make a parameter from tensors of the file, by the names in
            `rows`.
    """

    facts: Mapping[str, Any]
    more: Callable[["Attributes", Mapping[str, Any]], dict[str, Any]]
    converters: Mapping[str, Callable[[TransformerConfig], Callable[..., Tensor]]]

    def config(self, attributes: "Attributes") -> TransformerConfig:
        """Return our config from the attributes of config.json.

        Raises:
            KeyError: if an attribute is missing.
            ValueError: if an attribute is not supported.
        """
        facts = self.facts
        attributes.idle(*facts.get("idle", "").split())
        for name, allowed in facts.get("only", {}).items():
            attributes.only(name, *allowed)
        fields = dict(facts.get("values", {}))
        for ours, (theirs, *default) in facts["fields"].items():
            value = attributes.take(theirs, *default) if default else attributes.need(theirs)
            is_float = bool(default) and isinstance(default[0], float)
            # In our config, 0 stands for a number that is not set, which is null in JSON.
            if value is None:
                value = 0.0 if is_float else 0
            fields[ours] = value
        fields["activation"] = attributes.activation(*facts["activation"])
        fields["dropout"] = attributes.dropout(facts["dropout"]) if "dropout" in facts else 0.0
        return TransformerConfig(**fields | self.more(attributes, fields))

    def table(self, config: TransformerConfig, keys: Collection[str]) -> dict[str, TensorSource]:
        """Return the source of each parameter in a file.

        Args:
            config: the config of the model.
            keys: the keys of the file, which show how it spells them.
        """
        rows: dict[str, str | TensorSource] = {}
        for ours, theirs in self.facts["rows"].items():
            if isinstance(theirs, dict):
                convert = self.converters[theirs["convert"]](config)
                rows[ours] = TensorSource(tuple(theirs["keys"]), convert)
            else:
                rows[ours] = theirs if isinstance(theirs, str) else TensorSource(tuple(theirs))
        return expanded(rows, config, keys=keys, spelled=lambda key: self._spelled(key, keys))

    def is_ignored(self, key: str) -> bool:
        """Return whether the model does not need a key of a file."""
        bare = key.removeprefix(self.prefix)
        return any(re.fullmatch(pattern, bare) for pattern in self.facts.get("ignored", ()))

    @property
    def prefix(self) -> str:
        """The prefix of keys, for example `transformer.` for GPT-2."""
        return str(self.facts["prefix"])

    def _spelled(self, key: str, keys: Collection[str]) -> str:
        """Return the spelling of a key in a file: with the prefix, without it, or an older name.

        Args:
            key: the key in our table.
            keys: the keys of the file.
        """
        without_prefix = key.removeprefix(self.prefix)
        renamed = self.facts.get("renamed", {}).get(key, key)
        spellings = (key, without_prefix, renamed)
        return next((spelling for spelling in spellings if spelling in keys), key)


class Attributes:
    """The attributes of a config.json, with a record of which were used.

    The translation of a family takes each attribute that it knows. Then `finish` raises an error
    for all other attributes, because an unknown attribute may change the output of the model.

    Args:
        entries: the attributes by name.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries
        # The names of the attributes that were used.
        self._used: set[str] = set()

    def take(self, name: str, default: Any) -> Any:
        """Return the value of an attribute, or a default if the file does not contain it.

        An integer becomes a float if the default is a float, because JSON may write 10000 for
        10000.0.
        """
        self._used.add(name)
        value = self._entries.get(name, default)
        return float(value) if type(value) is int and type(default) is float else value

    def need(self, name: str) -> Any:
        """Return the value of an attribute that every file of this family must contain.

        Raises:
            KeyError: if the file does not contain the attribute.
        """
        self._used.add(name)
        return self._entries[name]

    def idle(self, *names: str) -> None:
        """Accept attributes with any value, because they do not affect the logits."""
        self._used.update(names)

    def only(self, name: str, *allowed: Any) -> None:
        """Accept an attribute that is absent, is null or has one of these values.

        Raises:
            ValueError: if it has another value; the error names the attribute and both values.
        """
        value = self.take(name, None)
        if value is not None and value not in allowed:
            raise self.error(name, value, " or ".join(map(repr, allowed)))

    def activation(self, name: str, default: str) -> Any:
        """Return our name for the activation in an attribute.

        Raises:
            ValueError: if the activation is not supported.
        """
        value = self.take(name, default)
        if str(value) not in ACTIVATION_NAMES:
            raise self.error(name, value, f"one of {', '.join(ACTIVATION_NAMES)}")
        return ACTIVATION_NAMES[value]

    def dropout(self, defaults: Mapping[str, float]) -> float:
        """Return the dropout probability that several attributes share, given their defaults.

        It is 0 if the values differ. This matters only in training.
        """
        values = [self.take(name, default) for name, default in defaults.items()]
        return values[0] if values.count(values[0]) == len(values) else 0.0

    def error(self, name: str, value: Any, rule: str) -> ValueError:
        """Return the error for a value that is not supported.

        Args:
            name: the name of the attribute.
            value: its value.
            rule: the supported values, which follow "must be" in the error.
        """
        return ValueError(f"{name} must be {rule}; got {value!r}")

    def require_all_rotated(self, fraction: float) -> None:
        """Require that all dimensions of a head are rotated.

        Raises:
            ValueError: if the share of rotated dimensions is not 1.
        """
        if fraction != 1:
            raise self.error("partial_rotary_factor", fraction, "1.0")

    def finish(self, remedy: str = "to load the model without them: ignore=") -> None:
        """Check the attributes that all families share, and that all other attributes were used.

        Args:
            remedy: the advice for unknown attributes. Their names follow it in the error.

        Raises:
            ValueError: if an attribute is unknown or not supported; the error names it.
        """
        for name, allowed in FIXED.items():
            self.only(name, *allowed)
        # An attribute that is switched off has no effect, and dropout has an effect only in
        # training.
        off = {
            name
            for name, value in self._entries.items()
            if value is None or value is False or "drop" in name
        }
        if unknown := sorted(self._entries.keys() - self._used - IDLE - off):
            got = ", ".join(f"{name} ({str(self._entries[name])[:40]})" for name in unknown)
            raise ValueError(
                "every attribute must be known, because an unknown one may change the logits; got "
                f"{got}; {remedy}{unknown}"
            )


def rotary_fields(
    attributes: Attributes,
    n_ctx: int,
    spelled: Mapping[str, str] | None = None,
    fraction: float = 1.0,
) -> dict[str, Any]:
    """Return our rotary fields, and `n_ctx`, because scaling may make the context longer.

    The config contains the rotary fields in `rope_parameters`, or in `rope_scaling` and single
    attributes. `rotary_by_kind` reads configs with fields for each kind of layer.

    Args:
        attributes: the attributes.
        n_ctx: `max_position_embeddings`. In some files, this is the context before scaling.
        spelled: the names that the family gives to `rope_theta` and `partial_rotary_factor`, if
            they differ.
        fraction: the share of a head that is rotated, if the file does not give it.

    Raises:
        ValueError: if the form is not supported, or if two attributes disagree.
    """
    stated: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        for key, value in dict(attributes.take(name, None) or {}).items():
            _require_equal(
                attributes, stated, name="rope_type" if key == "type" else key, value=value
            )
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        for key in {name, (spelled or {}).get(name, name)}:
            _require_equal(attributes, stated, name=name, value=attributes.take(key, None))
    return _rotary_fields(attributes, stated, n_ctx=n_ctx, fraction=fraction)


def rotary_by_kind(
    attributes: Attributes, n_ctx: int, thetas: tuple[float, float], spelled: tuple[str, str]
) -> tuple[dict[str, Any], RotaryBase]:
    """Return our rotary fields for layers without a window, and the base of layers with a window.

    The config contains the rotary fields in `rope_parameters`, by the kind of layer. In older
    files, `rope_scaling` is for layers without a window only.

    Args:
        attributes: the attributes.
        n_ctx: `max_position_embeddings`.
        thetas: the rotary bases that apply if the file contains none: first of layers without a
            window, then of layers with a window.
        spelled: the names of the attributes with these bases in older files.

    Raises:
        ValueError: if the form is not supported, or if two attributes disagree.
    """
    by_kind = dict(attributes.take("rope_parameters", None) or {})
    scaling = attributes.take("rope_scaling", None)
    parts: list[dict[str, Any]] = []
    for kind, theta, name in zip(KINDS, thetas, spelled, strict=True):
        stated: dict[str, Any] = {}
        entries = [by_kind.pop(kind, None), scaling if kind == FULL else None]
        entries.append({"rope_theta": attributes.take(name, None)})
        for key, value in chain.from_iterable(dict(entry or {}).items() for entry in entries):
            _require_equal(
                attributes, stated, name="rope_type" if key == "type" else key, value=value
            )
        stated.setdefault("rope_theta", theta)
        part = _rotary_fields(attributes, stated, n_ctx=n_ctx)
        attributes.require_all_rotated(part["rotary_fraction"])
        parts.append(part)
    if by_kind:
        raise attributes.error("rope_parameters", by_kind, f"by {' and '.join(KINDS)}")
    of_windows = RotaryBase(theta=parts[1]["rotary_theta"], scaling=parts[1]["rotary_scaling"])
    return parts[0], of_windows


def _rotary_fields(
    attributes: Attributes, stated: dict[str, Any], n_ctx: int, fraction: float = 1.0
) -> dict[str, Any]:
    """Return our rotary fields, and `n_ctx`.

    Args:
        attributes: the attributes of the config.
        stated: the rotary fields of the config.
        n_ctx: the number of positions in the config.
        fraction: the share of a head that is rotated, if the file does not give it.

    Raises:
        ValueError: if the form is not supported.
    """
    theta = stated.pop("rope_theta", 10_000.0)
    fraction = stated.pop("partial_rotary_factor", fraction)
    scaling = _scaling(attributes, stated, n_ctx)
    longest = attributes.take("max_sequence_length", None)
    if scaling and scaling.kind == "yarn":
        n_ctx = max(n_ctx, int(scaling.factor * scaling.original_n_ctx))
    # In the 16k models of Vicuna, `max_sequence_length` is the context after scaling.
    elif scaling and scaling.kind == "linear" and longest:
        n_ctx = max(n_ctx, longest)
    return {
        "n_ctx": n_ctx,
        "positions": "rotary",
        "rotary_theta": theta,
        "rotary_fraction": fraction,
        "rotary_scaling": scaling,
    }


def _require_equal(attributes: Attributes, stated: dict[str, Any], name: str, value: Any) -> None:
    """Store a rotary field in `stated`, and require that it was not stored with another value.

    A config may contain the same field in several attributes.

    Args:
        attributes: the attributes of the config.
        stated: the rotary fields that have been stored.
        name: the name of the field.
        value: its value. None is not stored.

    Raises:
        ValueError: if the values differ; the error names the field.
    """
    if type(value) is int and name != "original_max_position_embeddings":
        value = float(value)
    if value is not None and stated.setdefault(name, value) != value:
        raise attributes.error(name, value, f"{stated[name]!r}, the value of another attribute")


def _scaling(attributes: Attributes, stated: dict[str, Any], n_ctx: int) -> RotaryScaling | None:
    """Return the scaling of rotary positions that a config states, or None without scaling.

    The fields of the scaling are removed from `stated`.

    Args:
        attributes: the attributes of the config.
        stated: the rotary fields of the config that have not been read yet.
        n_ctx: the number of positions in the config.

    Raises:
        ValueError: if the kind of scaling is unknown, or `stated` contains a field that this kind
            does not use.
    """
    kind = stated.pop("rope_type", "default")
    original = stated.pop("original_max_position_embeddings", n_ctx)
    # This attribute describes the training. transformers never reads it.
    stated.pop("finetuned", None)
    scaling = None
    if kind == "linear":
        scaling = RotaryScaling(kind="linear", factor=stated.pop("factor"))
    elif kind == "llama3":
        scaling = RotaryScaling(
            kind="llama3",
            factor=stated.pop("factor"),
            original_n_ctx=original,
            low=stated.pop("low_freq_factor"),
            high=stated.pop("high_freq_factor"),
        )
    elif kind == "yarn":
        scaling = _yarn(attributes, stated, n_ctx=n_ctx, original=original)
    elif kind != "default":
        raise attributes.error("rope_type", kind, "default, linear, llama3 or yarn")
    # A factor of 1 has no effect.
    elif stated.get("factor") == 1:
        del stated["factor"]
    if stated:
        raise attributes.error("rope_parameters", stated, f"only what {kind} needs")
    return scaling


def _yarn(
    attributes: Attributes, stated: dict[str, Any], n_ctx: int, original: int
) -> RotaryScaling:
    """Return the YaRN scaling of a file, and remove its numbers from `stated`.

    Raises:
        ValueError: if our config cannot express it.
    """
    if (truncate := stated.pop("truncate", True)) is not True:
        raise attributes.error("truncate", truncate, "True")
    # llama.cpp reads this attribute. transformers reads only attention_factor.
    stated.pop("attn_factor", None)
    factor = stated.pop("factor", n_ctx / original if original else 1.0)
    above = stated.pop("mscale", None)
    below = stated.pop("mscale_all_dim", None)
    length = stated.pop("attention_factor", None)
    # The configs of DeepSeek contain `mscale` and `mscale_all_dim` instead of `attention_factor`,
    # which is computed from them.
    if length is None and above and below and factor > 1:
        length = (0.1 * above * math.log(factor) + 1) / (0.1 * below * math.log(factor) + 1)
    # In our config, 0 stands for the usual value of YaRN, so it must not be a value of the file.
    if length == 0:
        raise attributes.error("attention_factor", length, "above 0")
    return RotaryScaling(
        kind="yarn",
        factor=factor,
        original_n_ctx=original,
        # In our config and in Hugging Face's, 0 stands for the published values of these two.
        low=stated.pop("beta_slow", 0.0),
        high=stated.pop("beta_fast", 0.0),
        attention_factor=length or 0.0,
    )
