"""Small random models with the structures that hooks once got wrong, for `tests.hooks.test_fuzz`.

Each model has a twin, a copy that runs with PyTorch's own hooks as the reference.
"""

import contextlib
import copy
import dataclasses
import random
import types
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hooks import FusedUnlessHooked, HookedRunner, HookPoint

D = 5


@dataclasses.dataclass(frozen=True)
class Out:
    label: str
    hidden: Tensor


def opened(output):
    """Return the first tensor of an output, and a function that replaces this tensor."""
    match output:
        case Tensor():
            return output, lambda new: new
        case Out():
            return output.hidden, lambda new: Out(output.label, new)
        case dict():
            key = next(key for key in output if isinstance(output[key], Tensor))
            return output[key], lambda new: type(output)({**output, key: new})
        case _:
            value, put = opened(output[0])
            return value, lambda new: type(output)([put(new), *output[1:]])


WRAPPED = [
    lambda x: x,
    lambda x: ([x, None], x * 2),
    lambda x: {"label": "a", "hidden": x, "other": x * 2},
    lambda x: Out("a", x),
]


class Block(nn.Module):
    """A block that computes `x + gain * tied(f(first(x)))`.

    Subclasses define `f`. The output is a tensor, a list, a dict or an object, chosen at random.
    """

    writes = False  # True if the forward pass writes into its input or its buffers

    def __init__(self, rng, mark):
        super().__init__()
        self.gain, self.wrap = 0.5, rng.choice(WRAPPED)
        self.first, self.tied, self.mid, self.out = nn.Linear(D, D), nn.Linear(D, D), mark(), mark()

    def forward(self, x):
        return self.wrap(self.out(x + self.gain * self.tied(self.f(self.first(x)))))


class InPlace(Block):
    def __init__(self, rng, mark):
        super().__init__(rng, mark)
        self.norm, self.relu = nn.BatchNorm1d(D), nn.ReLU(inplace=True)

    def f(self, x):
        return self.relu(self.norm(self.mid(x).flatten(0, 1))).unflatten(0, x.shape[:2])


class Adds(Block):
    """A block that adds its output to the input in place, as models may without gradients."""

    writes = True

    def forward(self, x):
        x += self.gain * self.mid(self.tied(self.first(x).tanh()))
        return self.out(x)


class Static(Block):
    """A block that counts its calls, and returns a part of a buffer that later calls overwrite."""

    writes = True

    def __init__(self, rng, mark):
        super().__init__(rng, mark)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("keys", torch.zeros(4, 4, D))

    def f(self, x):
        self.calls += 1
        if not torch.is_grad_enabled():
            self.keys[: len(x), : x.shape[1]] = x
            x = self.keys[: len(x), : x.shape[1]]
        return self.mid(x) + self.calls % 3


class Experts(Block):
    """A block with a gate with one output, a scale without axes, and experts that may not run."""

    def __init__(self, rng, mark):
        super().__init__(rng, mark)
        self.gate, self.scale = nn.Linear(D, 1), nn.Parameter(torch.tensor(1.5))
        self.experts = nn.ModuleList([nn.Linear(D, D) for _ in range(3)])

    def f(self, x):
        out, chosen = torch.zeros_like(x), (self.gate(x) * 3).long().clamp(0, 2).squeeze(-1)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if rows.any():
                out = out.masked_scatter(rows[..., None], expert(x[rows]))
        return self.mid(out) * self.scale


class Checkpointed(Block):
    def __init__(self, rng, mark):
        super().__init__(rng, mark)
        self.inner, self.mid = nn.Sequential(nn.Linear(D, D), nn.Tanh(), mark(), nn.Tanh()), mark()
        self.reentrant = rng.random() < 0.3

    def f(self, x):
        if not (torch.is_grad_enabled() and x.requires_grad):
            return self.mid(self.inner(x))
        how = {"use_reentrant": self.reentrant, "preserve_rng_state": False}
        return self.mid(checkpoint(self.inner, x, **how))


class Twice(Block):
    """A block that runs one module twice, under two names. Two other modules share a weight."""

    def __init__(self, rng, mark):
        super().__init__(rng, mark)
        self.twice, self.first.weight = nn.Linear(D, D), self.tied.weight
        self.twice_too = self.twice

    def f(self, x):
        return self.twice(self.mid(self.twice(x).tanh()))


class Bias(nn.Linear):
    def forward(self):
        return self.bias


class Memo(Block):
    """A block that stores a new tensor, and calls a module that returns its bias.

    Another of its modules is never called.
    """

    def __init__(self, rng, mark):
        super().__init__(rng, mark)
        self.bias, self.drop, self.unused = Bias(D, D), nn.Dropout(0.0), nn.Dropout()

    def f(self, x):
        self.memo = torch.ones(D) if self.memo is None else self.memo
        return self.drop(self.mid(x)) + self.bias() + self.memo


class Fused(Block):
    def _fused(self, x):
        return nn.functional.normalize(x, dim=-1)

    @FusedUnlessHooked("mid", fused=_fused)
    def f(self, x):
        return x / self.mid(x.norm(dim=-1, keepdim=True))


class Model(nn.Module):
    def __init__(self, rng, mark):
        super().__init__()
        self.wrap = rng.choice(WRAPPED)
        self.embed, self.norm, self.head = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 7)
        kinds = [InPlace, Adds, Static, Experts, Checkpointed, Twice, Memo, Fused]
        chosen = rng.sample(kinds, rng.choice([1, 1, 1, 2, 2, 3]))
        self.blocks = nn.ModuleList([kind(rng, mark) for kind in chosen])
        if rng.random() < 0.3:
            self.blocks[-1].tied = self.blocks[0].tied

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x, _ = opened(block(x))
        return self.wrap(self.head(self.norm(x)))


class World:
    """A random model and its twin, a copy for PyTorch's own hooks.

    Attributes:
        points: the names from which globs and predicates select.
        steady: the names of the points that run for every input.
        edited: the names of the points at which edits are allowed.
        watched: the names of the points that run once, and that have a gradient.
    """

    def __init__(self, seed):
        self.seed, rng, before = seed, random.Random(seed), torch.random.get_rng_state()
        torch.manual_seed(seed)
        self.marked = rng.random() < 0.4
        mark = (lambda: HookPoint("batch pos d")) if self.marked else nn.Identity
        self.model = Model(rng, mark).train(rng.random() < 0.1)
        self.inputs = [torch.randn(*size, D) for size in ((3, 4), (2, 3), (1, 4))]
        torch.random.set_rng_state(before)
        self.kinds = {type(block) for block in self.model.blocks}
        self.writes = self.model.training or any(kind.writes for kind in self.kinds)
        reentrant = any(getattr(block, "reentrant", False) for block in self.model.blocks)
        self.model.requires_grad_(reentrant or rng.random() < 0.8)
        self.twin = copy.deepcopy(self.model)
        # The user's own hook doubles the output of the norm.
        for model in (self.model, self.twin):
            model.norm.register_forward_hook(lambda module, args, output: output * 2)
        self.runner = HookedRunner(self.model)
        self.modules = {
            name: module
            for name, module in self.twin.named_modules(remove_duplicate=False)
            if name and not isinstance(module, nn.ModuleList)
        }
        points = [n for n, m in self.modules.items() if isinstance(m, HookPoint)]
        self.points = points if self.marked else [*self.modules]
        self.steady = [n for n in self.points if not ("expert" in n or "unused" in n)]
        # Edits inside activation checkpointing raise an error.
        self.edited = [n for n in self.steady if "inner" not in n]
        # PyTorch gives the inside of a re-entrant checkpoint no gradients in the first pass.
        pool = self.edited if reentrant else self.steady
        self.watched = [n for n in pool if not ("twice" in n or "tied" in n)]
        both = (self.model, self.twin)
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        self.slots = [getattr(m, kind) for m in self.model.modules() for kind in kinds]
        self.hooks = self.registered()
        self.tensors = [[*model.parameters(), *model.buffers()] for model in both]
        self.buffers = [list(model.buffers()) for model in both]
        self.state = [value.clone() for value in self.buffers[0]]

    def registered(self):
        """Return all hooks on the model."""
        return [hook for slot in self.slots for hook in slot.values()]

    def reset(self):
        """Reset the model and its twin to their initial state."""
        for model, tensors, buffers in zip(
            (self.model, self.twin), self.tensors, self.buffers, strict=True
        ):
            for block in model.blocks:
                block.gain, block.memo = 0.5, None
            for value in tensors:
                value.grad = None
            for buffer, value in zip(buffers, self.state, strict=True):
                buffer.copy_(value)


class Stop(Exception):
    pass


class Tap(torch.autograd.Function):
    """A function that copies its input, and applies `act` to the gradient."""

    @staticmethod
    def forward(ctx, value, act):
        ctx.act = act
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.act(grad), None


def tapped(value, act):
    return Tap.apply(value if value.requires_grad else value.detach().requires_grad_(), act)


class Edit:
    """An edit that multiplies values by a factor, for the runner and for raw hooks (`by_hand`)."""

    def __init__(self, rng, key, names, backward=False):
        self.key, self.names, self.backward = key, names, backward
        self.factor, self.writes = rng.choice([0.5, -1.0, 3.0]), rng.random() < 0.3

    def __call__(self, value, point):
        changed = value.mul_(self.factor) if self.writes else value * self.factor
        return None if self.writes else changed

    def by_hand(self, value):
        if self.backward:
            return tapped(value, lambda grad: grad * self.factor)
        return value * self.factor


@contextlib.contextmanager
def by_hand(w, x, edits=(), keep=(), grads=False, stops=False):
    """Run the twin with raw hooks, which stay until the end of the `with`.

    Args:
        w: the world.
        x: the input.
        edits: the edits of the run.
        keep: the names whose values are stored.
        grads: also store the gradients of these values.
        stops: stop the run when all these values are stored.

    Yields:
        The run, with its `output`, the values in `fired` and the gradients in `grads`.
    """
    run = types.SimpleNamespace(fired={name: [] for name in keep}, grads={}, output=None)
    block, running = None, True

    def entered(number, *_):
        nonlocal block
        block = number

    def kept(name, value):
        if grads:
            value = tapped(value, lambda grad: run.grads.update({name: grad.clone()}) or grad)
        # Activation checkpointing calls the hook again in the backward pass. Skip this call.
        if running:
            writes = None if value.is_inference() else value._version
            run.fired[name].append((block, value.detach().clone(), value, writes))
            if stops and all(run.fired.values()):
                raise Stop
        return value

    def hook(act, module, args, output):
        value, put = opened(output)
        return put(act(value))

    added = [(w.modules[name], edit.by_hand) for edit in edits for name in edit.names]
    added = [*dict.fromkeys(added), *((w.modules[name], partial(kept, name)) for name in keep)]
    handles = [module.register_forward_hook(partial(hook, act)) for module, act in added]
    for number, module in enumerate(getattr(w.twin, "blocks", [])):
        handles.append(module.register_forward_pre_hook(partial(entered, number)))
    try:
        with contextlib.suppress(Stop):
            run.output = w.twin(**x) if isinstance(x, dict) else w.twin(x)
        running = False
        yield run
    finally:
        for handle in handles:
            handle.remove()


def overwritten(run):
    """Return the names of the points whose value was overwritten later in the run."""
    return {
        name
        for name, firings in run.fired.items()
        for *_, live, writes in firings
        if writes is not None and writes != live._version
    }


def same(ours, theirs, what, exact=True):
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), what
    gap = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)
    assert gap <= (0 if exact else 1e-5), f"{what} differs by {gap:.1g}"


def same_output(ours, theirs, what):
    assert type(ours) is type(theirs), what
    same(opened(ours)[0], opened(theirs)[0], what)
