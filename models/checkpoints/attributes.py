"""Attributes of a Hugging Face config.json: each is translated, known to be idle, or an error."""

from collections.abc import Mapping
from typing import Any

# What says nothing about the function from tokens to logits.
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
    _num_labels classifier_dropout finetuning_task id2label is_decoder label2id num_labels
    problem_type summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj tie_encoder_decoder
"""
_TRAINING = "gradient_checkpointing initializer_range"
_BOOKKEEPING = """
    _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path architectures
    chunk_size_feed_forward custom_pipelines dtype model_type name_or_path output_attentions
    output_hidden_states return_dict tf_legacy_loss tokenizer_class torch_dtype torchscript
    transformers_version unsloth_fixed unsloth_version use_bfloat16 use_return_dict xla_device
"""
IDLE = frozenset(f"{_TOKENS} {_GENERATION} {_OTHER_TASKS} {_TRAINING} {_BOOKKEEPING}".split())

# What every family could say, and the one thing that can be expressed.
FIXED: Mapping[str, Any] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_encoder_decoder": False,
    "per_layer_config": None,
    "pruned_heads": {},
    "quantization_config": None,
}


class Attributes:
    """The attributes that a config.json gives, with a record of which have been used.

    A family's translation takes each attribute it knows. `finish` then refuses those that nobody
    took: an attribute of unknown meaning may change what the model computes.

    Args:
        given: attributes by name.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self._taken: set[str] = set()

    def take(self, name: str, default: Any) -> Any:
        """The value of an attribute; the default, which is the family's, where the file has none.

        JSON has one kind of number, and files write 10000 for 10000.0: a whole number is a float where
        the default is.
        """
        self._taken.add(name)
        value = self._given.get(name, default)
        return float(value) if type(value) is int and type(default) is float else value

    def idle(self, *names: str) -> None:
        """Accepts attributes, whatever their values, as without effect on the logits."""
        self._taken.update(names)

    def only(self, name: str, *allowed: Any) -> None:
        """Accepts an attribute that is absent or has one of these values.

        Raises:
            ValueError: naming the attribute, its value and those that can be expressed.
        """
        value = self.take(name, allowed[0])
        if value not in allowed:
            raise self.error(name, value, " or ".join(map(repr, allowed)))

    def choice(self, name: str, default: str, meanings: Mapping[str, Any]) -> Any:
        """What the value of an attribute is called here.

        Raises:
            ValueError: if it has no name here.
        """
        value = self.take(name, default)
        if not isinstance(value, str) or value not in meanings:
            raise self.error(name, value, ", ".join(meanings))
        return meanings[value]

    def same(self, defaults: Mapping[str, Any]) -> Any:
        """The one value of several attributes, given with their defaults.

        Raises:
            ValueError: naming them, if their values differ.
        """
        values = {name: self.take(name, default) for name, default in defaults.items()}
        first = next(iter(values.values()))
        if any(value != first for value in values.values()):
            listed = ", ".join(f"{name} {value!r}" for name, value in values.items())
            raise ValueError(f"{listed}: this model has one value for all of them")
        return first

    def error(self, name: str, value: Any, expressible: str) -> ValueError:
        """The error for a value that the model cannot express."""
        return ValueError(
            f"{name} is {value!r}, which this model cannot express; it can express {expressible}"
        )

    def finish(self) -> None:
        """Checks the attributes that all families share, and that none is left.

        Raises:
            ValueError: naming those of unknown meaning.
        """
        for name, value in FIXED.items():
            self.only(name, value, None)
        left = sorted(self._given.keys() - self._taken - IDLE)
        if left:
            listed = ", ".join(f"{name} ({_short(self._given[name])})" for name in left)
            raise ValueError(
                f"this model knows no attribute called {listed}, and so not what should be computed"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
