"""attach: puts hook points into a model of `transformers`, and takes them out again."""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hooks import HookedRunner, HookPoint, HookPoints, Point
from hooks.shared import (
    Session,
    Shards,
    Wire,
    carried,
    is_whole,
    mesh_of,
    remove_hooks,
)
from models.attached.attention import AttentionPoints, register
from models.attached.configs import (
    base_of,
    carry_changes,
    configs_of,
    kernel_name,
    own_configs,
    text_config,
)
from models.attached.forward import Forward, Generate
from models.attached.language import AttachedLanguage
from models.attached.layout import BlockLayout, block_calls, layout_of
from models.attached.missing import missing
from models.attached.points import TOP, Blocks, Wiring
from models.attached.probe import Call, ProbeRun, Watching, probed
from models.attached.promises import Checks, logits_alone
from models.attached.sums import is_same
from models.attached.wiring import restore_methods
from models.text.texts import ReadsText
from models.text.tokenizer import as_tokenizer

SPLIT_AXES = {"head", "kv_head", "d_mlp"}
"""The axes that tensor-parallel plans split."""


class Attached(ReadsText):
    """The points of one model, until `remove()` or the end of a `with`; see `attach`.

    It also turns texts into tokens and back, for the model has no names for that.

    Attributes:
        model: the model.
        left_out: the usual points that the model, or some block, does not have, by the last parts of their names, and why.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.left_out: dict[str, str] = {}
        self._wiring = Wiring(model)
        with Watching() as watching:
            reference = logits_alone(model)
        if reference.is_meta or reference.isnan().any():
            raise ValueError(f"logits must be numbers; got NaN or none from {type(model).__name__}")
        self._configs = own_configs(model)
        self._runs = base_of(model)
        self._forward = Forward(self._runs)
        try:
            probe = self._probed(reference, watching.functions)
            chain = block_calls(probe, model)
            self._runs.forward = self._forward
            if hasattr(self._runs, "generate"):
                self._runs.generate = Generate(self._runs)
            layouts = [layout_of(call, probe, text_config(model)) for call in chain]
            self._put_points(probe, chain, layouts)
            language = AttachedLanguage(model, probe, chain, layouts)
            vars(model).update(language_parts=language, prepare_inputs=language.prepare_inputs)
            self._forward.prepare = language.with_positions
            self._join_shards()
            Checks(model, self._wiring, self.left_out)(layouts, reference)
            self.left_out |= missing(model, layouts, self.left_out)
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
    def _language(self) -> AttachedLanguage:
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

    def _probed(self, reference: Tensor, functions: list[str]) -> ProbeRun:
        """A probe whose logits, and functions that compute attention, are those of the model before."""
        probe = probed(self.model)
        is_same_code = probe.functions == functions and is_same(probe.logits, reference.cpu())
        if not (probe.attention and is_same_code):
            self._restore_configs()
            probe = probed(self.model, watch=True)
        if not probe.attention:
            what = "has no attention, or computes it in a way that is not recognised"
            self.left_out["attn"] = f"{type(self.model).__name__} {what}"
        return probe

    def _put_points(
        self, probe: ProbeRun, chain: Sequence[Call], layouts: Sequence[BlockLayout]
    ) -> None:
        """Puts points where the layouts say, and notes which ones cannot be there."""
        model = self.model
        self._forward.embedded = self._wiring.embeddings(probe, chain[0])
        model.blocks = Blocks(map(self._wiring.block, layouts))
        self._wiring.final_norm(probe, chain[-1])
        self._forward.places = self._wiring.places()
        for layout in layouts:
            self.left_out |= layout.experts.missing if layout.experts else {}
        if any(weight.is_meta for weight in model.parameters()):
            self.left_out["scale"] = "some norms' weights are kept elsewhere until they run"
        for name in TOP:
            if hasattr(model, name):
                getattr(model, name).train(model.training)
        for points in model.modules():
            if isinstance(points, AttentionPoints):
                points.is_lent = points.module in probe.sharing
        names = {kernel_name(config) for config, _ in self._configs.values()}
        if odd := [*names - {"eager", "sdpa"}]:
            why = f"attn_implementation must be 'eager' or 'sdpa' for these; got {odd[0]!r}"
            self.left_out["scores"] = self.left_out["pattern"] = why

    def _join_shards(self) -> None:
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
            logits_alone(self.model)
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


def attach(model: nn.Module, *, tokenizer: Any = None) -> Attached:
    """Puts hook points into a model of `transformers`, under the names of `models.Transformer`.

    `HookedRunner(model)` and the analyses of `interp` then work as on a plain transformer. Weights, state
    dict and outputs stay as they are. Where the points belong is found from a run on fourteen tokens and
    checked by a few more, so no architecture needs to be known. Attention by code of its own gets points if it
    is two products with a softmax between, or PyTorch's fused function. A point is left out where the model does not
    show its value, or where an edit of it could not take effect.

    A model that a tensor-parallel plan splits over processes is attached, run and edited by all of them alike; points
    hold the heads and neurons of all.

    Args:
        model: a model that reads `input_ids`; its blocks are in a `ModuleList`.
        tokenizer: its tokenizer, such as one of `transformers`. With it the model also reads strings.

    Raises:
        ImportError: if `transformers` is not installed, or older than 5.6.
        TypeError: if the model has no config of `transformers`, or the tokenizer is none.
        ValueError: if the model is attached already, has other modules under our names, or no blocks, reads
            two sequences, gives NaN, or is split over processes and has a part that is all zeros.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = GPT2Config(vocab_size=7, n_positions=9, n_embd=4, n_layer=1, n_head=2)
    >>> model = GPT2LMHeadModel(sizes).eval()
    >>> attach(model)
    Attached(GPT2LMHeadModel, 21 points)
    >>> _, cache = HookedRunner(model).run_with_cache(torch.tensor([[3, 1, 4]]))
    >>> cache["pattern", 0].shape
    torch.Size([1, 2, 3, 3])
    """
    what = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise TypeError("attach must come before torch.compile; got a compiled model")
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "is_encoder_decoder"):
        raise TypeError(f"attach needs a model of transformers, with its config; got a {what}")
    if config.is_encoder_decoder:
        raise ValueError(f"the model must have an encoder or a decoder, not both; got {what}")
    reads = {getattr(model, "main_input_name", "input_ids"), *_parameters(model)}
    if "input_ids" not in reads:
        raise ValueError(f"attach needs a model that reads input_ids; got {what}")
    weights = [*model.parameters()]
    if all(weight.is_meta for weight in weights) and not hasattr(model, "_hf_hook"):
        raise ValueError(f"attach runs the model, so it must have weights; got {what} on meta")
    if any("hook_points" in vars(module) for module in model.modules()):
        raise ValueError("no part of the model must be attached already: detach(model) first")
    if taken := [name for name in TOP if hasattr(model, name)]:
        raise ValueError(f"{', '.join(TOP)} must be free for points; the model has {taken[0]}")
    reader = as_tokenizer(tokenizer)
    register({kernel_name(config) for config in configs_of(model).values()})
    attached = Attached(model)
    attached.tokenizer = reader
    return attached


def _parameters(model: Any) -> list[str]:
    return [*inspect.signature(base_of(model).forward).parameters]


def detach(model: nn.Module) -> None:
    """Takes all points out of a model, also out of a copy of an attached one. A model without points stays as it is.

    >>> import copy
    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
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
    for name in TOP:
        if isinstance(getattr(model, name, None), HookPoint | HookPoints | Blocks):
            delattr(model, name)
    for name in ("language_parts", "prepare_inputs"):
        vars(model).pop(name, None)
    for module in model.modules():
        remove_hooks(module, lambda hook: isinstance(hook, Wire))
        vars(module).pop("hook_points", None)
