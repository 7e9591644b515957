"""Lazy values: keep what entered each block, and run a block again when a value inside is asked for."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from hooks.capture import CaptureOptions, Recorder
from hooks.errors import CacheError, HookError
from hooks.point import Point
from hooks.session import Session, is_ours, muted

Edits = list[tuple[nn.Module, Callable[[Any], Any]]]


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: containers such as ModuleList cannot."""
    return type(module).forward is not nn.Module.forward


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules in the model's outermost `ModuleList`s, by name, and in containers inside those."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and block_of(name, found) is None:
            found |= _called(module, f"{name}." if name else "")
    return found


def _called(container: nn.Module, prefix: str) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, child in container.named_children():
        inner = {} if has_forward(child) else _called(child, f"{prefix}{name}.")
        found |= {f"{prefix}{name}": child} if has_forward(child) else inner
    return found


def block_of(name: str, blocks: Iterable[str]) -> str | None:
    """The block among `blocks` that `name` lies in."""
    return next((block for block in blocks if f"{name}.".startswith(f"{block}.")), None)


def divided(
    points: Mapping[str, Point], blocks: Mapping[str, nn.Module]
) -> "tuple[list[LazyBlock], dict[str, Point]]":
    """The blocks that points lie in, each with its own, and the points outside all blocks.

    Raises:
        HookError: if there are no blocks.
    """
    if not blocks:
        raise HookError(
            "lazy=True needs blocks, children of an nn.ModuleList, and this model has none"
        )
    inside: dict[str, dict[str, Point]] = {}
    outside: dict[str, Point] = {}
    for name, point in points.items():
        block = block_of(name, blocks)
        (outside if block is None else inside.setdefault(block, {}))[name] = point
    return [LazyBlock(name, blocks[name], chosen) for name, chosen in inside.items()], outside


class LazyBlock:
    """What one block needs to run again: its arguments, and what would tell that it changed since."""

    def __init__(self, name: str, block: nn.Module, points: Mapping[str, Point]) -> None:
        self.name = name
        self.points = points
        self.fired = False
        self.block = block

    def remember(self, args: Any, kwargs: Any) -> None:
        """Keeps the arguments that the block is called with; a pre-hook."""
        if self.fired:
            raise HookError(
                f"{self.name} ran twice in one run; a lazy cache keeps one input a block"
            )
        for leaf in tree_leaves((args, kwargs)):
            if not isinstance(leaf, (Tensor, bool, int, float, str, torch.dtype, type(None))):
                raise HookError(
                    f"{self.name} was given a {type(leaf).__name__}, which running it again could "
                    "change; switch it off (use_cache=False, for instance) or cache without lazy=True"
                )
        self.fired = True
        self._inputs = tree_map(_held, (args, kwargs))
        self._state, self._numbers = self._fingerprint(), self._sample()
        self._autocast = _autocast(self.tensors())

    def tensors(self) -> list[Tensor]:
        """The stored arguments."""
        return [leaf for leaf in tree_leaves(self._inputs) if isinstance(leaf, Tensor)]

    def run(self, points: Mapping[str, Point], edits: Edits, options: CaptureOptions) -> Recorder:
        """Runs the block on its stored arguments, under the edits of the first run.

        Args:
            points: those of the block's points to record.
            edits: what acted in the first run, anywhere in the model.
            options: how to keep values.

        Raises:
            CacheError: if the block, its weights or its stored input changed since.
        """
        if self._fingerprint() != self._state or not _same(self._sample(), self._numbers):
            raise CacheError(
                f"{self.name} changed after the run (its weights, mode, hooks or stored input), so "
                "running it again would give other values; read a lazy cache before changing the model"
            )
        recorder = Recorder(points, options)
        # A mapping made anew, as the block may write into its containers.
        args, kwargs = tree_map(lambda leaf: leaf, self._inputs)
        inside = dict(self.block.named_modules(prefix=self.name, remove_duplicate=False))
        modules = set(inside.values())
        with muted(), Session() as session, torch.no_grad(), self._autocast():
            for module, edit in edits:
                if module in modules:
                    session.after(module, edit)
            for name, point in points.items():
                session.after(inside[name], recorder.hook(point))
            self.block(*args, **kwargs)
        recorder.finish()
        return recorder

    def _weights(self) -> Iterator[Tensor]:
        return itertools.chain(self.block.parameters(), self.block.buffers())

    def _sample(self) -> list[Tensor]:
        # Fused optimizers move no version. Of edits through `.data`, which do not either, a sample
        # sees those of a whole matrix.
        return [_sampled(weight.detach()) for weight in self._weights()]

    def _fingerprint(self) -> list[object]:
        state: list[object] = [
            (id(w), w.dtype, w.device, w.data_ptr(), _version(w)) for w in self._weights()
        ]
        state += map(_version, self.tensors())
        for module in self.block.modules():
            hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            state.append((module.training, [id(hook) for hook in hooks if not is_ours(hook)]))
        return state


class LazyValues(Mapping[str, Tensor]):
    """Values of a lazy run: some kept from the run, the rest recomputed a block at a time.

    Asking for one value recomputes every value of its block that the run was asked for, and keeps
    them until they are dropped. A copy, deep or pickled, is a plain dict of them all.
    """

    def __init__(
        self,
        names: Iterable[str],
        kept: Recorder,
        blocks: list[LazyBlock],
        edits: Edits,
    ) -> None:
        self._names = list(names)
        self._kept = kept.values
        self._options = kept.options
        self.blocks = blocks
        self._origin = {
            name: (block, point)
            for block in blocks
            for point in block.points.values()
            for name in kept.options.kept_as(point)
        }
        self._edits = edits
        self._recomputed: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if not self.is_held(name):
            block, _ = self._origin[name]
            self.fill(other for other, (owner, _) in self._origin.items() if owner is block)
        return self._kept[name] if name in self._kept else self._recomputed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._kept or name in self._origin

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def is_held(self, name: str) -> bool:
        """Whether the value is in memory, so that asking for it computes nothing."""
        return name in self._kept or name in self._recomputed

    def fill(self, names: Iterable[str]) -> None:
        """Recomputes those of `names` that are not here yet, and no others of their blocks."""
        missing = [self._origin[name] for name in names if not self.is_held(name)]
        for block, group in itertools.groupby(missing, key=lambda origin: origin[0]):
            points = {point.name: point for _, point in group}
            self._recomputed |= block.run(points, self._edits, self._options).values

    def drop(self) -> None:
        """Forgets what was recomputed."""
        self._recomputed.clear()

    def held(self) -> list[Tensor]:
        """Every tensor in memory: what the run kept, stored block inputs, recomputed values."""
        inputs = [tensor for block in self.blocks for tensor in block.tensors()]
        return [*self._kept.values(), *inputs, *self._recomputed.values()]


def _held(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    # Inference tensors do not tell when they are overwritten.
    return leaf.clone() if leaf.is_inference() else leaf.detach()


def _sampled(line: Tensor) -> Tensor:
    """Numbers of up to 128 rows and columns."""
    while line.ndim > 1:
        line = line.diagonal()
    return line[:: max(1, len(line) // 64)].clone() if line.ndim else line.clone()


def _same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    # Bit by bit: what is no number is the same too. A plan's tensors have none.
    return all(
        a.is_meta
        or isinstance(a, FakeTensor)
        or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(ours, theirs, strict=True)
    )


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _autocast(tensors: list[Tensor]) -> Callable[[], AbstractContextManager[object]]:
    device = tensors[0].device.type if tensors else "cpu"
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype, enabled=enabled)
