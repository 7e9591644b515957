"""Places that dictionaries were trained at, as their files name them, and our points that have their values.

1. A place that has the same value in every model that has it gets our name when the file is read (`ours`).
2. A place that depends on the model is looked up when a dictionary is spliced into it (`point_at`): the model runs on a
   few tokens, and the point is the one whose value the named module read or gave, bit by bit. So a norm or a factor
   between the two gives no point.
3. A dictionary that is used at another place is a warning (`warn_of_place`). If this model has no such point, only the
   layer counts. The stream after a block is the stream before the next block, so these two names are one place. Other
   points may have the same value too, such as `embed` and `blocks.0.resid_pre` without position encodings, so the model
   runs on a few tokens before a warning.
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

# A block of a model of `transformers`, a module in it, and whether what that reads or what it gives is meant.
_MODULE = re.compile(
    r"(?:(?:base_model|model|language_model|transformer|gpt_neox|decoder)\.)*"
    r"(?:layers|h|blocks)\.(?P<layer>\d+)(?:\.(?P<module>(?!input$|output$).+?))?(?:\.(?P<end>input|output))?"
)
_DICTIONARY_LEARNING = re.compile(
    r"(?P<module>resid_post|mlp_out|attention_out)_layer_(?P<layer>\d+)"
)
_MODULES = {"resid_post": "", "mlp_out": "mlp", "attention_out": "self_attn"}

# What is the same in every model that has such a module, by the module and the end of it that is meant.
_EXACT = {
    ("", "input"): "resid_pre",
    ("", "output"): "resid_post",
    ("pre_feedforward_layernorm", "output"): "ln2.normalized",
    ("post_feedforward_layernorm", "output"): "mlp_out",
}
# Words of families for the same module.
_WORDS = (
    ("self_attn", "attention", "attn", "self_attention"),
    ("o_proj", "out_proj", "dense", "c_proj", "output"),
)
# Our points of a block, the usual first: norms and streams may give the same tensor twice.
_POINTS = ["resid_post", "mlp_out", "attn_out", "resid_mid", "resid_pre"]
_POINTS += ["ln2.normalized", "ln1.normalized", "attn.z", "mlp.post"]
_AFTER_BLOCK = re.compile(r"(.*\bblocks\.)(\d+)\.resid_post")


def ours(name: str | None) -> str | None:
    """Our name of a place that has the same value in every model; the name itself for any other, for `point_at`."""
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
    """The name of the point of a model that has the value of a place; the name itself if none is known to."""
    if name in runner.points:
        return name
    name = ours(name) or name
    layer, module, end = _parsed(name)
    if layer is not None and (point := _measured(layer, module, end, runner)):
        return point
    try:
        return hooks_name(name, model=runner.model)
    except UnknownNameError:
        return name


def warn_of_place(runner: HookedRunner, *uses: tuple[str | None, str]) -> None:
    """Warn, once, if a dictionary is used at a point that is known to be another place.

    Args:
        runner: the runner of the model.
        uses: a place that the dictionary was trained at, None if unknown, and the name of the
            point that is used for it. A transcoder has two uses: where it writes, and what it reads.
    """
    wrong = [
        (place, point)
        for place, point in dict.fromkeys(uses)  # of an autoencoder, both uses are the same
        if place and not _may_be_at(place, point, runner)
    ]
    if wrong:
        places, here = (" and ".join(dict.fromkeys(names)) for names in zip(*wrong, strict=True))
        warn(
            f"the dictionary was trained at {places} and is used at {here}, which has other "
            "values: its features may mean nothing there"
        )


def _may_be_at(place: str, point: str, runner: HookedRunner) -> bool:
    """Whether a place has the value of a point, or nobody knows."""
    known = point if point == place else point_at(place, runner)
    layer, last = layer_of(point), known.removeprefix("blocks.*.")
    if layer is not None and any(name.endswith(f".{last}") for name in runner.points):
        # Dictionaries across layers name a point without its block.
        known = names_by_layer(last, runner.points).get(layer, known)
    if _as_entering(known) == _as_entering(point):
        return True
    if known in runner.points:
        return have_one_value(known, point, runner)
    return layer_of(known) in (None, layer) or layer is None


def _as_entering(name: str) -> str:
    """The name of a point. The stream after a block gets the name of the stream before the next."""
    match = _AFTER_BLOCK.fullmatch(name)
    return f"{match[1]}{int(match[2]) + 1}.resid_pre" if match else name


def _parsed(name: str) -> tuple[int | None, str, str]:
    """The block, the module in it and the end of it that a name means; no block if it is no such name."""
    if match := _DICTIONARY_LEARNING.fullmatch(name):
        return int(match["layer"]), _MODULES[match["module"]], "output"
    if match := _MODULE.fullmatch(name):
        return int(match["layer"]), match["module"] or "", match["end"] or "output"
    return None, "", ""


def _measured(layer: int, module: str, end: str, runner: HookedRunner) -> str | None:
    """The point whose value a module reads or gives in a run on a few tokens."""
    blocks = getattr(of(runner.model), "blocks", ())
    modules = dict(blocks[layer].named_modules()) if layer < len(blocks) else {}
    words = [next((same for same in _WORDS if part in same), (part,)) for part in module.split(".")]
    known = (module, *map(".".join, itertools.product(*words)))
    owner = next((modules[each] for each in known if each in modules), None)
    names = [each for last in _POINTS if (each := f"blocks.{layer}.{last}") in runner.points]
    if owner is None or not names:
        return None
    seen: list[Tensor] = []

    def see(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        value = (args, kwargs) if end == "input" else output
        seen.append(next(tensors_in(value)).detach().clone())

    _few_tokens(runner, names[:1])  # an attached model may run more than once the first time
    handle = owner.register_forward_hook(see, with_kwargs=True)
    try:
        cache = _few_tokens(runner, names)
    finally:
        handle.remove()
    same = (each for each in names if len(seen) == 1 and _is_same(cache[each], seen[0]))
    return next(same, None)


def have_one_value(one: str, other: str, runner: HookedRunner) -> bool:
    """Whether two points have the same value in a run on a few tokens; False without tokens."""
    try:
        cache = _few_tokens(runner, [one, other])
    except Exception:  # a model that reads images or two texts may raise anything
        return False
    return _is_same(cache[one], cache[other])


def _few_tokens(runner: HookedRunner, names: list[str]) -> ActivationCache:
    """The values of points in a run on a few tokens."""
    device = next(runner.model.parameters()).device
    tokens = torch.arange(1, 6, device=device)[None] % n_logits(runner.model)
    return runner.capture(tokens, names=names, **Text(tokens).arguments(runner.model))


def _is_same(value: Tensor, seen: Tensor) -> bool:
    """Whether two values are the same bit by bit, heads in a row, and not zero, which might be anything.

    Both are copies of one tensor of one run, so rounding is the same in both.
    """
    if value.numel() != seen.numel() or not seen.any():
        return False
    return is_same(value.reshape(seen.shape), seen)
