"""Replay: runs one block again on stored arguments. Lazy caches compute their values this way."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import accumulate, groupby, zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from hooks._torch import FakeTensor, state_of, tree_flatten, tree_unflatten, version
from hooks.capture import Options, Recorder
from hooks.errors import CacheError, HookError
from hooks.point import Point, tensors_in
from hooks.session import Edits, Session, muted


def replay(
    block: nn.Module, args: Any, kwargs: Any, edits: Edits, recorder: Recorder | None = None
) -> Any:
    """Runs one block again on the given arguments and returns its output.

    Open hook contexts do not act. Hooks that the user registered on the block do. Gradient mode and
    autocast stay as the caller set them.

    Args:
        block: the module to run.
        args, kwargs: the block's arguments.
        edits: modules, each with a function of its output. Modules outside the block are ignored.
        recorder: records its points. All must be inside the block.

    >>> block = nn.Sequential(nn.ReLU(), nn.Tanhshrink())
    >>> replay(block, (torch.tensor([-1.0, 2.0]),), {}, [(block[1], lambda output: output * 0)])
    tensor([0., 0.])
    """
    inside = set(block.modules())
    with muted(), Session() as session:
        for module, edit in edits:
            if module in inside:
                session.after(module, edit)
        if recorder is not None:
            for point in recorder.points.values():
                session.after(point.module, recorder.hook(point))
        return block(*args, **kwargs)


class BlockCall:
    """One call of a block: its arguments, and enough to detect later changes of the block.

    Args:
        name: the block's name.
        block: the module.
        points: the block's points that were asked for.
    """

    def __init__(self, name: str, block: nn.Module, points: Mapping[str, Point]) -> None:
        self.name = name
        self.block = block
        self.points = points
        self.fired = self.repeated = False
        self._given: list[Tensor] = []

    def listen(self, session: Session) -> None:
        """Stores the block's next call, through hooks of the session."""
        session.before(self.block, self._store)
        session.after(self.block, self._sample)

    def _store(self, args: Any, kwargs: Any) -> None:
        if self.fired:
            self.repeated = True
            return
        leaves, self._structure = tree_flatten((args, kwargs))
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, bool, int, float, str, torch.dtype, type(None))):
                raise HookError(
                    f"lazy=True needs plain arguments, and {self.name} got a {type(leaf).__name__}: "
                    "switch it off (use_cache=False, for instance) or use lazy=False"
                )
        self.fired = True
        self._leaves = [_held(leaf) for leaf in leaves]
        self._state = self._fingerprint()
        self._autocast, self._precision = _numerics(self._inputs())

    def _sample(self, output: Any) -> None:
        self._given = _sampled(output)

    def tensors(self) -> list[Tensor]:
        """The tensors kept of this call: its arguments and a sample of its output."""
        return self._inputs() + self._given

    def _inputs(self) -> list[Tensor]:
        return [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]

    @torch.no_grad()
    def read(self, points: Mapping[str, Point], edits: Edits, options: Options) -> Recorder:
        """Runs the block on its stored arguments, under the edits of the first run.

        Args:
            points: the block's points to record.
            edits: the edits of the first run, anywhere in the model.
            options: how to keep values.

        Raises:
            CacheError: if the block, its weights or its stored input changed since, or if its output
                differs from that of the first run.
        """
        if self._fingerprint() != self._state:
            raise self._changed("its weights or its stored input")
        recorder = Recorder(points, options)
        given = self._replayed(edits, recorder)
        if not _agree(self._given, given, self._precision) and not (
            # Hooks may cause other kernels to run. If those round more, compare without hooks; but
            # what was recorded must then be the same twice.
            _agree(given, self._replayed(edits, Recorder(points, options)), 0.0)
            and _agree(self._given, self._replayed(edits), self._precision)
        ):
            raise self._changed(
                "an attribute, a hook, an adapter, or an edit that is not the same twice"
            )
        recorder.finish()
        return recorder

    def _changed(self, what: str) -> CacheError:
        return CacheError(
            f"{self.name} changed after the run ({what}), so running it again would give other values; "
            "read a lazy cache before changing the model"
        )

    def _fingerprint(self) -> list[object]:
        weights = [(id(w), w.data_ptr(), version(w)) for w in state_of(self.block)]
        return [*weights, *map(version, self._inputs())]

    def _replayed(self, edits: Edits, recorder: Recorder | None = None) -> list[Tensor]:
        """A sample of what the block gives now."""
        # New containers, because the block may write into them.
        args, kwargs = tree_unflatten(self._leaves, self._structure)
        with self._autocast():
            return _sampled(replay(self.block, args, kwargs, edits, recorder))


class LazyValues(Mapping[str, Tensor]):
    """Values of a lazy run: some kept from the run, the rest recomputed one block at a time.

    Reading one value recomputes all requested values of its block, and keeps them until `drop`.
    A deep copy or a pickle is a plain dict of all values.
    """

    def __init__(self, kept: Recorder, calls: list[BlockCall], edits: Edits) -> None:
        self._names = list(kept.axes)
        self._kept = kept.values
        self._options = kept.options
        self._calls = calls
        self._edits = edits
        self._recomputed: dict[str, Tensor] = {}
        self._origin = {
            name: (call, point)
            for call in calls
            for point in call.points.values()
            for name in kept.options.kept_as(point)
            if name in kept.axes
        }

    def __getitem__(self, name: str) -> Tensor:
        if not self.is_held(name):
            call, _ = self._origin[name]
            self.fill(other for other, (owner, _) in self._origin.items() if owner is call)
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
        """Whether the value is in memory."""
        return name in self._kept or name in self._recomputed

    def fill(self, names: Iterable[str]) -> None:
        """Recomputes the values of `names` that are not in memory, and nothing else."""
        missing = [self._origin[name] for name in names if not self.is_held(name)]
        for call, group in groupby(missing, key=lambda origin: origin[0]):
            points = {point.name: point for _, point in group}
            self._recomputed |= call.read(points, self._edits, self._options).values

    def drop(self) -> None:
        """Frees the recomputed values."""
        self._recomputed.clear()

    def held(self) -> list[Tensor]:
        """Every tensor in memory: kept values, stored calls and recomputed values."""
        stored = [tensor for call in self._calls for tensor in call.tensors()]
        return [*self._kept.values(), *stored, *self._recomputed.values()]


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called. Containers such as ModuleList cannot."""
    return type(module).forward is not nn.Module.forward


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The callable modules in the model's outermost `ModuleList`s and their containers, by name."""
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


def block_of(name: str, blocks: Container[str]) -> str | None:
    """The block among `blocks` that contains `name`, or None."""
    return next(
        (path for path in accumulate(name.split("."), "{}.{}".format) if path in blocks), None
    )


def divided(
    points: Mapping[str, Point], blocks: Mapping[str, nn.Module]
) -> tuple[list[BlockCall], dict[str, Point]]:
    """One `BlockCall` for each block that has points, and the points outside all blocks.

    Raises:
        HookError: if there are no blocks.
    """
    if not blocks:
        raise HookError(
            "lazy=True needs blocks (children of an nn.ModuleList); this model has none"
        )
    inside: dict[str, dict[str, Point]] = {}
    outside: dict[str, Point] = {}
    for name, point in points.items():
        block = block_of(name, blocks)
        (outside if block is None else inside.setdefault(block, {}))[name] = point
    return [BlockCall(name, blocks[name], chosen) for name, chosen in inside.items()], outside


def _held(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    # Inference tensors do not record in-place writes.
    return leaf.clone() if leaf.is_inference() else leaf.detach()


def _sampled(output: Any) -> list[Tensor]:
    """One number from each row of the output's tensors; the column moves by one from row to row."""
    rows = [(tensor, tensor.shape[-1] if tensor.ndim else 1) for tensor in tensors_in(output)]
    return [tensor.detach().flatten()[:: size + 1].clone() for tensor, size in rows]


def _agree(ours: list[Tensor], theirs: list[Tensor], precision: float) -> bool:
    """Whether two samples are equal, up to rounding."""
    pairs = list(zip_longest(ours, theirs))
    return all(_are_close(one, other, precision) for one, other in pairs)


def _are_close(ours: Tensor | None, theirs: Tensor | None, precision: float) -> bool:
    if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if ours.is_meta or isinstance(ours, FakeTensor) or not ours.numel():  # no numbers to compare
        return True
    wide = torch.complex128 if ours.is_complex() else torch.float64
    ours, theirs = ours.to(wide), theirs.to(wide)
    # The median, because in some models a few values are a thousand times larger than the others.
    typical = theirs.abs().nan_to_num(0, 0, 0).median().item()
    return torch.allclose(theirs, ours, rtol=precision, atol=precision * typical, equal_nan=True)


def _numerics(tensors: list[Tensor]) -> tuple[Callable[[], AbstractContextManager[object]], float]:
    """The current autocast, to enter again, and the relative size of rounding errors."""
    device = tensors[0].device.type if tensors else "cpu"
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    kinds = {tensor.dtype for tensor in tensors if tensor.is_floating_point()} | {torch.float32}
    kinds |= {dtype} if enabled else set()
    if torch.get_float32_matmul_precision() != "highest":
        kinds.add(torch.bfloat16)
    precision = max(1e-5, *(4 * torch.finfo(kind).eps for kind in kinds))
    return lambda: torch.autocast(device, dtype, enabled=enabled), precision
