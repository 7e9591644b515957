"""Find the points for the places where dictionaries were trained.

The file of a dictionary names its place in the words of some library: often a module, and its input
or output.

1. Some names mean the same point in every model. They are translated when the file is read
   (`ours`).
2. The meaning of other names depends on the model. They are translated when a dictionary is spliced
   into the model (`point_at`): the model runs on a few tokens, and the point is found whose value
   equals the input or output of the named module bit by bit. If a norm or a factor lies between the
   module and every point, no point is found.
3. If a dictionary is used at another place than in training, a warning is issued (`warn_of_place`).
   If the model has no point for the place, only the layers are compared. The stream after a block
   is the stream before the next block, so these two names are one place. Two other points may have
   equal values, such as `embed` and `blocks.0.resid_pre` without position encodings. So before a
   warning, the values at the two points are compared in a run on a few tokens.
"""

import itertools
import re
from typing import Any

import torch
from torch import Tensor, nn

from hooks import ActivationCache, HookedRunner, UnknownNameError
from hooks.base import Text, is_same, layer_of, tensors_in, warn
from hooks.shared import names_by_layer
from interp.protocol import n_logits, of
from interp.transformer_lens import hooks_name

# The name of a module in a block of a model of `transformers`, and of its input or output, for
# example `model.layers.3.mlp.output`.
_MODULE = re.compile(
    r"(?:(?:base_model|model|language_model|transformer|gpt_neox|decoder)\.)*"
    r"(?:layers|h|blocks)\.(?P<layer>\d+)"
    r"(?:\.(?P<module>(?!input$|output$).+?))?(?:\.(?P<end>input|output))?"
)
_DICTIONARY_LEARNING = re.compile(
    r"(?P<module>resid_post|mlp_out|attention_out)_layer_(?P<layer>\d+)"
)
_MODULES = {"resid_post": "", "mlp_out": "mlp", "attention_out": "self_attn"}

# The points by module and by its input or output, for names that mean the same point in every model
# with a module of this name. The empty name is the block itself.
_EXACT = {
    ("", "input"): "resid_pre",
    ("", "output"): "resid_post",
    ("pre_feedforward_layernorm", "output"): "ln2.normalized",
    ("post_feedforward_layernorm", "output"): "mlp_out",
}
# Names of the same module in different families of models.
_WORDS = (
    ("self_attn", "attention", "attn", "self_attention"),
    ("o_proj", "out_proj", "dense", "c_proj", "output"),
)
# The points of a block. The usual points come first, because several points may have the same
# value.
_POINTS = (
    *("resid_post", "mlp_out", "attn_out", "resid_mid", "resid_pre"),
    *("ln2.normalized", "ln1.normalized", "attn.z", "mlp.post"),
)
_AFTER_BLOCK = re.compile(r"(.*\bblocks\.)(\d+)\.resid_post")


def ours(name: str | None) -> str | None:
    """Return the name of a point for the place that the file of a dictionary names.

    The result is a name of this project, such as `blocks.3.mlp_out`, if the name in the file means
    the same point in every model. Otherwise it is the name in the file, which `point_at` can
    translate for one model.

    Args:
        name: the name of the place in the words of another library; None if the file has no name.

    >>> ours("blocks.3.hook_mlp_out"), ours("model.layers.3.self_attn.output")
    ('blocks.3.mlp_out', 'model.layers.3.self_attn.output')
    """
    if name is None:
        return None
    layer, module, end = _parsed(name)
    if (module, end) in _EXACT:
        return f"blocks.{layer}.{_EXACT[module, end]}"
    try:
        return hooks_name(name)
    except UnknownNameError:
        return name


def point_at(name: str, runner: HookedRunner) -> str:
    """Return the name of a model's point that shows the value at a place.

    If no such point is known, return the name of the place.

    Args:
        name: the name of the place.
        runner: the runner of the model.
    """
    if name in runner.points:
        return name
    name = ours(name) or name
    layer, module, end = _parsed(name)
    if layer is not None and (point := _measured(layer, module, end=end, runner=runner)):
        return point
    try:
        return hooks_name(name, model=runner.model)
    except UnknownNameError:
        return name


def warn_of_place(runner: HookedRunner, *uses: tuple[str | None, str]) -> None:
    """Warn once if a dictionary is used at a different place than in training.

    Args:
        runner: the runner of the model.
        uses: pairs of a place where the dictionary was trained, or None if it is unknown, and the
            name of the point that is used for it. A transcoder has two uses: the point that it
            writes and the point that it reads.
    """
    wrong = [
        (place, point)
        # Both uses of an autoencoder are the same.
        for place, point in dict.fromkeys(uses)
        if place and not _may_be_at(place, point, runner)
    ]
    if wrong:
        places, here = (" and ".join(dict.fromkeys(names)) for names in zip(*wrong, strict=True))
        warn(
            f"the dictionary was trained at {places} and is used at {here}, which has other "
            "values: its features may be meaningless there"
        )


def _may_be_at(place: str, point: str, runner: HookedRunner) -> bool:
    """Return whether a place may have the value of a point.

    The result is False only if their values, or else their layers, are known to differ.
    """
    known = point if point == place else point_at(place, runner)
    layer = layer_of(point)
    last = known.removeprefix("blocks.*.")
    if layer is not None and any(name.endswith(f".{last}") for name in runner.points):
        # The files of cross-layer transcoders name a point without its block, so add the block of
        # the point.
        known = names_by_layer(last, runner.points).get(layer, known)
    if _as_entering(known) == _as_entering(point):
        return True
    if known in runner.points:
        return have_one_value(known, point, runner)
    return layer_of(known) in (None, layer) or layer is None


def _as_entering(name: str) -> str:
    """Return one name for the two names of a stream between blocks; other names are unchanged.

    `blocks.2.resid_post` becomes `blocks.3.resid_pre`.
    """
    match = _AFTER_BLOCK.fullmatch(name)
    return f"{match[1]}{int(match[2]) + 1}.resid_pre" if match else name


def _parsed(name: str) -> tuple[int | None, str, str]:
    """Return (block, module, end) of a name; `end` is `input` or `output`.

    The module is a name inside the block. If the name has another form, the block is None.
    """
    if match := _DICTIONARY_LEARNING.fullmatch(name):
        return int(match["layer"]), _MODULES[match["module"]], "output"
    if match := _MODULE.fullmatch(name):
        return int(match["layer"]), match["module"] or "", match["end"] or "output"
    return None, "", ""


def _measured(layer: int, module: str, end: str, runner: HookedRunner) -> str | None:
    """Return the point whose value equals the input or output of a module in a run on a
    few tokens.
    """
    blocks = getattr(of(runner.model), "blocks", ())
    modules = dict(blocks[layer].named_modules()) if layer < len(blocks) else {}
    synonyms = []
    for part in module.split("."):
        synonyms.append(next((words for words in _WORDS if part in words), (part,)))
    known = (module, *map(".".join, itertools.product(*synonyms)))
    owner = next((modules[name] for name in known if name in modules), None)
    in_layer = [f"blocks.{layer}.{last}" for last in _POINTS]
    names = [name for name in in_layer if name in runner.points]
    if owner is None or not names:
        return None
    values: list[Tensor] = []

    def see(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record the input or output of the module."""
        value = (args, kwargs) if end == "input" else output
        values.append(next(tensors_in(value)).detach().clone())

    # The first capture of an attached model may run the model more than once. So run it before the
    # hook is registered, which must see a single run.
    _few_tokens(runner, names[:1])
    handle = owner.register_forward_hook(see, with_kwargs=True)
    try:
        cache = _few_tokens(runner, names)
    finally:
        handle.remove()
    same = (name for name in names if len(values) == 1 and _is_same(cache[name], values[0]))
    return next(same, None)


def have_one_value(one: str, other: str, runner: HookedRunner) -> bool:
    """Return True if two points have the same value in a run on a few tokens.

    If the run fails, return False.

    Args:
        one, other: the names of the points.
        runner: the runner of the model.
    """
    try:
        cache = _few_tokens(runner, [one, other])
    # A model that reads images or two texts may raise any error.
    except Exception:
        return False
    return _is_same(cache[one], cache[other])


def _few_tokens(runner: HookedRunner, names: list[str]) -> ActivationCache:
    """Return the values of points in a run on a few tokens."""
    device = next(runner.model.parameters()).device
    tokens = torch.arange(1, 6, device=device)[None] % n_logits(runner.model)
    return runner.capture(tokens, names=names, **Text(tokens).arguments(runner.model))


def _is_same(value: Tensor, other: Tensor) -> bool:
    """Return True if two values are equal bit by bit, with concatenated heads, and not zero.

    Zeros would match many places. The two values are copies of one tensor in one run, so the
    rounding is the same.
    """
    if value.numel() != other.numel() or not other.any():
        return False
    return is_same(value.reshape(other.shape), other)
