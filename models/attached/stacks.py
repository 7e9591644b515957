"""The stacks of blocks that a run goes through: that of the text, encoders, and towers for images and sounds.

1. A stack is a `ModuleList` outside all others whose modules run once each, every one on what the last one gave; or the
   modules that a user names (`stacks_in`).
2. The blocks that read a position for each token have points without a prefix. An encoder and its decoder have `encoder.`
   and `decoder.`, towers `vision.` or `audio.`, after the path of their module (`named`).
3. The points of a stack with a prefix are in a `Tower`, or in the model's own module of that name.
4. A tower's features are put into the stream of the text: `merged` is that stream, and `projected` what the tower gives for it
   (`features`).
"""

import fnmatch
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hooks.shared import OptionalPoints
from models.attached.example import Example, is_encoder_decoder, is_text
from models.attached.layout import BlockLayout
from models.attached.probe import SHAPE, Call, ProbeRun
from models.attached.sums import is_same
from models.attached.wiring import Replaced

TOWERS = ("encoder", "decoder", "vision", "audio")
"""The prefixes of points that are not those of the text's blocks. Further ones have numbers, such as `vision_2`."""


@dataclass(eq=False)
class Stack:
    """A stack of blocks.

    Attributes:
        name: the prefix of its points; empty for the blocks of the text.
        chain: the calls of its blocks.
        probe: the run in which they were called, with rows and positions apart.
        example: the arguments of that run.
        layouts: the parts of its blocks.
        left_out: the usual points that it does not have, and why.
    """

    name: str
    chain: Sequence[Call]
    probe: ProbeRun
    example: Example
    layouts: list[BlockLayout] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """What the names of its points begin with."""
        return f"{self.name}." if self.name else ""

    def root(self, model: nn.Module) -> nn.Module:
        """The innermost module that runs all its blocks."""
        around = _around(self.probe, self.chain)
        return around[-1].module if around else model

    def owner(self, model: Any) -> Any:
        """The module that holds its points."""
        if not self.name:
            return model
        if not hasattr(model, self.name):
            setattr(model, self.name, Tower(self.root(model)))
        return getattr(model, self.name)


class Tower(OptionalPoints):
    """The points of a stack beside that of the text.

    Args:
        root: the module that runs its blocks. It is no child.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        vars(self)["root"] = root

    @property
    def main_input_name(self) -> str:
        """The name of the argument that an encoder reads, which a generation asks the model's `encoder` for."""
        return str(getattr(vars(self)["root"], "main_input_name", "input_ids"))


class OwnPart(Replaced):
    """A model's `get_encoder` or `get_decoder`, which looks for the name that a `Tower` has."""

    def __init__(self, model: Any, name: str) -> None:
        super().__init__(model, name)
        self.part = self.inner()

    def __call__(self, modality: Any = None) -> Any:
        """The model's own module."""
        return self.part if modality is None else self.inner(modality=modality)


def stacks_in(
    probe: ProbeRun, model: nn.Module, blocks: str | None = None
) -> list[tuple[list[Call], ProbeRun]]:
    """The calls of the blocks of each stack, the largest first, and the run as that stack sees it.

    They are those with attention, if any have some; otherwise the largest that ran.

    Args:
        probe: the run.
        model: the model.
        blocks: the names of the blocks, a glob; None to look for them.

    Raises:
        ValueError: if there is no stack.
    """
    lists = [_named(model, blocks)] if blocks else _outermost(model)
    ran_once = {call.module for call in probe.calls}
    ran = [blocks for blocks in lists if any(block in ran_once for block in blocks)]
    ran.sort(key=_size, reverse=True)
    attend = [each for each in ran if any(probe.attention[m] for b in each for m in b.modules())]
    stacks, problem = [], "has none"
    for each in attend or ran[:1]:
        raw = [call for call in probe.calls if call.module in {*each}]
        first = next((call.inputs[0] for call in raw if call.inputs), torch.empty(0))
        apart = probe.apart(_shape(first))
        calls = {call.module: call for call in apart.calls}
        chain = [calls[block] for block in each if block in calls]
        if why := _problem(chain, {sum(call.module is block for call in raw) for block in each}):
            problem = f"has some that {why}"
        else:
            stacks.append((chain, apart))
    if not stacks:
        raise ValueError(
            "the model must have a ModuleList of blocks that run once each, in order, on a stream [batch, pos, d_model]; "
            f"{type(model).__name__} {problem}"
        )
    return stacks


def named(
    stacks: Sequence[tuple[list[Call], ProbeRun]], model: Any, example: Example, has_text: bool
) -> list[Stack]:
    """Stacks with the names of their points.

    Args:
        stacks: those of one run.
        model: the model.
        example: the run's arguments.
        has_text: whether the blocks of the text are known already, and not among these.
    """
    if is_encoder_decoder(model):
        names: list[str] = ["encoder", "decoder"]
        stacks = sorted(stacks, key=lambda stack: stack[0][0].began)
    else:
        stacks = sorted(stacks, key=lambda stack: stack[0][0].began)
        texts = [n for n, (chain, _) in enumerate(stacks) if is_text(example, chain[0].inputs[0])]
        main = texts[-1:] or ([0] if len(stacks) == 1 else [])
        names = [
            "" if n in main and not has_text else _modality(chain[0].name)
            for n, (chain, _) in enumerate(stacks)
        ]
    taken: dict[str, Stack] = {}
    for name, (chain, probe) in zip(names, stacks, strict=False):
        number = 1 + sum(re.fullmatch(rf"{name}(_\d+)?", other) is not None for other in taken)
        name = name if number == 1 else f"{name}_{number}"
        taken[name] = Stack(name, chain, probe, example)
    return [*taken.values()]


@dataclass(frozen=True, eq=False)
class Features:
    """The features of a tower in the stream of the text.

    Attributes:
        merged: the module that reads the stream with the features in it.
        projected: by the names of towers, the module that gives their features.
    """

    merged: nn.Module
    projected: dict[str, nn.Module]


def features(
    model: Any, probe: ProbeRun, text: Sequence[Call], towers: Sequence[Stack]
) -> Features | None:
    """The place where towers' features are put into the stream of the text; None if it is not found.

    Args:
        model: the model.
        probe: a run with features.
        text: the calls of the text's blocks in it.
        towers: the stacks beside.
    """
    calls = {call.module: call for call in probe.calls}
    tokens = calls.get(model.get_input_embeddings())
    stream = text[0].inputs[0]
    for call in _around(probe, text):
        merged = next((x for x in call.inputs if x.shape == stream.shape), None)
        if merged is None or tokens is None or tokens.output is None:
            continue
        ended = max((tower.chain[-1].ended for tower in towers), default=-1)
        after = [c for c in probe.calls if c.began > ended and c.ended < call.began]
        put = merged[(merged != tokens.output).any(-1)]
        projected = {}
        for tower in towers:
            last = [c for c in after if c.output is not None and c.output.numel() == put.numel()]
            same = [c for c in last if is_same(c.output.reshape(put.shape), put)]  # type: ignore[union-attr]
            if same:
                projected[tower.name] = same[-1].module
        return Features(call.module, projected)
    return None


def _around(probe: ProbeRun, chain: Sequence[Call]) -> list[Call]:
    """The calls of modules that run all of a stack, from the outermost on."""
    first, last = chain[0], chain[-1]
    return [call for call in probe.calls if call.began < first.began and call.ended > last.ended]


def _modality(path: str) -> str:
    is_sound = re.search(r"audio|speech|sound", path)
    return "audio" if is_sound else "vision"


def _outermost(model: nn.Module) -> list[list[nn.Module]]:
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    inside = {n for n in lists for outer in lists if n.startswith(f"{outer}.")}
    return [[*blocks] for n, blocks in lists.items() if n not in inside]


def _named(model: nn.Module, blocks: str) -> list[nn.Module]:
    chosen = [m for n, m in model.named_modules() if fnmatch.fnmatchcase(n, blocks)]
    if not chosen:
        names = ", ".join(name for name, _ in model.named_children())
        raise ValueError(
            f"blocks must be the names of modules, such as 'layers.*'; {blocks!r} matches none (the model has {names})"
        )
    depth = blocks.count(".")
    return [m for n, m in model.named_modules() if m in {*chosen} and n.count(".") == depth]


def _size(blocks: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())


def _shape(stream: Tensor) -> tuple[int, int]:
    """The rows and positions of a stream, which may share an axis."""
    if stream.ndim == 2:
        return SHAPE if len(stream) == SHAPE[0] * SHAPE[1] else (1, len(stream))
    return (stream.shape[0], stream.shape[1]) if stream.ndim > 1 else SHAPE


def _problem(chain: Sequence[Call], times: set[int]) -> str | None:
    """The reason why calls are no chain of blocks, which ran so many times; None if they are one."""
    if times != {1}:
        return f"run {' or '.join(map(str, sorted(times)))} times"
    for call in chain:
        if not call.inputs or call.output is None or call.output.ndim != 3:
            if call.output is None:
                return "give no tensor"
            several = " (several streams)" if call.output.ndim == 4 else ""
            return f"give {[*call.output.shape]}{several}"
    if any(not is_same(one.output, two.inputs[0]) for one, two in itertools.pairwise(chain)):
        return "do not read what the last one gave"
    return None
