"""attach: puts hook points into a model, and checks what they promise.

1. Run each example on the model as it is, and again with every call recorded (`probe`).
2. Find the stacks of blocks (`stacks`) and the parts of each block (`layout`).
3. Put points there, and hooks that pass values through them (`points`).
4. Check what each point promises (`checks`). What does not hold it is taken out again, with a reason.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from hooks import HookedRunner, HookPoint, HookPoints, Point
from hooks.base import Shards, carried, explains_calls, is_whole, mesh_of, require_module
from hooks.shared import Session
from models.attached.attached import Attached, Settings, require_no_hooks, require_one_attachment
from models.attached.attention import AttentionPoints, register
from models.attached.checks import Checks, reasons_of_missing_points
from models.attached.forward import Forward, Generate, StackForward
from models.attached.layout import Roles, layout_of
from models.attached.original import (
    AttachError,
    Example,
    configs_of,
    example_of,
    is_encoder_decoder,
    kernel_name,
    parameters_of,
    reading,
    table_of,
    text_config,
)
from models.attached.points import TOP, Blocks, Wiring
from models.attached.probe import Alone, ProbeRun, probed, seen_alone
from models.attached.stacks import OwnPart, Stack, Tower, features, stacks_of
from models.text.tokenizer import as_tokenizer
from models.transformer import Transformer

SPLIT_AXES = {"head", "kv_head", "d_mlp"}
"""The axes that tensor-parallel plans split."""


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
    """Puts hook points into a model of `transformers`, under the names of `models.Transformer`.

    `HookedRunner(model)` and the analyses of `interp` then work as on a plain transformer. Weights, state
    dict and outputs stay as they are. Where the points belong is found from a run on fourteen tokens and
    checked by a few more, so no architecture needs to be known. Attention by code of its own gets points if it
    is two products with a softmax between, or PyTorch's fused function. A point is left out where the model does not
    show its value, or where an edit of it could not take effect.

    An encoder and its decoder have points `encoder.blocks.*` and `decoder.blocks.*`, with `cross.*` for attention to the
    encoder. With an `example` that has images or sounds, towers have points `vision.blocks.*` and `audio.blocks.*`. Positions
    there are the tower's, `projected` is what it gives, and `merged` the stream of the text with that in it.

    A transformer of your own may be written with other classes: it needs an `nn.Embedding` or an `example`, and blocks
    that run one on another. Where they or their sublayers are not found, `blocks`, `attn` and `mlp` name them.

    A model that a tensor-parallel plan splits over processes is attached, run and edited by all of them alike; points
    hold the heads and neurons of all.

    A second call for the same model returns its attachment. If other settings are given, or the model has got other modules,
    sizes or attention since, the points are made anew. The model then has a new attachment. If that fails, it has none.

    Args:
        model: the model.
        tokenizer: its tokenizer, such as one of `transformers`. With it the model also reads strings. A second call without
            one keeps the tokenizer.
        example: the arguments of a run, such as a processor gives, or the first one, a tensor. Models that read no tokens need
            it, and those that read images or sounds beside tokens for the points of their towers.
        blocks: the names of the blocks, such as `layers.*`; by default a `ModuleList` is looked for.
        attn, mlp: the names of the sublayers inside a block.

    Raises:
        ImportError: if `transformers` is not installed, or older than 5.6.
        TypeError: if the tokenizer or the example is none.
        HookError: if points that are made anew have hooks, which would be lost.
        ValueError: if a part of the model or a model around it is attached already; or if the model has other modules under
            our names, or no blocks, does not run on the example, gives NaN, is split over processes and has a part that is
            all zeros, or a named sublayer is not what is added to the stream; or a module cannot be read, which the error
            names.

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
    require_module(model)
    what = type(model).__name__
    if isinstance(model, Transformer):
        raise TypeError(
            "a models.Transformer has its points already; got one: HookedRunner(model) runs it"
        )
    if hasattr(model, "_orig_mod"):
        raise TypeError("attach must come before torch.compile; got a compiled model")
    weights = [*model.parameters()]
    if all(weight.is_meta for weight in weights) and not hasattr(model, "_hf_hook"):
        raise ValueError(f"attach runs the model, so it must have weights; got {what} on meta")
    require_one_attachment(model)
    settings = Settings(example, blocks, attn, mlp)
    reader = as_tokenizer(tokenizer)
    earlier: Attached | None = carried(model, "language_parts")
    if earlier is not None:
        reader = earlier.tokenizer if tokenizer is None else reader
        if earlier.settings is not None and earlier.settings.hold_for(settings, model):
            earlier.tokenizer = reader
            return earlier
        require_no_hooks(model)
        earlier.remove()
    parts = ("encoder", "decoder") if is_encoder_decoder(model) else ()
    owners = [model, *map(dict(model.named_children()).get, parts)]
    if taken := [name for owner in owners for name in TOP if hasattr(owner, name)]:
        raise ValueError(f"{', '.join(TOP)} must be free for points; the model has {taken[0]}")
    default, asked = example_of(model), None if example is None else example_of(model, example)
    if default is None and asked is None:
        reads = ", ".join(parameters_of(model)[:3])
        lacks = "" if table_of(model) is not None else " without an nn.Embedding of tokens"
        raise ValueError(
            f"attach needs example=, the arguments of a run, for a {what}{lacks}, which reads {reads}"
        )
    if configs := configs_of(model):
        register({kernel_name(config) for config in configs.values()})
    attached = Attached(model)
    try:
        with reading(model, ""):
            SetUp(attached, _runs_of(model, default, asked), Roles(blocks, attn, mlp)).run()
    except BaseException:
        attached.remove()
        raise
    attached.tokenizer = reader
    settings.note(model)
    attached.settings = settings
    return attached


def _runs_of(model: nn.Module, default: Example | None, given: Example | None) -> list[Example]:
    """The runs that points are found by: on tokens alone, where the model can, and on the user's example."""
    if given is None or default is None or is_encoder_decoder(model):
        return [example for example in (given, default) if example][:1]
    if given.is_text:
        return [given]
    try:
        default.logits(model)
    except ValueError:  # it needs images beside tokens
        return [given]
    return [default, given]


class SetUp:
    """One set-up.

    Args:
        attached: gets the parts that are found.
        examples: the arguments of runs, of texts first.
        roles: the modules that a user names.

    Raises:
        ValueError: if the model cannot be attached; see `attach`.
    """

    def __init__(self, attached: Attached, examples: Sequence[Example], roles: Roles) -> None:
        self.attached, self.model, self.left_out = attached, attached.model, attached.left_out
        self._examples, self._roles = examples, roles

    def run(self) -> None:
        """Put the points in and check them."""
        model, attached, base = self.model, self.attached, self.attached.base
        before = [seen_alone(model, example) for example in self._examples]
        if before[0].logits.is_meta or before[0].logits.isnan().any():
            raise AttachError(
                f"logits must be numbers; got NaN or none from {type(model).__name__}"
            )
        if not self._examples[0].runs_with_cache(model):
            attached.needed = attached.uncached
        attached.own_configs()
        self._forward = Forward(base)
        probes = [self._probed(run, is_second=n > 0) for n, run in enumerate(before)]
        stacks = self._stacks(probes)
        base.forward = self._forward
        if hasattr(base, "generate"):
            base.generate = Generate(base)
        wirings = []
        for stack in stacks:
            with reading(model, stack.path):
                wirings.append(self._put_points(stack))
        if len(probes) > 1 and len(stacks) > 1:
            self._put_features(probes[1], stacks, wirings)
        for module in model.modules():
            if isinstance(module, HookPoint | HookPoints | Blocks | Tower):
                module.train(model.training)
        if stacks[0].texts is not None:
            attached.read_through(stacks[0])
        self._forward.prepare = attached.with_positions
        vars(model).update(language_parts=attached, prepare_inputs=attached.prepare_inputs)
        self._join_shards(self._examples[0])
        for stack, wiring in zip(stacks, wirings, strict=True):
            with reading(model, stack.path):
                Checks(model, wiring, stack)()
            reasons = reasons_of_missing_points(model, stack.layouts, stack.left_out, stack.prefix)
            for name, why in (stack.left_out | reasons).items():
                self.left_out[stack.prefix + name] = why

    def _probed(self, before: Alone, is_second: bool) -> ProbeRun:
        """A probe whose logits, and functions that compute attention, are those of the model before."""
        # Attention of a text is seen in one way or the other; a tower or an encoder may have another than the text.
        watch = is_second or is_encoder_decoder(self.model)
        probe = probed(self.model, before, watch)
        if not (probe.attention and probe.is_as(before)) and not is_second:
            self.attached.restore_configs()
            probe = probed(self.model, before, watch=True)
        return probe

    def _stacks(self, probes: Sequence[ProbeRun]) -> list[Stack]:
        """The stacks with the layouts of their blocks, and reasons why they may have no points of attention."""
        model, roles = self.model, self._roles
        stacks, config = stacks_of(model, probes, roles.blocks), text_config(model)
        if is_encoder_decoder(model):
            for name in {"encoder", "decoder"} - {stack.name for stack in stacks}:
                self.left_out[name] = "its blocks do not run one on another"
        odd = [*self.attached.kernels - {"eager", "sdpa"}]
        for stack in stacks:
            why = stack.left_out
            known = roles if stack.name in ("", "encoder", "decoder") else Roles()
            for call in stack.chain:
                with reading(model, call.name):
                    stack.layouts.append(layout_of(call, stack.probe, known, config))
            inside = {module for call in stack.chain for module in call.module.modules()}
            times = max(stack.probe.attention[module] for module in inside)
            if times > 1 and stack.name:
                why["attn"] = f"attention ran {times} times: an example needs one image or sound"
            elif not stack.probe.attention:
                what = "has no attention, or computes it in a way that is not recognised"
                why["attn"] = f"{type(model).__name__} {what}"
            for layout in stack.layouts:
                if layout.experts and stack.name:
                    layout.experts = None
                    why["mlp"] = "experts have points in the blocks of the text only"
                why |= layout.experts.left_out if layout.experts else {}
            if any(weight.is_meta for weight in model.parameters()):
                why["scale"] = "some norms' weights are kept elsewhere until they run"
            if odd:
                kernels = "attn_implementation must be 'eager' or 'sdpa' for these"
                why["scores"] = why["pattern"] = f"{kernels}; got {odd[0]!r}"
        return stacks

    def _put_points(self, stack: Stack) -> Wiring:
        """Puts points where the layouts of a stack say."""
        model, forward = self.model, cast(StackForward, self._forward)
        root = stack.root(self.attached.base) if stack.name else model
        if stack.name in ("encoder", "decoder"):
            self._forward.reads_texts = False
            setattr(model, f"get_{stack.name}", OwnPart(model, f"get_{stack.name}"))
        wiring = Wiring(model, stack.owner(model))
        if stack.name:
            forward = root.forward = StackForward(root, grows=stack.name == "decoder")
        if stack.name in ("encoder", "decoder") or stack.texts is not None:
            forward.embedded = wiring.embeddings(stack, root)
        wiring.owner.blocks = Blocks(map(wiring.block, stack.layouts))
        wiring.final_norm(stack.probe, stack.chain[-1], root)
        self._forward.places += wiring.places()
        for points in wiring.owner.blocks.modules():
            if isinstance(points, AttentionPoints):
                points.is_lent = points.module in stack.probe.sharing
        return wiring

    def _put_features(
        self, probe: ProbeRun, stacks: Sequence[Stack], wirings: Sequence[Wiring]
    ) -> None:
        """Puts points where the features of towers go into the stream of the text."""
        merged, projected = features(self.model, probe, stacks[0].chain, stacks[1:])
        if merged is None:
            self.left_out["merged"] = "no module reads the embeddings with the features in them"
        else:
            wirings[0].merged(merged)
        for stack, wiring in zip(stacks[1:], wirings[1:], strict=True):
            if stack.name in projected:
                wiring.projected(projected[stack.name])
            else:
                why = "what goes into the stream is no module's output"
                self.left_out[f"{stack.prefix}projected"] = why

    def _join_shards(self, example: Example) -> None:
        """Makes points join what processes hold, where a tensor-parallel plan splits heads or neurons."""
        if (mesh := mesh_of(self.model)) is None:
            return
        groups: dict[str, list[tuple[Point, int, Tensor]]] = {}

        def note(point: Point, axis: int, part: Tensor) -> None:
            groups.setdefault(point.name.rpartition(".")[0], []).append((point, axis, part))

        with Session() as session:
            for point in HookedRunner(self.model).points.values():
                for axis in SPLIT_AXES & {*point.axes}:
                    hook = partial(note, point, point.axes.index(axis))
                    session.after(point.module, hook)
            example.logits(self.model)
        for name, group in groups.items():
            # Together, because parts that are zero are the same everywhere.
            if not all(is_whole(part, mesh) for _, _, part in group):
                for point, axis_at, part in group:
                    vars(point.module)["shards"] = Shards.of(part, axis_at, mesh)
            elif group[0][2].min() == group[0][2].max():
                raise AttachError(
                    f"{name} must have numbers that differ, to show whether {mesh.size()} processes hold parts of "
                    f"them; got only {float(group[0][2].min())}"
                )
