"""Attached: the points that are in a model of `transformers`, and how they get there and out again."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from hooks import HookedRunner, HookPoint, HookPoints, Point
from hooks.shared import Session, Shards, Wire, carried, is_whole, mesh_of, remove_hooks
from models.attached.attention import AttentionPoints
from models.attached.configs import (
    base_of,
    carry_changes,
    configs_of,
    kernel_name,
    own_configs,
    text_config,
)
from models.attached.example import Example, is_encoder_decoder
from models.attached.forward import Forward, Generate, StackForward
from models.attached.language import AttachedLanguage, AttachedTexts
from models.attached.layout import layout_of
from models.attached.missing import missing
from models.attached.points import TOP, Blocks, Wiring
from models.attached.probe import ProbeRun, Watching, probed
from models.attached.promises import Checks, logits_alone
from models.attached.roles import Roles
from models.attached.stacks import OwnPart, Stack, Tower, features, stacks_of
from models.attached.sums import is_same
from models.attached.wiring import restore_methods
from models.text.texts import ReadsText

SPLIT_AXES = {"head", "kv_head", "d_mlp"}
"""The axes that tensor-parallel plans split."""


class Attached(ReadsText):
    """The points of one model, until `remove()` or the end of a `with`; see `attach`.

    It also turns texts into tokens and back, for the model has no names for that.

    Attributes:
        model: the model.
        left_out: the usual points that the model, or some block, does not have, by the last parts of their names, and why.
            Those of an encoder, a decoder or a tower begin with its name.
    """

    def __init__(self, model: nn.Module, examples: Sequence[Example], roles: Roles) -> None:
        self.model: Any = model
        self.left_out: dict[str, str] = {}
        before = [self._before(example) for example in examples]
        if before[0][1].is_meta or before[0][1].isnan().any():
            raise ValueError(f"logits must be numbers; got NaN or none from {type(model).__name__}")
        self._configs = own_configs(model)
        self._runs = base_of(model)
        self._forward = Forward(self._runs)
        try:
            probes = [self._probed(*each, is_second=n > 0) for n, each in enumerate(before)]
            stacks = self._stacks(probes, roles)
            self._runs.forward = self._forward
            if hasattr(self._runs, "generate"):
                self._runs.generate = Generate(self._runs)
            wirings = [self._put_points(stack) for stack in stacks]
            if len(probes) > 1 and len(stacks) > 1:
                self._put_features(probes[1], stacks, wirings)
            for module in model.modules():
                if isinstance(module, HookPoint | HookPoints | Blocks | Tower):
                    module.train(model.training)
            texts = AttachedTexts(model)
            self._forward.prepare = texts.prepare_inputs
            if stacks[0].texts is not None:
                texts = AttachedLanguage(model, stacks[0])
                self._forward.prepare = texts.with_positions
            vars(model).update(language_parts=texts, prepare_inputs=texts.prepare_inputs)
            self._join_shards(examples[0])
            for stack, wiring in zip(stacks, wirings, strict=True):
                Checks(model, wiring, stack)()
                found = missing(model, stack.layouts, stack.left_out, stack.prefix)
                for name, why in (stack.left_out | found).items():
                    self.left_out[stack.prefix + name] = why
        except BaseException:
            self.remove()
            raise

    def __repr__(self) -> str:
        left_out = f"; without {', '.join(self.left_out)}" if self.left_out else ""
        points = len(HookedRunner(self.model).points)
        return f"Attached({type(self.model).__name__}, {points} points{left_out})"

    def remove(self) -> None:
        """Takes everything out of the model again. A second call does nothing."""
        self._restore_configs()
        detach(self.model)

    @property
    def _tokenizer(self) -> Any:
        return self._language._tokenizer

    @_tokenizer.setter
    def _tokenizer(self, tokenizer: Any) -> None:
        self._language._tokenizer = tokenizer

    @property
    def _language(self) -> AttachedTexts:
        if (language := carried(self.model, "language_parts")) is None:
            raise ValueError("the model must be attached to read texts; its points were removed")
        return language

    def _text_device(self) -> torch.device | None:
        return self._language._text_device()

    def __enter__(self) -> "Attached":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _restore_configs(self) -> None:
        done = set[int]()
        for module, (config, before) in self._configs.items():
            if id(config) not in done:
                carry_changes(module.config, before, config)
            done.add(id(config))
            module.config = config
        self._configs = {}

    def _before(self, example: Example) -> tuple[Example, Tensor, list[str]]:
        """An example with its logits, and the functions that compute attention."""
        with Watching() as watching:
            reference = logits_alone(self.model, example)
        return example, reference, watching.functions

    def _probed(
        self, example: Example, reference: Tensor, functions: list[str], is_second: bool
    ) -> ProbeRun:
        """A probe whose logits, and functions that compute attention, are those of the model before."""
        # Attention of a text is seen in one way or the other; a tower or an encoder may have another than the text.
        watch = is_second or is_encoder_decoder(self.model)
        probe = probed(self.model, example, reference, watch)
        is_same_code = probe.functions == functions and is_same(probe.logits, reference.cpu())
        if not (probe.attention and is_same_code) and not is_second:
            self._restore_configs()
            probe = probed(self.model, example, reference, watch=True)
        return probe

    def _stacks(self, probes: Sequence[ProbeRun], roles: Roles) -> list[Stack]:
        """The stacks with the layouts of their blocks, and reasons why they may have no points of attention."""
        model, stacks = self.model, stacks_of(self.model, probes, roles.blocks)
        if is_encoder_decoder(model):
            for name in {"encoder", "decoder"} - {stack.name for stack in stacks}:
                self.left_out[name] = "its blocks do not run one on another"
        odd = [*{kernel_name(config) for config, _ in self._configs.values()} - {"eager", "sdpa"}]
        for stack in stacks:
            config, why = text_config(model), stack.left_out
            known = roles if stack.name in ("", "encoder", "decoder") else Roles()
            stack.layouts = [layout_of(call, stack.probe, known, config) for call in stack.chain]
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
                why |= layout.experts.missing if layout.experts else {}
            if any(weight.is_meta for weight in model.parameters()):
                why["scale"] = "some norms' weights are kept elsewhere until they run"
            if odd:
                kernels = "attn_implementation must be 'eager' or 'sdpa' for these"
                why["scores"] = why["pattern"] = f"{kernels}; got {odd[0]!r}"
        return stacks

    def _put_points(self, stack: Stack) -> Wiring:
        """Puts points where the layouts of a stack say."""
        model, forward = self.model, cast(StackForward, self._forward)
        root = stack.root(self._runs) if stack.name else model
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
            logits_alone(self.model, example)
        for name, group in groups.items():
            # Together, because parts that are zero are the same everywhere.
            if not all(is_whole(part, mesh) for _, _, part in group):
                for point, axis_at, part in group:
                    vars(point.module)["shards"] = Shards.of(part, axis_at, mesh)
            elif group[0][2].min() == group[0][2].max():
                raise ValueError(
                    f"{name} must have numbers that differ, to show whether {mesh.size()} processes hold parts of "
                    f"them; got only {float(group[0][2].min())}"
                )


def detach(model: nn.Module) -> None:
    """Takes all points out of a model, also out of a copy of an attached one. A model without points stays as it is.

    >>> import copy
    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from models import attach
    >>> sizes = GPT2Config(vocab_size=7, n_positions=9, n_embd=4, n_layer=1, n_head=2)
    >>> model = GPT2LMHeadModel(sizes).eval()
    >>> with attach(model):
    ...     copied = copy.deepcopy(model)
    >>> detach(copied)
    >>> hasattr(copied, "blocks")
    False
    """
    for config in configs_of(model).values():
        if config._attn_implementation != kernel_name(config):
            config._attn_implementation_internal = kernel_name(config)
    restore_methods(model)
    for owner in (model, *model.children()):
        for name, points in [*owner.named_children()]:
            is_point = name in TOP and isinstance(points, HookPoint | HookPoints | Blocks)
            if is_point or isinstance(points, Tower):
                delattr(owner, name)
    for name in ("language_parts", "prepare_inputs"):
        vars(model).pop(name, None)
    for module in model.modules():
        remove_hooks(module, lambda hook: isinstance(hook, Wire))
        vars(module).pop("hook_points", None)
