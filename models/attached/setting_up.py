"""The set-up of an attached model: its stacks of blocks are found, their points are put in and checked.

1. Run each example on the model as it is, and again with every call recorded (`probe`).
2. Find the stacks of blocks (`stacks`) and the parts of each block (`layout`).
3. Put points there, and hooks that pass values through them (`points`).
4. Check what each point promises (`promises`). What does not hold it is taken out again, with a reason.
"""

from collections.abc import Sequence
from functools import partial
from typing import cast

from torch import Tensor

from hooks import HookedRunner, HookPoint, HookPoints, Point
from hooks.shared import Session, Shards, is_whole, mesh_of
from models.attached.attached import Attached
from models.attached.attention import AttentionPoints
from models.attached.configs import text_config
from models.attached.example import Example, is_encoder_decoder
from models.attached.forward import Forward, Generate, StackForward
from models.attached.layout import layout_of
from models.attached.missing import missing
from models.attached.points import Blocks, Wiring
from models.attached.probe import Alone, ProbeRun, probed, seen_alone
from models.attached.promises import Checks
from models.attached.roles import Roles
from models.attached.stacks import OwnPart, Stack, Tower, features, stacks_of

SPLIT_AXES = {"head", "kv_head", "d_mlp"}
"""The axes that tensor-parallel plans split."""


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
            raise ValueError(f"logits must be numbers; got NaN or none from {type(model).__name__}")
        attached.own_configs()
        self._forward = Forward(base)
        probes = [self._probed(run, is_second=n > 0) for n, run in enumerate(before)]
        stacks = self._stacks(probes)
        base.forward = self._forward
        if hasattr(base, "generate"):
            base.generate = Generate(base)
        wirings = [self._put_points(stack) for stack in stacks]
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
            Checks(model, wiring, stack)()
            reasons = missing(model, stack.layouts, stack.left_out, stack.prefix)
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
                raise ValueError(
                    f"{name} must have numbers that differ, to show whether {mesh.size()} processes hold parts of "
                    f"them; got only {float(group[0][2].min())}"
                )
