"""Random sessions of the runner on the models of `tests.zoo`.

A session is a random sequence of calls on one model, and its seed decides everything. A copy of the
model, its twin, runs the same calls with PyTorch's own hooks, and the results must agree.
`python -m tests.hooks.test_fuzz 1000000` runs a million sessions. `python -m tests.hooks.test_fuzz
1 SEED` repeats one session.
"""

import asyncio
import collections
import contextlib
import contextvars
import dis
import gc
import operator
import os
import random
import subprocess
import sys
import tempfile
import threading
import traceback
from fnmatch import fnmatchcase
from functools import partial

import pytest
import torch

import hooks
from hooks import ActivationCache, CacheError, HookError, NeverFiredError
from tests.zoo import (
    Adds,
    Edit,
    Experts,
    Fused,
    World,
    by_hand,
    opened,
    overwritten,
    same,
    same_output,
)

SOURCE = os.path.dirname(hooks.__file__)
WORLDS: dict[int, World] = {}
COUNTS: collections.Counter[str] = collections.Counter()
# A world is a model with its twin. Sessions use the worlds 0 to 79. World 80 does not write into
# its buffers, so another thread can run it at any time.
SPARE = 80


def world(number):
    if number not in WORLDS:
        WORLDS[number] = World(number)
        # `failures` says why.
        gc.freeze()
    return WORLDS[number]


class Session:
    def __init__(self, seed, spare=False):
        self.rng = random.Random(seed)
        self.w = world(SPARE if spare else self.rng.randrange(SPARE))
        self.w.reset()
        self.x = self.rng.choice(self.w.inputs).clone()
        # False if the session may leave hooks on the model. These hooks must do nothing.
        self.tidy = True
        ways = [torch.no_grad, torch.inference_mode, torch.enable_grad]
        self.way = self.rng.choice(ways[: 2 if Adds in self.w.kinds else 3])

    def selected(self, pool, globs, most=3):
        """Return a random selector, and the names that it selects."""
        names = self.rng.sample(pool, self.rng.randint(1, min(most, len(pool))))
        match self.rng.choice(["names", "predicate", "glob"]):
            case "names":
                return tuple(names), [name for name in self.w.modules if name in names]
            case "predicate":
                chosen = [name for name in self.w.points if name in names]
                return lambda point: point.name in names, chosen
        glob = self.rng.choice(globs)
        return glob, [name for name in self.w.points if fnmatchcase(name, glob)]

    def edits(self, most=2, least=0, backward=False):
        w = self.w
        pool = [name for name in w.watched if name in w.edited] if backward else w.edited
        choice = (pool, ["*.out"] if backward else ["*.mid", "*.out"])
        count = self.rng.randint(least, most)
        return [Edit(self.rng, *self.selected(*choice), backward) for _ in range(count)]

    def hooks(self, *edits):
        """Switch edits on, and return a stack that switches them off when it is closed."""
        stack = contextlib.ExitStack()
        for edit in edits:
            given = {"backward" if edit.backward else "hooks": {edit.key: edit}}
            stack.enter_context(self.w.runner.hooks(**given))
        return stack

    def suspended(self, *edits):
        with self.hooks(*edits):
            yield

    def check(self, edits, what):
        """Check that the model, with the hooks that are active now, equals the edited twin."""
        with torch.no_grad(), by_hand(self.w, self.x, edits) as theirs:
            same_output(self.w.model(self.x), theirs.output, what)


def kept(s, how):
    """Check that a cache contains the values of the twin, also after later writes by the model.

    `how` is the kind of the cache: eager, lazy or a capture.
    """
    rng, w, edits = s.rng, s.w, s.edits()
    how = "eager" if w.model.training and how == "lazy" else how
    lazy, captures = how == "lazy", how == "capture"
    pool = w.steady if rng.random() < 0.7 else [*w.modules]
    selector, names = s.selected(pool, ["*", "blocks.*", "*.mid"], most=6)
    given, exact = {"names": selector}, isinstance(selector, tuple)
    if rng.random() < 0.15 and not captures and not w.model.training:
        given, names, exact = rng.choice([{}, {"mode": "full"}]), w.points, False
    options, reduced = {"detach": lazy or rng.random() < 0.8}, torch.clone
    if rng.random() < 0.3 and all(hasattr(w.modules[name], "axes") for name in names):
        mask = torch.tensor([True, *rng.choices([True, False], k=s.x.shape[1] - 1)])
        options["pos"] = at = rng.choice([[0, -1], slice(1, None), mask, mask.tolist()])
        reduced = operator.itemgetter((slice(None), at))
    # Some blocks write into their buffers only if gradients are off. A cached run with `detach`
    # switches gradients off, so the twin must too.
    graph = torch.no_grad() if options["detach"] else contextlib.nullcontext()
    with s.way(), graph, by_hand(w, s.x, edits, names, stops=captures) as theirs:
        values = {name: [value for _, value, *_ in theirs.fired[name]] for name in names}
        # In a lazy cache, a module that two blocks share has one value for each block.
        if lazy:
            for name in names:
                block = int(name.split(".")[1]) if name.startswith("blocks.") else None
                fired = theirs.fired[name]
                values[name] = [value for at_, value, *_ in fired if block in (None, at_)]
        wrong = [name for name in names if len(values[name]) != 1]
        strict = bool(wrong) and (w.marked or exact or not any(values.values()))
        # The cache may leave out these points: overwritten points if the graph is kept, and modules
        # that two blocks share if it is lazy.
        spent = set() if options["detach"] else overwritten(theirs)
        loose = {*wrong} | spent | {n for n in names if len(theirs.fired[n]) != 1}
        try:
            with s.hooks(*edits):
                if captures:
                    cache = w.runner.capture(s.x, **given, **options)
                else:
                    ours, cache = w.runner.run_with_cache(s.x, **given, **options, lazy=lazy)
        except HookError as error:
            refusable = isinstance(error, CacheError) and spent
            if not (strict or refusable or {*names} <= loose):
                raise
            return w.reset()
        spoilt = lazy and (w.writes or any(name.endswith(".norm") for name in names))
    if not lazy:
        assert not strict, f"{wrong} accepted"
        missing = {*names} - {*cache}
        assert list(cache) == [name for name in names if name not in missing]
        assert {*wrong} <= missing <= loose
        assert not missing or (set(cache.skipped) == missing and all(cache.skipped.values()))
    with s.way(), torch.no_grad():
        if not captures:
            same_output(ours, theirs.output, "output")
        if options["detach"]:
            harms = [s.x, *([] if captures else [opened(ours)[0]])]
            for harmed in rng.sample(harms, rng.randint(0, len(harms))):
                harmed.zero_()
            for model in (w.model, w.twin)[: 2 * (rng.random() < 0.3)]:
                model(w.inputs[0] + 1)
    # Change the model or an edit after the run: a lazy cache must notice it. It need not notice a
    # change that leaves the output of a block as it was. So leave out blocks with experts, which
    # may be the same for another gate, and blocks that normalize, where a factor has no effect.
    if lazy and not {Experts, Fused} & w.kinds and rng.random() < 0.2:
        changed, spoilt = rng.choice([w.model.blocks[-1], *edits]), True
        setattr(changed, "factor" if changed in edits else "gain", 0.75)
    decoys = s.edits(1) if rng.random() < 0.3 else []
    with rng.choice([s.way, torch.no_grad])(), s.hooks(*decoys):
        for name in rng.sample(names, len(names)):
            try:
                value = cache[name].detach()
            except HookError as error:
                refusable = spoilt and isinstance(error, CacheError)
                if not (name in loose or refusable or (lazy and strict)):
                    raise
            else:
                assert name not in wrong, f"{name} accepted"
                same(value, reduced(values[name][0]), name, exact=not lazy)
    if not lazy and rng.random() < 0.1:
        with tempfile.TemporaryDirectory() as folder:
            cache.save(f"{folder}/cache")
            again = ActivationCache.load(f"{folder}/cache", w.model)
        assert [(n, again.axes(n)) for n in again] == [(n, cache.axes(n)) for n in cache]
        assert all(torch.equal(again[name], cache[name]) for name in cache)
    w.model.blocks[-1].gain = 0.5
    return None


def gradients(s):
    """Check gradients of points and of weights, with edits of values and of gradients.

    `backward()` may run inside the `with` of the edits, after it, or in another thread.
    """
    rng, w = s.rng, s.w
    if Adds in w.kinds:
        return
    edits, names = s.edits() + s.edits(backward=True), rng.sample(w.watched, 2)
    times, within, elsewhere = (
        rng.choice([(1,), (1,), (1, 2)]),
        rng.random() < 0.5,
        rng.random() < 0.3,
    )

    def backward(output):
        loss = (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()
        for factor in times:
            (loss * factor).backward(retain_graph=True)

    with by_hand(w, s.x, edits, names, grads=True) as theirs:
        backward(opened(theirs.output)[0])
    with s.hooks(*edits) as here:
        output, cache = w.runner.run_with_cache(s.x, names=names, grads=True)
        same_output(output, theirs.output, "output")
        if not within:
            here.close()
        work = partial(backward, opened(output)[0])
        Beside(work).finish() if elsewhere else work()
    for ours, other in zip(w.model.parameters(), w.twin.parameters(), strict=True):
        assert (ours.grad is None) == (other.grad is None)
        if ours.grad is not None:
            same(ours.grad, other.grad, "a weight's gradient", exact=False)
            ours.grad.zero_()
    for name in names:
        same(cache[name], theirs.fired[name][0][1], name)
        assert (name in theirs.grads) == (name in cache.grads)
        if name in theirs.grads:
            same(cache.grads[name], theirs.grads[name], f"the gradient of {name}", exact=False)


def plan(s):
    """Check that a plan does not change the model, and gives the size of the cache of a run."""
    w, lazy = s.w, not s.w.model.training and s.rng.random() < 0.5
    selector, _ = s.selected(w.watched, ["*.out"])
    with torch.no_grad(), contextlib.suppress(CacheError):
        try:
            plan = w.runner.plan(s.x, lazy=lazy, names=selector)
        except HookError as error:
            unreadable = w.writes and isinstance(error, CacheError)
            # Without numbers, the shapes inside experts are unknown.
            if not (unreadable or Experts in w.kinds):
                raise
            return
        s.check([], "after a plan")
        _, cache = w.runner.run_with_cache(s.x, lazy=lazy, names=selector)
        assert (plan.nbytes, [*plan.values]) == (cache.nbytes, [*cache])
    w.reset()


def contexts(s):
    """Check that an edit acts in the context (of `contextvars`) that opened it, and in its copies.

    The edit acts until its `with` ends, in any context or thread.
    """
    places, ended = [(contextvars.copy_context(), [])], []
    # If a `with` is dropped before its end, hooks may stay, but they must do nothing.
    s.tidy = False
    for what in s.rng.choices(
        ["open", "open in thread", "copy", "new", "finish", "drop", "cycle"], k=5
    ):
        context, acting = s.rng.choice(places)
        if what == "copy":
            places.append((context.copy(), acting.copy()))
        elif what == "new":
            places.append((contextvars.Context(), []))
        elif what.startswith("open"):
            [edit] = s.edits(1, 1)
            acting.append((edit, [s.suspended(edit)]))
            work = partial(context.run, next, acting[-1][1][0])
            work() if what == "open" else Beside(work).finish()
        elif acting:
            edit, holder = s.rng.choice(acting)
            ended.append(edit)
            loop = holder.copy()
            holder.clear()
            if what == "finish" and loop:
                # The edit never fired if the model ran only in other contexts.
                with contextlib.suppress(NeverFiredError):
                    next(loop[0], None)
            elif what == "cycle":
                loop.append(loop)
            del loop
            gc.collect()
        context, acting = s.rng.choice(places)
        edits = [edit for edit, _ in acting if edit not in ended]
        work = partial(context.run, s.check, edits, f"after {what}")
        work() if s.rng.random() < 0.6 else Beside(work).finish()
    Beside(s.check, [], "in a new thread").finish()


def tasks(s):
    """Check that two kinds of edits act in a task of asyncio: its own edits, and the edits that
    were active when the task was created, until they end.
    """
    (outer,), own = s.edits(1, 1), s.edits(3, 2)

    async def task(edit, inherited):
        await asyncio.sleep(0)
        s.check(inherited, "in a task")
        with s.hooks(edit):
            for _ in range(s.rng.randint(1, 2)):
                s.check([*inherited, edit], "in a task's own with")
                await asyncio.sleep(0)
        s.check(inherited, "after a task's own with")

    async def main():
        with s.hooks(outer):
            await asyncio.gather(*(task(edit, [outer]) for edit in own))
            late = asyncio.create_task(task(own[0], []))
        await late

    asyncio.run(main())


def raising(s):
    """Check that the exception of a hook reaches the caller, and that no hook stays."""

    def fail(value, point):
        raise ZeroDivisionError

    runner, point = s.w.runner, s.rng.choice(s.w.edited)
    run = s.rng.choice([runner.run_with_cache, runner.capture])
    with (
        s.way(),
        s.hooks(*s.edits()),
        runner.hooks({point: fail}),
        pytest.raises(ZeroDivisionError),
    ):
        run(s.x, names=["embed", "head"])
    s.w.reset()


class Beside(threading.Thread):
    """A thread that starts at once. No edits are active in it."""

    def __init__(self, work, *args):
        super().__init__(daemon=True)
        self.work, self.failure = partial(work, *args), None
        self.start()

    def run(self):
        try:
            self.work()
        except BaseException as error:
            self.failure = error

    def finish(self):
        self.join(30)
        assert not self.is_alive(), "hangs"
        if self.failure:
            raise self.failure


class Interrupt(BaseException):
    pass


def disturbed(s, act, what):
    """Run `act`, with a disturbance at a random line of `hooks`.

    `what` is the disturbance: an interrupt, a run of the garbage collector, or another thread.
    """
    left, waiting = int(10 ** s.rng.uniform(0.5, 2.9)), []
    # The other thread runs the model of this session only if the session does not change it. Lazy
    # sessions change an attribute of the model, and some models write into their buffers. Then the
    # thread runs the spare model.
    spare = Session(0, spare=True)
    if what == "thread" and not s.w.writes and act is not ACTIONS["lazy"][0]:
        spare = s
    x, [edit] = spare.x.clone(), spare.edits(1, 1)
    if what == "thread":
        with torch.no_grad(), by_hand(spare.w, x, [edit]) as theirs:
            expected = theirs.output

    def run():
        with torch.no_grad(), spare.hooks(edit):
            same_output(spare.w.model(x), expected, "in a thread beside")

    def line(frame, event, arg):
        nonlocal left
        left -= event == "line"
        if left == 0 and event == "line":
            handles = frame.f_code.co_code[frame.f_lasti] == dis.opmap["PUSH_EXC_INFO"]
            if what == "interrupt" and (handles or sys.exc_info()[0]):
                # Do not interrupt while Python handles an error. An error of a trace function there
                # makes CPython handle the old error forever, and a real interrupt never comes
                # there. So try the next line.
                left = 1
            elif what == "interrupt":
                raise Interrupt
            elif what == "collect":
                gc.collect()
            else:
                waiting.append(Beside(run))
                # Do not wait for its end, because it may have to wait for this thread.
                waiting[0].join(0.01)
        return line

    if what == "collect":
        loop = [spare.suspended(edit)]
        next(loop[0])
        loop.append(loop)
        del loop

    # Do not use *args: CPython 3.11.7 sometimes crashed if the call started the garbage collector.
    def entered(frame, event, arg):
        return line if frame.f_code.co_filename.startswith(SOURCE) else None

    sys.settrace(entered)
    try:
        act(s)
    except BaseException:
        if what != "interrupt" or left > 0:
            raise
    finally:
        sys.settrace(None)
    for thread in waiting:
        thread.finish()
    if what == "interrupt":
        s.tidy = False
        s.w.reset()
        gc.collect()
        s.check([], "after an interrupt")
        with s.hooks(*(edits := s.edits(1, 1))):
            s.check(edits, "edited, after an interrupt")


ACTIONS = {
    "cache": (partial(kept, how="eager"), 20),
    "capture": (partial(kept, how="capture"), 14),
    "lazy": (partial(kept, how="lazy"), 20),
    "gradients": (gradients, 12),
    "plan": (plan, 0.2),
    "contexts": (contexts, 4),
    "tasks": (tasks, 2),
    "raising": (raising, 8),
}
DISTURBED = {"": 80, "interrupt": 10, "collect": 5, "thread": 5}


def session(seed):
    """Run one session, and check the facts that hold after every session."""
    s = Session(seed)
    [name] = s.rng.choices([*ACTIONS], [weight for _, weight in ACTIONS.values()])
    [what] = s.rng.choices([*DISTURBED], [*DISTURBED.values()])
    # An interrupt during a plan may leave PyTorch's fake tensor mode on, which is a known fault.
    if name == "plan" and what == "interrupt":
        what = "collect"
    COUNTS[f"{name} {what}".strip()] += 1
    try:
        act, _ = ACTIONS[name]
        disturbed(s, act, what) if what else act(s)
        assert not s.tidy or s.w.registered() == s.w.hooks, "hooks are left"
        assert all(map(torch.equal, *s.w.tensors)), "the model is changed"
        s.check([], "at the end")
    except BaseException as error:
        at = [f"{call.name}:{call.lineno}" for call in traceback.extract_tb(error.__traceback__)]
        kinds = " ".join(type(block).__name__ for block in s.w.model.blocks)
        where = f"seed {seed} ({name} {what}; {kinds})"
        raise AssertionError(f"{where}: {error!r} at {' '.join(at[-3:])}") from None
    finally:
        for w in (s.w, world(SPARE)):
            if sys.exc_info()[0] or w.registered() != w.hooks:
                WORLDS.pop(w.seed, None)


def failures(sessions, first=0):
    """Run sessions, and return their failures. A session that hangs is the last one."""
    # An interrupted generator would print a message.
    said, sys.unraisablehook = sys.unraisablehook, lambda *_: None
    # Exclude the objects that exist now from garbage collection. Otherwise the collector would
    # spend most of the time on objects of PyTorch.
    gc.freeze()
    try:
        for seed in range(first, first + sessions):
            thread = Beside(session, seed)
            thread.join(60)
            if thread.failure or thread.is_alive():
                yield thread.failure or f"seed {seed} hangs"
            if thread.is_alive():
                return
    finally:
        sys.unraisablehook = said
        gc.unfreeze()


@pytest.mark.parametrize(
    ("sessions", "first"), [(50, 0), pytest.param(4950, 50, marks=pytest.mark.full)]
)
def test_random_sessions(sessions, first):
    """The sessions run in a separate process, without the shape checks of the tests.

    These checks would take most of the time.
    """
    command = [sys.executable, "-m", "tests.hooks.test_fuzz", str(sessions), str(first)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


if __name__ == "__main__":
    failed = 0
    for failure in failures(*map(int, sys.argv[1:])):
        failed += 1
        print(failure, flush=True)
    for name, count in sorted(COUNTS.items()):
        print(f"{count:>9,} {name}")
    print(f"{COUNTS.total():>9,} sessions, {failed} failures")
    sys.exit(failed > 0)
