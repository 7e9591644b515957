"""attach: puts hook points into a model of `transformers`, and checks that the points work.

1. Return the earlier attachment if its settings are equal, and the modules, sizes, kernels and
   numbers of the model are the same (`AttachSettings`, `Unchanged`). Otherwise remove it, and check
   that the names of points are free (`make_room`).
2. Run each example on the unchanged model, and again with every call recorded (`probe`).
3. Find the stacks of blocks (`stacks`), and the parts of each block (`layout`).
4. Add points to these parts, and hooks that pass values through the points (`points`).
5. Check that each point has the value that its name promises (`checks`). A point that fails a check
   is removed, and the reason is stored.
6. Return the object that analyses use (`attached`).
"""

from typing import Any

from torch import nn

from hooks import HookError
from hooks.base import carried, explains_calls, hooks_of, require_module
from models.attached.attached import Attached
from models.attached.attention import hooked_attention
from models.attached.checks import check_points
from models.attached.layout import Roles
from models.attached.original import (
    configs_of,
    examples_of,
    is_encoder_decoder,
    reading_part,
    register_function,
)
from models.attached.points import TOP, place_points, points_of
from models.attached.probe import recorded
from models.attached.settings import AttachSettings
from models.attached.stacks import find_stacks
from models.mode import mode
from models.text.tokenizer import as_tokenizer
from models.transformer import Transformer


@explains_calls
def attach(
    model: nn.Module,
    *,
    tokenizer: Any = None,
    example: Any = None,
    blocks: str | None = None,
    attn: str | None = None,
    mlp: str | None = None,
) -> Attached:
    """Put hook points into a model of `transformers`, under the names of `models.Transformer`.

    After this, `HookedRunner` and the analyses of `interp` work as on a plain transformer.
    The weights, the state dict and the outputs do not change. The points are found from a run on
    fourteen tokens, in evaluation mode, and checked by a few more runs, so no architecture needs to
    be known. A module that computes attention in its own code gets points if it computes two
    products with a softmax between them, or calls PyTorch's fused function. A point is left out if
    the model does not expose its value, or if an edit of it could not take effect. If the residual
    stream has several vectors for each token, its points have the axes `batch pos stream d_model`.

    An encoder and its decoder have points `encoder.blocks.*` and `decoder.blocks.*`, with `cross.*`
    for attention to the encoder. With an `example` that contains images or sounds, towers have
    points `vision.blocks.*` and `audio.blocks.*`. Their positions are positions in the tower.
    `projected` is the output of the tower, and `merged` is the stream of the text with this output
    inserted.

    You can also attach a transformer that you wrote yourself, with other classes. The model needs
    an `nn.Embedding` or an `example`, and blocks that each read the output of the block before. If
    the blocks or their sublayers are not found, name them with `blocks`, `attn` and `mlp`.

    If a tensor-parallel plan splits a model over processes, all processes must make the same calls
    to attach, run and edit it. Points show the heads and neurons of all processes.

    A second call for the same model returns the existing attachment. If the settings are different,
    or the modules, sizes, numbers or attention kernels of the model have changed, the points are
    created again. The model then has a new attachment. If this fails, the model has none.

    Args:
        model: the model.
        tokenizer: the model's tokenizer, for example from `transformers`. With a tokenizer, the
            model also reads strings. A second call without a tokenizer keeps the tokenizer of the
            first call.
        example: the arguments of a run, for example the output of a processor, or only the first
            argument, a tensor. Models that read no tokens need an example. Models that read images
            or sounds besides tokens need one for the points of their towers.
        blocks: the names of the blocks, for example `layers.*`, or of the `ModuleList` that
            contains them. Default: a `ModuleList` is searched.
        attn, mlp: the names of the sublayers inside a block.

    Returns:
        The attachment. `HookedRunner` and all functions that take a model accept it in place of the
        model. `attachment.remove()`, or the end of a `with` statement, removes the points.

    Raises:
        ImportError: if `transformers` is not installed, or is older than 5.6.
        TypeError: if the tokenizer or the example has a wrong type.
        HookError: if points that must be created again have hooks, which would be lost.
        AttachError: if the model reads no tokens and there is no example, or if its blocks or
            sublayers cannot be found. It is a `ValueError`.
        ValueError: if a part of the model, or a model that contains it, is already attached; if the
            model has other modules under the names of points, has no blocks, does not run on the
            example, or returns NaN; if the model is split over processes and a part is all zeros;
            if the output of a named sublayer is not added to the stream; or if a module cannot be
            read. The error names the module.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from hooks import HookedRunner
    >>> sizes = GPT2Config(vocab_size=7, n_positions=9, n_embd=4, n_layer=1, n_head=2)
    >>> model = GPT2LMHeadModel(sizes).eval()
    >>> attach(model)
    Attached(GPT2LMHeadModel, 21 points)
    >>> _, cache = HookedRunner(model).run_with_cache(torch.tensor([[3, 1, 4]]))
    >>> cache["pattern", 0].shape
    torch.Size([1, 2, 3, 3])
    """
    earlier: Attached | None = earlier_attachment(model)
    settings = AttachSettings(example, blocks, attn=attn, mlp=mlp)
    reader = as_tokenizer(tokenizer)
    if earlier is not None and tokenizer is None:
        reader = earlier.tokenizer
    if earlier is not None and settings.hold_for(earlier.settings, model):
        has_changed = earlier.forward.unchanged.change() is not None
        if not has_changed:
            earlier.tokenizer = reader
            return earlier
    make_room(model, earlier)
    examples = examples_of(model, example)
    register_function(model, hooked_attention)
    attached = Attached(model)
    try:
        # Dropout would make the runs differ, and points would fail their checks.
        with mode(model, training=False), reading_part(model, ""):
            probes = recorded(attached, examples)
            stacks = find_stacks(
                model, probes, roles=Roles(blocks, attn, mlp), kernels=attached.kernels
            )
            wirings = place_points(model, attached.forward, stacks=stacks, probes=probes)
            attached.read_through(stacks)
            for wiring in wirings:
                attached.left_out |= check_points(wiring)
    except BaseException:
        attached.remove()
        raise
    attached.tokenizer = reader
    configs = {id(config): config for config in configs_of(model).values()}
    for config in configs.values():
        attached.forward.unchanged.note_numbers(config)
    settings.note(model)
    attached.settings = settings
    return attached


def earlier_attachment(model: nn.Module) -> Any:
    """Return the attachment of a model that can get points; None without an attachment.

    Raises:
        TypeError, ValueError: if the model cannot get points; see `_require_attachable`.
    """
    _require_attachable(model)
    return carried(model, "language_parts")


def _require_attachable(model: nn.Module) -> None:
    """Require a model that can get points: with weights, not compiled, and without attached parts.

    Raises:
        TypeError: if it is not a module, or is a `models.Transformer` or a compiled model.
        ValueError: if it has no weights, or if a part of it, or a model that contains it, is
            attached.
    """
    require_module(model)
    if isinstance(model, Transformer):
        raise TypeError(
            "a models.Transformer already has points; use HookedRunner(model) without attach"
        )
    if hasattr(model, "_orig_mod"):
        raise TypeError("attach must come before torch.compile; got a compiled model")
    if all(weight.is_meta for weight in model.parameters()) and not hasattr(model, "_hf_hook"):
        kind = type(model).__name__
        raise ValueError(f"attach runs the model, so it must have weights; got {kind} on meta")
    if carried(model, "language_parts") is not None:
        return
    for name, module in model.named_modules():
        if carried(module, "language_parts") is not None:
            raise ValueError(
                f"no part of the model may be attached; {name} is attached: call "
                f"detach(model.{name}) first"
            )
        if carried(module, "hook_points") is not None:
            raise ValueError(
                "the model must not be part of a larger attached model: detach that model first "
                f"(its points are in {name or 'this model'})"
            )


def make_room(model: nn.Module, earlier: Any) -> None:
    """Remove an earlier attachment, and check that the names of points are free.

    Args:
        model: the model.
        earlier: the attachment of the model; None if the model is not attached.

    Raises:
        HookError: if a point of the attachment has a hook.
        ValueError: if the model has an attribute with the name of a point.
    """
    if earlier is not None:
        _require_no_hooks(model)
        earlier.remove()
    _require_free_names(model)


def _require_no_hooks(model: nn.Module) -> None:
    """Require points without hooks, because creating the points again would lose the hooks.

    Raises:
        HookError: if a point has a hook.
    """
    points = {*points_of(model)}
    for name, module in model.named_modules():
        if module in points and hooks_of(module):
            raise HookError(
                f"points must have no hooks when attach creates them again; got a hook at {name}: "
                "leave its with block or remove its handle (HookedRunner(model).handles)"
            )


def _require_free_names(model: nn.Module) -> None:
    """Require that the names of the points (`TOP`: `embed`, `blocks`, ...) are free in the model.

    Raises:
        ValueError: if the model has an attribute of this name. The error contains the name.
    """
    parts = ("encoder", "decoder") if is_encoder_decoder(model) else ()
    children = dict(model.named_children())
    for owner in (model, *map(children.get, parts)):
        for name in TOP:
            if hasattr(owner, name):
                raise ValueError(f"{', '.join(TOP)} must be free for points; the model has {name}")
