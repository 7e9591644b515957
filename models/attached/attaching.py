"""attach: puts hook points into a model of `transformers`, and checks what they promise.

1. Run each example on the model as it is, and again with every call recorded (`_record`, with
   `probe`).
2. Find the stacks of blocks (`stacks`), and the parts of each block (`layout`).
3. Place points there, and hooks that pass values through them (`points`).
4. Check what each point promises (`checks`). A point that breaks its promise is taken out again,
   with a reason.
5. Return the object that analyses use (`attached`).
"""

from typing import Any

from torch import nn

from hooks import HookError, HookPoint, HookPoints
from hooks.base import carried, explains_calls, hooks_of, require_module
from models.attached.attached import Attached, AttachSettings
from models.attached.attention import register
from models.attached.checks import check_points
from models.attached.layout import Roles
from models.attached.original import (
    AttachError,
    ExampleArguments,
    configs_of,
    examples_of,
    is_encoder_decoder,
    kernel_name,
    reading,
)
from models.attached.points import TOP, Blocks, place_points
from models.attached.probe import Alone, ProbeRun, probed, seen_alone
from models.attached.stacks import Tower, find_stacks
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

    `HookedRunner(model)` and the analyses of `interp` then work as on a plain transformer. Weights,
    state dict and outputs stay as they are. Where the points belong is found from a run on fourteen
    tokens and checked by a few more, so no architecture needs to be known. Attention by code of its
    own gets points if it is two products with a softmax between, or PyTorch's fused function. A
    point is left out where the model does not show its value, or where an edit of it could not take
    effect.

    An encoder and its decoder have points `encoder.blocks.*` and `decoder.blocks.*`, with `cross.*`
    for attention to the encoder. With an `example` that has images or sounds, towers have points
    `vision.blocks.*` and `audio.blocks.*`. Positions there are the tower's, `projected` is what it
    gives, and `merged` the stream of the text with that in it.

    A transformer of your own may be written with other classes: it needs an `nn.Embedding` or an
    `example`, and blocks that run one on another. Where they or their sublayers are not found,
    `blocks`, `attn` and `mlp` name them.

    A model that a tensor-parallel plan splits over processes is attached, run and edited by all of
    them alike; points hold the heads and neurons of all.

    A second call for the same model returns its attachment. If other settings are given, or the
    model has got other modules, sizes or attention since, the points are made anew. The model then
    has a new attachment. If that fails, it has none.

    Args:
        model: the model.
        tokenizer: its tokenizer, such as one of `transformers`. With it the model also reads
            strings. A second call without one keeps the tokenizer.
        example: the arguments of a run, such as a processor gives, or the first one, a tensor.
            Models that read no tokens need it, and those that read images or sounds beside tokens
            for the points of their towers.
        blocks: the names of the blocks, such as `layers.*`; by default a `ModuleList` is looked
            for.
        attn, mlp: the names of the sublayers inside a block.

    Raises:
        ImportError: if `transformers` is not installed, or older than 5.6.
        TypeError: if the tokenizer or the example is none.
        HookError: if points that are made anew have hooks, which would be lost.
        ValueError: if a part of the model or a model around it is attached already; or if the model
            has other modules under our names, or no blocks, does not run on the example, gives NaN,
            is split over processes and has a part that is all zeros, or a named sublayer is not
            what is added to the stream; or a module cannot be read, which the error names.

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
    _require_attachable(model)
    settings = AttachSettings(example, blocks, attn, mlp)
    reader = as_tokenizer(tokenizer)
    earlier: Attached | None = carried(model, "language_parts")
    if earlier is not None:
        reader = earlier.tokenizer if tokenizer is None else reader
        if earlier.settings is not None and earlier.settings.hold_for(settings, model):
            earlier.tokenizer = reader
            return earlier
        _require_no_hooks(model)
        earlier.remove()
    _require_free_names(model)
    examples = examples_of(model, example)
    if configs := configs_of(model):
        register({kernel_name(config) for config in configs.values()})
    attached = Attached(model)
    try:
        with reading(model, ""):
            probes = _record(attached, examples)
            stacks = find_stacks(model, probes, Roles(blocks, attn, mlp), attached.kernels)
            wirings = place_points(model, attached.forward, stacks, probes)
            attached.read_through(stacks)
            for wiring in wirings:
                attached.left_out |= check_points(wiring)
    except BaseException:
        attached.remove()
        raise
    attached.tokenizer = reader
    settings.note(model)
    attached.settings = settings
    return attached


def _require_attachable(model: nn.Module) -> None:
    """Refuse a model that cannot get points: without weights, compiled, or in part attached.

    Raises:
        TypeError: if it is no module, a `models.Transformer` or a compiled model.
        ValueError: if it has no weights, or a part of it or a model around it is attached.
    """
    require_module(model)
    if isinstance(model, Transformer):
        raise TypeError(
            "a models.Transformer has its points already; got one: HookedRunner(model) runs it"
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
                f"no part of the model must be attached already; {name} is: detach(model.{name})"
            )
        if carried(module, "hook_points") is not None:
            raise ValueError(
                "a model must not be part of one that is attached already: detach the whole one, "
                f"whose points are in {name or 'it'}"
            )


def _require_no_hooks(model: nn.Module) -> None:
    """Refuse hooks on points, which would be lost if the points were made anew.

    Raises:
        HookError: if a point has a hook.
    """
    for name, module in model.named_modules():
        is_point = isinstance(module, HookPoint | HookPoints | Blocks | Tower)
        if is_point and hooks_of(module):
            raise HookError(
                f"points must have no hooks when attach makes them anew; got a hook at {name}: "
                "leave its with or remove its handle (HookedRunner(model).handles), then attach"
            )


def _require_free_names(model: nn.Module) -> None:
    """Refuse a model with modules under the names of points.

    Raises:
        ValueError: naming the first.
    """
    parts = ("encoder", "decoder") if is_encoder_decoder(model) else ()
    owners = [model, *map(dict(model.named_children()).get, parts)]
    if taken := [name for owner in owners for name in TOP if hasattr(owner, name)]:
        raise ValueError(f"{', '.join(TOP)} must be free for points; the model has {taken[0]}")


def _record(attached: Attached, examples: list[ExampleArguments]) -> list[ProbeRun]:
    """Return a record of each example: the model's run on it, with every call of a module.

    It gives the modules configs of their own before it records.

    Raises:
        AttachError: if the model gives no numbers.
    """
    model = attached.model
    runs = [seen_alone(model, example) for example in examples]
    if runs[0].logits.is_meta or runs[0].logits.isnan().any():
        raise AttachError(f"logits must be numbers; got NaN or none from {type(model).__name__}")
    if not examples[0].runs_with_cache(model):
        attached.needed = attached.uncached
    attached.take_over()
    return [_probed(attached, run, is_second=n > 0) for n, run in enumerate(runs)]


def _probed(attached: Attached, before: Alone, is_second: bool) -> ProbeRun:
    """Return a record whose logits, and functions that compute attention, are the same as before."""
    # Attention of a text is seen in one way or the other; a tower or an encoder may have another
    # than the text.
    watch = is_second or is_encoder_decoder(attached.model)
    probe = probed(attached.model, before, watch)
    if not (probe.attention and probe.is_as(before)) and not is_second:
        attached.restore_configs()
        probe = probed(attached.model, before, watch=True)
    return probe
