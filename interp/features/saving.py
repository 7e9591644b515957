"""Write dictionaries to folders that `load_sae` reads.

1. If SAELens has an architecture that computes the same features and the same output, the folder
   contains the two files of SAELens 6, and SAELens reads them too.
2. For any other dictionary, such as top-k with a skip connection, the folder contains one file of
   this library: the weights as safetensors, with the settings as JSON in the header.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hooks.base import storage, strict_json
from interp.features.activations import Gated, GroupMax, JumpReLU, TopK
from interp.transformer_lens import their_name

CONFIG = "cfg.json"
WEIGHTS = "sae_weights.safetensors"
OWN_FILE = "dictionary.safetensors"
KIND = "dictionary"

ACTIVATIONS: Mapping[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "Gated": (Gated, ()),
    "GroupMax": (GroupMax, ("k",)),
    "Identity": (nn.Identity, ()),
    "JumpReLU": (JumpReLU, ("relu",)),
    "ReLU": (nn.ReLU, ()),
    "TopK": (TopK, ("k", "by", "relu")),
}
"""The classes of activations that a file of this library can contain, with their settings. The
other arguments of a class are tensors.
"""
ORIGIN = ("reads", "writes", "head", "transcodes", "config")
SETTINGS = ("subtracts_b_dec", "norm", *ORIGIN)

# SAELens applies the defaults of its earlier versions to a config without a version.
_VERSION = "6.54.12"

SAELensParts = tuple[dict[str, Any], dict[str, Tensor]]
"""The fields of a config, and the weights by name."""


def save(folder: Path, dictionary: Any, as_sae_lens: SAELensParts | None) -> None:
    """Write a dictionary to a folder, which is created if it does not exist.

    Args:
        folder: the folder.
        dictionary: the dictionary.
        as_sae_lens: the fields and weights of SAELens that are special to the architecture; None if
            SAELens has no such architecture.

    Raises:
        TypeError: if the activation is of another class than in `ACTIVATIONS`, or a fact in the
            config does not fit JSON.
    """
    if as_sae_lens is None:
        facts = _own_facts(dictionary)
        folder.mkdir(parents=True, exist_ok=True)
        storage.save(folder / OWN_FILE, KIND, dictionary.state_dict(), facts)
        return
    fields, weights = as_sae_lens
    text = strict_json.dumps({**_common_fields(dictionary), **fields})
    folder.mkdir(parents=True, exist_ok=True)
    # Both new files replace old files at the end, when both are complete.
    with ExitStack() as stack:
        config = stack.enter_context(storage.replacing(folder / CONFIG))
        config.write_text(text, encoding="utf-8")
        partial = stack.enter_context(storage.replacing(folder / WEIGHTS))
        with partial.open("wb") as file:
            storage.write(file, folder / WEIGHTS, kind=KIND, tensors=weights, facts={})


def as_sae_lens(dictionary: Any) -> SAELensParts | None:
    """Return the fields and weights of SAELens that are special to the architecture of a dictionary
    with an encoder and a decoder; None if SAELens has no architecture that computes the same.
    """
    activation = dictionary.activation
    fields: dict[str, Any] = {}
    weights = {name: getattr(dictionary, name) for name in ("W_enc", "W_dec", "b_enc", "b_dec")}
    weights |= dict(activation.named_buffers())
    if type(activation) is nn.ReLU:
        kind = "standard"
    elif type(activation) is JumpReLU and activation.relu:
        kind = "jumprelu"
        # SAELens has one threshold for each feature.
        weights["threshold"] = activation.threshold.expand(dictionary.n_features)
    elif type(activation) is TopK and (activation.by, activation.relu) in _TOP_K:
        kind = _TOP_K[activation.by, activation.relu]
        fields = {"k": activation.k, "rescale_acts_by_decoder_norm": False}
    elif type(activation) is Gated and not weights.pop("b_enc").any():
        kind = "gated"
    else:
        return None
    if len({weight.dtype for weight in weights.values()}) > 1:
        return None
    skip = dictionary.W_skip
    if dictionary.is_transcoder:
        if kind not in ("standard", "jumprelu") or dictionary.subtracts_b_dec:
            return None
        words = [kind, "" if skip is None else "skip", "transcoder"]
        kind = "_".join(word for word in words if word not in ("", "standard"))
        fields["d_out"] = dictionary.d_out
    elif skip is not None or dictionary.reads != dictionary.writes:
        return None
    if skip is not None:
        weights["W_skip"] = skip.T
    return {"architecture": kind, **fields}, weights


_TOP_K = {("value", True): "topk", ("size", False): "abstopk"}
"""The architectures of SAELens by the settings `by` and `relu` of `TopK`."""


def _common_fields(dictionary: Any) -> dict[str, Any]:
    """Return the fields of a config of SAELens that all architectures have."""
    known = dictionary.config
    reads = dictionary.reads
    metadata = {**known.get("metadata", known), "sae_lens_version": _VERSION}
    places = {"hook_name": reads, "hook_head_index": dictionary.head}
    if dictionary.is_transcoder:
        places["hook_name_out"] = dictionary.writes
    for field, value in places.items():
        if value is not None:
            metadata[field] = their_name(value) or value if isinstance(value, str) else value
    is_of_heads = reads is not None and reads.endswith("attn.z") and dictionary.head is None
    return {
        "d_in": dictionary.d_in,
        "d_sae": dictionary.n_features,
        "dtype": f"{dictionary.W_dec.dtype}".removeprefix("torch."),
        "device": "cpu",
        "apply_b_dec_to_input": dictionary.subtracts_b_dec,
        "normalize_activations": dictionary.norm,
        "reshape_activations": "hook_z" if is_of_heads else "none",
        "metadata": metadata,
    }


def _own_facts(dictionary: Any) -> dict[str, Any]:
    """Return the settings of a dictionary and of its activation, for a file of this library.

    Raises:
        TypeError: if the activation is of another class than in `ACTIVATIONS`.
    """
    activation = dictionary.activation
    name = type(activation).__name__
    if name not in ACTIVATIONS or type(activation) is not ACTIVATIONS[name][0]:
        raise TypeError(
            f"save needs an activation of one of the classes {', '.join(ACTIVATIONS)}; got "
            f"{name}: torch.save(dictionary, path) writes a dictionary with a class of your own"
        )
    settings = {setting: getattr(activation, setting) for setting in ACTIVATIONS[name][1]}
    facts = {setting: getattr(dictionary, setting) for setting in SETTINGS}
    return {**facts, "activation": name, "settings": settings}
