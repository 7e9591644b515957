"""Families of Hugging Face checkpoints: a translation of the config, and a table of keys."""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from models.checkpoints.assemble import Source
from models.config import RotaryScaling, TransformerConfig

Rows = Mapping[str, str | Source]

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

# Attributes that do not affect the function from tokens to logits.
_TOKENS = """
    bos_token_id cls_token_id decoder_start_token_id eos_token_id mask_token_id pad_token_id
    sep_token_id
"""
_GENERATION = """
    bad_words_ids begin_suppress_tokens cache_implementation diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_past output_scores
    prefix remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens
    task_specific_params temperature top_k top_p typical_p use_cache
"""
_OTHER_TASKS = """
    _num_labels finetuning_task id2label is_decoder label2id num_labels
    problem_type summary_activation summary_proj_to_labels summary_type summary_use_proj
    tie_encoder_decoder
"""
_TRAINING = "gradient_checkpointing initializer_range"
_BOOKKEEPING = """
    _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path architectures
    chunk_size_feed_forward custom_pipelines dtype model_type name_or_path output_attentions
    output_hidden_states return_dict tf_legacy_loss tokenizer_class torch_dtype torchscript
    transformers_version unsloth_fixed unsloth_version use_bfloat16 use_return_dict xla_device
"""
IDLE = frozenset(f"{_TOKENS} {_GENERATION} {_OTHER_TASKS} {_TRAINING} {_BOOKKEEPING}".split())

# Attributes of any family, with the values that can be expressed.
FIXED: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_encoder_decoder": (False,),
    "per_layer_config": (None,),
    "pruned_heads": ({},),
    "quantization_config": (None,),
}


@dataclass(frozen=True)
class Family:
    """The reading of checkpoints of one `model_type`.

    Attributes:
        config: makes our config from the attributes of config.json.
        rows: the file's keys by our parameter names. `N` stands for each layer, and `*` for `weight`
            and `bias`. Rows of parameters that a config does not have are not used.
        prefix: the prefix of keys, unless the model was saved without its head.
        eos: the token that ends a text if the config does not say.
        renamed: keys of the table with their names in other versions of transformers.
        ignored: patterns of keys, without the prefix, of buffers that old versions stored.
    """

    config: Callable[["Attributes"], TransformerConfig]
    rows: Callable[[TransformerConfig], Rows]
    prefix: str
    eos: int | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def table(self, config: TransformerConfig, keys: Collection[str]) -> dict[str, Source]:
        """The source of each parameter, in the spelling of a file that has these `keys`."""
        table: dict[str, Source] = {}
        for ours, theirs in self.rows(config).items():
            source = theirs if isinstance(theirs, Source) else Source((theirs,))
            for kind in ("weight", "bias") if ours.endswith("*") else ("",):
                for layer in range(min(config.n_layers, len(keys))) if ".N." in ours else (0,):
                    spelled = (self._spelled(_filled(k, layer, kind), keys) for k in source.keys)
                    table[_filled(ours, layer, kind)] = Source(tuple(spelled), source.convert)
        return table

    def is_ignored(self, key: str) -> bool:
        """Whether the model does not need a key of a file."""
        bare = key.removeprefix(self.prefix)
        return any(re.fullmatch(pattern, bare) for pattern in self.ignored)

    def _spelled(self, key: str, keys: Collection[str]) -> str:
        others = (key.removeprefix(self.prefix), self.renamed.get(key, key))
        return next((spelled for spelled in (key, *others) if spelled in keys), key)


def _filled(name: str, layer: int, kind: str) -> str:
    return name.replace(".N.", f".{layer}.").replace("*", kind)


class Attributes:
    """The attributes of a config.json, with a record of which have been used.

    A family's translation takes each attribute that it knows. `finish` then refuses the others, because
    an unknown attribute may change what the model computes.

    Args:
        given: attributes by name.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._given = entries
        self._taken: set[str] = set()

    def take(self, name: str, default: Any) -> Any:
        """The value of an attribute, or the family's default if the file has none.

        A whole number becomes a float if the default is one, because JSON may write 10000 for 10000.0.
        """
        self._taken.add(name)
        value = self._given.get(name, default)
        return float(value) if type(value) is int and type(default) is float else value

    def need(self, name: str) -> Any:
        """The value of an attribute without a default.

        Raises:
            KeyError: if the file has none.
        """
        self._taken.add(name)
        return self._given[name]

    def idle(self, *names: str) -> None:
        """Accepts attributes with any value, because they do not affect the logits."""
        self._taken.update(names)

    def only(self, name: str, *allowed: Any) -> None:
        """Accepts an attribute that is absent, null or has one of these values.

        Raises:
            ValueError: if it has another value; it names the attribute and both values.
        """
        value = self.take(name, None)
        if value is not None and value not in allowed:
            raise self.error(name, value, " or ".join(map(repr, allowed)))

    def activation(self, name: str, default: str) -> Any:
        """Our name of the activation in an attribute.

        Raises:
            ValueError: if we do not have that activation.
        """
        value = self.take(name, default)
        if str(value) not in ACTIVATIONS:
            raise self.error(name, value, f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def dropout(self, defaults: Mapping[str, float]) -> float:
        """The common dropout probability of several attributes, given with their defaults.

        It is 0 if their values differ; this matters only in training.
        """
        values = [self.take(name, default) for name, default in defaults.items()]
        return values[0] if values.count(values[0]) == len(values) else 0.0

    def error(self, name: str, value: Any, rule: str) -> ValueError:
        """The error for a value that the model cannot express."""
        return ValueError(f"{name} must be {rule}; got {value!r}")

    def finish(self, remedy: str = "to load the model without them: ignore=") -> None:
        """Checks the attributes that all families share, and that all others were taken.

        Args:
            remedy: what may be done about unknown attributes, before their names.

        Raises:
            ValueError: if an attribute is unknown or cannot be expressed; it names it.
        """
        for name, allowed in FIXED.items():
            self.only(name, *allowed)
        # What is switched off has no effect, and dropout has one only in training.
        off = {n for n, v in self._given.items() if v is None or v is False or "drop" in n}
        if left := sorted(self._given.keys() - self._taken - IDLE - off):
            got = ", ".join(f"{name} ({str(self._given[name])[:40]})" for name in left)
            raise ValueError(
                f"attributes must be known, because others may change the logits; got {got}; "
                f"{remedy}{left}"
            )


def rotary(
    a: Attributes, n_ctx: int, spelled: Mapping[str, str] | None = None, fraction: float = 1.0
) -> dict[str, Any]:
    """Our rotary fields, from `rope_parameters`, or from `rope_scaling` and other attributes.

    They include `n_ctx`, because scaling may extend it.

    Args:
        a: the attributes.
        n_ctx: `max_position_embeddings`, in some files the context before scaling.
        spelled: the family's names of `rope_theta` and `partial_rotary_factor`, if they differ.
        fraction: the rotated share of a head if the file does not say it.

    Raises:
        ValueError: if the form cannot be expressed, or two attributes disagree.
    """
    stated: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        for key, value in dict(a.take(name, None) or {}).items():
            _require_equal(a, stated, "rope_type" if key == "type" else key, value)
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        for key in {name, (spelled or {}).get(name, name)}:
            _require_equal(a, stated, name, a.take(key, None))
    theta = stated.pop("rope_theta", 10_000.0)
    fraction = stated.pop("partial_rotary_factor", fraction)
    scaling = _scaling(a, stated, n_ctx)
    longest = a.take("max_sequence_length", None)
    if scaling and scaling.kind == "yarn":
        n_ctx = max(n_ctx, int(scaling.factor * scaling.original_n_ctx))
    elif scaling and scaling.kind == "linear" and longest:  # Vicuna's 16k
        n_ctx = max(n_ctx, longest)
    return {
        "n_ctx": n_ctx,
        "positions": "rotary",
        "rotary_theta": theta,
        "rotary_fraction": fraction,
        "rotary_scaling": scaling,
    }


def _require_equal(a: Attributes, stated: dict[str, Any], name: str, value: Any) -> None:
    if type(value) is int and name != "original_max_position_embeddings":
        value = float(value)
    if value is not None and stated.setdefault(name, value) != value:
        raise a.error(name, value, f"{stated[name]!r}, as given in another place")


def _scaling(a: Attributes, stated: dict[str, Any], n_ctx: int) -> RotaryScaling | None:
    """The scaling of a file. It removes the numbers that it uses from `stated`."""
    kind = stated.pop("rope_type", "default")
    original = stated.pop("original_max_position_embeddings", n_ctx)
    stated.pop("finetuned", None)  # how the weights were trained; transformers never reads it
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
        scaling = _yarn(a, stated, n_ctx, original)
    elif kind != "default":
        raise a.error("rope_type", kind, "default, linear, llama3 or yarn")
    elif stated.get("factor") == 1:  # has no effect
        del stated["factor"]
    if stated:
        raise a.error("rope_parameters", stated, f"only what {kind} needs")
    return scaling


def _yarn(a: Attributes, stated: dict[str, Any], n_ctx: int, original: int) -> RotaryScaling:
    if (truncate := stated.pop("truncate", True)) is not True:
        raise a.error("truncate", truncate, "True")
    stated.pop("attn_factor", None)  # llama.cpp's; transformers reads only attention_factor
    factor = stated.pop("factor", n_ctx / original if original else 1.0)
    above, below = stated.pop("mscale", None), stated.pop("mscale_all_dim", None)
    length = stated.pop("attention_factor", None)
    if length is None and above and below and factor > 1:  # DeepSeek's form
        length = (0.1 * above * math.log(factor) + 1) / (0.1 * below * math.log(factor) + 1)
    if length == 0:  # in our config 0 means the usual form
        raise a.error("attention_factor", length, "above 0")
    return RotaryScaling(
        kind="yarn",
        factor=factor,
        original_n_ctx=original,
        # In both configs 0 means the published values.
        low=stated.pop("beta_slow", 0.0),
        high=stated.pop("beta_fast", 0.0),
        attention_factor=length or 0.0,
    )
