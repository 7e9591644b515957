"""Hand a dictionary to SAEBench (Karvonen et al. 2025, arXiv 2503.09532).

SAEBench needs its own class, runs models of TransformerLens, and requires decoder rows of length 1.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from hooks.base import library, require_kind
from interp.features.dictionary import Dictionary
from interp.transformer_lens import hooks_name


def for_saebench(
    dictionary: Dictionary, model_name: str, hook_name: str | None = None
) -> nn.Module:
    """Return an autoencoder as SAEBench's `BaseSAE`, for its evaluations of custom SAEs.

    The decoder rows have length 1 (`Dictionary.with_unit_decoder`), and the reconstructions are the
    reconstructions of the dictionary.

    Args:
        dictionary: an autoencoder of the residual stream or of a sublayer, without a norm and
            without a skip connection.
        model_name: the name of the model in TransformerLens, such as `gemma-2-2b`.
        hook_name: the name of the point in TransformerLens. Default: the name for
            `dictionary.reads`.

    Returns:
        The module, in SAEBench's class `BaseSAE`, with the dtype and the device of the dictionary.
        Its `encode` returns features [..., feature], and `decode` returns values [..., d_model].

    Raises:
        ValueError: if SAEBench cannot express the dictionary, or the point is unknown.
        ImportError: if `sae_bench` is not installed (`pip install sae-bench`).

    >>> from interp.features import load_sae
    >>> sae = load_sae("pydoc-4l/resid_post")
    >>> from importlib.util import find_spec
    >>> if find_spec("sae_bench"):
    ...     assert for_saebench(sae, "pydoc-4l").cfg.hook_name == "blocks.2.hook_resid_post"
    """
    require_kind("model_name", model_name, kind=str, words="a name", call="'gemma-2-2b' is one")
    _require_expressible(dictionary)
    hook = _hook_name(dictionary) if hook_name is None else hook_name
    layer = _layer_of(hook)
    unit = dictionary.with_unit_decoder()
    base = library("sae_bench.custom_saes.base_sae", "sae-bench").BaseSAE

    class ForSAEBench(base):  # type: ignore[misc, valid-type]
        """An autoencoder of this package in the class of SAEBench."""

        def __init__(self) -> None:
            weight = unit.W_dec
            super().__init__(
                unit.d_in,
                unit.n_features,
                model_name,
                layer,
                weight.device,
                weight.dtype,
                hook_name=hook,
            )
            self.dictionary = unit
            with torch.no_grad():
                for name in ("W_enc", "W_dec", "b_enc", "b_dec"):
                    getattr(self, name).copy_(getattr(unit, name))
            self.cfg.architecture = type(unit.activation).__name__.lower()
            self.cfg.apply_b_dec_to_input = unit.subtracts_b_dec

        def encode(self, x: Tensor) -> Any:
            return self.dictionary.encode(x)

        def decode(self, feature_acts: Tensor) -> Any:
            return self.dictionary.decode(feature_acts)

        def forward(self, x: Tensor) -> Any:
            return self.dictionary(x)

    return ForSAEBench()


def _require_expressible(dictionary: Dictionary) -> None:
    """Check that SAEBench can express a dictionary.

    Raises:
        ValueError: if the dictionary has a norm or a skip connection, or is a transcoder.
    """
    obstacles = {
        "a norm": dictionary.norm != "none",
        "a skip connection": dictionary.W_skip is not None,
        "another output than its input": dictionary.is_transcoder,
    }
    for words, has_it in obstacles.items():
        if has_it:
            raise ValueError(
                f"SAEBench needs an autoencoder without {words}; the dictionary has {words}"
            )


def _layer_of(hook_name: str) -> int:
    """Return the number of the layer in the name of a point.

    Raises:
        ValueError: if the name contains no number.
    """
    number = re.search(r"\d+", hook_name)
    if number is None:
        raise ValueError(f"hook_name must contain the number of a layer; got {hook_name!r}")
    return int(number[0])


def _hook_name(dictionary: Dictionary) -> str:
    """Return TransformerLens' name of the point that a dictionary reads.

    Raises:
        ValueError: if the point is unknown, or TransformerLens has no such name.
    """
    place = re.fullmatch(r"blocks\.(\d+)\.(\w+)", dictionary.reads or "")
    name = f"blocks.{place[1]}.hook_{place[2]}" if place else ""
    try:
        is_same = bool(place) and hooks_name(name) == dictionary.reads
    except LookupError:
        is_same = False
    if not is_same:
        raise ValueError(
            "hook_name must be the name of the point in TransformerLens, because the dictionary "
            f"reads {dictionary.reads}: such as hook_name='blocks.3.hook_resid_post'"
        )
    return name
