"""attach: puts hook points into a model of `transformers`, and takes them out again."""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hooks import ActivationCache, HookedRunner, HookPoint, HookPoints, Point
from hooks.shared import (
    Session,
    Shards,
    Wire,
    carried,
    is_whole,
    mesh_of,
    remove_hooks,
    without_gradients,
)
from models.attached.attention import AttentionPoints, register
from models.attached.checked import has_other_terms, problem_of
from models.attached.configs import (
    base_of,
    carry_changes,
    configs_of,
    kernel_name,
    own_configs,
    text_config,
)
from models.attached.experts import broken
from models.attached.forward import Forward, Generate
from models.attached.language import AttachedLanguage
from models.attached.layout import BlockLayout, block_calls, layout_of
from models.attached.points import MLP_OUT, TOP, Blocks, Wiring
from models.attached.probe import Call, ProbeRun, Watching, logits_of, probed, tokens_for
from models.attached.sums import HALF, agree, is_close, is_same, rolled
from models.attached.traced import TracedPoints
from models.attached.wiring import restore_methods
from models.mode import mode
from models.text.texts import ReadsText
from models.text.tokenizer import as_tokenizer

USUAL = (
    *("resid_pre", "ln1.scale", "ln1.normalized", "attn.q", "attn.k", "attn.v", "attn.scores", "attn.pattern", "attn.z"),
    *("attn_out", "resid_mid", "ln2.scale", "ln2.normalized", "mlp.pre", "mlp.post", "mlp_out", "resid_post"),
)  # fmt: skip
"""The points of a usual block, by the last parts of their names."""

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
            reference = _logits(model)
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
            self._check_traced()
            self._check_streams(layouts)
            self._check_mixers(layouts)
            self._check_experts(layouts)
            self._check_attention(reference)
            self._say_what_is_missing()
        except BaseException:
            self.remove()
            raise

    def __repr__(self) -> str:
        left_out = f"; without {', '.join(self.left_out)}" if self.left_out else ""
        points = len(HookedRunner(self.model).points)
        return f"Attached({type(self.model).__name__}, {points} points{left_out})"

    def _say_what_is_missing(self) -> None:
        """Notes each usual point that some block, or the model's end, is without."""
        points, n_blocks = HookedRunner(self.model).points, len(self.model.blocks)
        for name in USUAL:
            without = [n for n in range(n_blocks) if f"blocks.{n}.{name}" not in points]
            if without and not {name, *name.split(".")} & {*self.left_out}:
                where = (
                    "any block"
                    if len(without) == n_blocks
                    else f"block {', '.join(map(str, without))}"
                )
                mixed = all(hasattr(self.model.blocks[n], "mixer_out") for n in without)
                self.left_out[name] = (
                    f"{where} has another mixer of positions, mixer_out"
                    if mixed and name.startswith("attn")
                    else f"no module of {where} takes it in or gives it out"
                )
        if "ln_final.normalized" not in points:
            self.left_out["ln_final"] = "no norm of one module comes after the last block"

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
            _logits(self.model)
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

    def _check_traced(self) -> None:
        """Leaves out the points of attention by code of its own where they would not hold what they promise."""
        attention = {n: getattr(block, "attn", None) for n, block in enumerate(self.model.blocks)}
        traced = {n: points for n, points in attention.items() if isinstance(points, TracedPoints)}
        if not traced:
            return
        calls = self._calls([points.module for points in traced.values()])
        for n, points in traced.items():
            try:
                with torch.inference_mode(False):
                    problem = problem_of(points.module, *calls[points.module])
            except Exception as error:  # whatever another layout of its tensors leads to
                problem = str(error)
            if problem:
                self._wiring.drop_attention(self.model.blocks[n])
                self.left_out["attn"] = f"{type(points.module).__name__}: {problem}"

    def _calls(self, modules: Sequence[nn.Module]) -> dict[nn.Module, tuple[Any, Any]]:
        """The arguments of modules in a run of a few tokens."""
        calls: dict[nn.Module, tuple[Any, Any]] = {}
        with Session() as session, torch.inference_mode(False):
            for module in modules:
                session.before(module, partial(_note, calls, module))
            _logits(self.model)
        return calls

    def _check_streams(self, layouts: Sequence[BlockLayout]) -> None:
        """Leaves out `resid_mid` where the stream goes on from a copy, which an edit does not reach."""
        shared = [n for n, layout in enumerate(layouts) if layout.mid_in is not None]
        if not shared:
            return
        parts = ("resid_mid", "mlp_out", "resid_post")
        hooks = {f"blocks.{n}.resid_mid": rolled for n in shared}
        names = [f"blocks.{n}.{part}" for n in shared for part in parts]
        _, cache = self._run(names, hooks)
        for n in shared:
            mid, added, post = (cache[f"blocks.{n}.{part}"] for part in parts)
            if not is_close(mid + added, post, mid, added):
                self._wiring.drop(self.model.blocks[n], "resid_mid")
                self.left_out["resid_mid"] = "the stream goes on from a copy of it"

    def _check_mixers(self, layouts: Sequence[BlockLayout]) -> None:
        """Renames `mixer_out` where a position gets nothing from another: that is an MLP in a block of its own."""

        def first_changed(value: Tensor, point: object) -> Tensor:
            return torch.cat([value[:, :1].roll(1, -1), value[:, 1:]], 1)

        mixes: dict[type[nn.Module], bool] = {}
        for n, layout in enumerate(layouts):
            if layout.mixer_out is None:
                continue
            if (kind := type(layout.mixer_out.module)) not in mixes:  # runs each, so one of a kind
                name, hook = f"blocks.{n}.mixer_out", {f"blocks.{n}.resid_pre": first_changed}
                before, after = (self._run([name], hooks)[1][name] for hooks in ({}, hook))
                mixes[kind] = not is_same(before[:, 1:], after[:, 1:])
            if not mixes[kind]:
                block = self.model.blocks[n]
                block.mlp_out, layout.mlp_out = block.mixer_out, layout.mixer_out
                block.mlp_out.meaning, layout.mixer_out = MLP_OUT, None
                del block.mixer_out

    def _check_experts(self, layouts: Sequence[BlockLayout]) -> None:
        """Leaves out points of experts whose values do not add up, or whose edits do not act."""
        mixtures = {n: layout.experts for n, layout in enumerate(layouts) if layout.experts}
        for n, name, why in broken(mixtures, self._run, self._calls) if mixtures else ():
            self._wiring.drop(self.model.blocks[n].mlp, name)
            self.left_out[f"mlp.{name}"] = why

    def _check_attention(self, reference: Tensor) -> None:
        """Leaves out `scores` and `pattern` where attention has terms that `AttentionPoints` lacks.

        Raises:
            ValueError: if the logits differ without these points too.
        """
        attention = [p for p in self.model.modules() if isinstance(p, AttentionPoints)]
        attention = [points for points in attention if hasattr(points, "scores")]
        calls = self._calls([points.module for points in attention])
        has_others = {points: _has_other_terms(points, calls) for points in attention}
        wrong = [points for points in attention if has_others[points]]
        is_decided = reference.dtype in HALF and None not in has_others.values()
        if not (is_decided or wrong or agree(self._run()[0], reference, 1e-3)):
            wrong = attention
        for points in wrong:
            self._wiring.drop(points, "scores")
            self._wiring.drop(points, "pattern")
            self.left_out["scores"] = self.left_out["pattern"] = "attention has terms of its own"
        others = [*HookedRunner(self.model).points]
        others = [name for name in others if not name.endswith(("scores", "pattern"))]
        if not agree(self._run(others)[0], reference, 1e-3):
            raise ValueError(
                f"hooks must not change the logits; got others from {type(self.model).__name__}"
            )

    @without_gradients
    def _run(
        self, names: Sequence[str] | None = None, hooks: Any = ()
    ) -> tuple[Tensor, ActivationCache]:
        """The logits of a cached run of a few tokens, under hooks."""
        runner = HookedRunner(self.model)
        with mode(self.model, training=False), runner.hooks(hooks):
            tokens = tokens_for(self.model)
            output, cache = runner.run_with_cache(input_ids=tokens, use_cache=False, names=names)
        return logits_of(output), cache


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


@without_gradients
def _logits(model: nn.Module) -> Tensor:
    tokens = tokens_for(model)
    with mode(model, training=False):
        try:
            output = model(input_ids=tokens, use_cache=False)
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"the model must run on input_ids {[*tokens.shape]} alone; {type(model).__name__} raised {got}"
            ) from error
    return logits_of(output)


def _note(calls: dict[nn.Module, Any], module: nn.Module, args: Any, kwargs: Any) -> None:
    calls[module] = args, kwargs


def _has_other_terms(points: AttentionPoints, calls: Any) -> bool | None:
    """See `has_other_terms`; None for a module that cannot be copied, or did not run."""
    try:
        return has_other_terms(points.module, *calls[points.module])
    except Exception:  # weights of a kind that is no number, for instance
        return None
