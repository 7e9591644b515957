"""Values of several runs as those of one; and what a cache keeps alive of the memory behind its values."""

import functools
import gc
import weakref

import pytest
import torch
from torch import nn

from hooks import HookedRunner, HookError, HookPoint, NeverFiredError
from hooks.capture import join as joined_by_position

# Sizes all differ: batch 2, positions 3 and 1 and 4, width 5.


def counted(*shape, start=1):
    numbers = torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32)
    return numbers.view(shape)


# Joining.


@pytest.mark.parametrize(
    ("axes", "shapes", "at"),
    [
        ("batch pos d", [(2, 3, 5), (2, 1, 5), (2, 4, 5)], 1),
        ("pos", [(3,), (4,)], 0),
        ("batch head d pos", [(2, 7, 5, 3), (2, 7, 5, 1)], 3),
        ("batch query d", [(2, 3, 5), (2, 4, 5)], 1),
    ],
)
def test_positions_follow_each_other(axes, shapes, at):
    parts = [counted(*shape, start=100 * n) for n, shape in enumerate(shapes)]
    joined = joined_by_position(parts, "here", tuple(axes.split()))
    assert joined.shape[at] == sum(shape[at] for shape in shapes)
    for part, piece in zip(parts, joined.split([s[at] for s in shapes], at), strict=True):
        assert torch.equal(part, piece)


def test_one_run_is_itself():
    part = counted(2, 3, 4, 4)
    assert torch.equal(joined_by_position([part], "here", ("batch", "head", "query", "key")), part)


def test_keys_end_where_their_queries_end():
    """By hand: two queries, then one, then two with a window that dropped the first three keys."""
    first = torch.tensor([[11.0, 12], [21, 22]])
    second = torch.tensor([[31.0, 32, 33]])
    third = torch.tensor([[44.0, 45], [54, 55]])
    joined = joined_by_position([first, second, third], "here", ("query", "key"))
    assert joined.tolist() == [
        [11, 12, 0, 0, 0],
        [21, 22, 0, 0, 0],
        [31, 32, 33, 0, 0],
        [0, 0, 0, 44, 45],
        [0, 0, 0, 54, 55],
    ]


def test_keys_of_before_the_first_run_stay():
    """The first run read a cache of two positions."""
    first = torch.tensor([[13.0, 14, 15]])
    second = torch.tensor([[23.0, 24, 25, 26]])
    joined = joined_by_position([first, second], "here", ("query", "key"))
    assert joined.tolist() == [[13, 14, 15, 0], [23, 24, 25, 26]]


def test_keys_may_come_before_queries():
    first, second = torch.tensor([[1.0]]), torch.tensor([[2.0], [3.0]])
    joined = joined_by_position([first, second], "here", ("key", "pos"))
    assert joined.tolist() == [[1, 2], [0, 3]]


def test_keys_alone_are_no_positions():
    with pytest.raises(HookError, match="here has the axes batch key"):
        joined_by_position([counted(2, 3)], "here", ("batch", "key"))


@pytest.mark.parametrize(
    ("axes", "named"),
    [("", "here declares no axes"), ("batch d", "here has the axes batch d"), ("query pos d", "here has the axes query pos d")],
)  # fmt: skip
def test_values_without_one_axis_of_positions_are_refused(axes, named):
    with pytest.raises(HookError, match=named):
        joined_by_position([counted(2, 3, 5)], "here", tuple(axes.split()))


# run_with_cache(run=...)


class Toy(nn.Module):
    """`tokens` doubled and squared in a buffer that every run writes to."""

    def __init__(self):
        super().__init__()
        self.twice = HookPoint("batch pos")
        self.square = HookPoint("batch pos")
        self.ids = HookPoint("batch pos")
        self.unnamed = nn.Identity()
        self.room = torch.zeros(2, 4)

    def forward(self, x):
        room = self.room[:, : x.shape[1]]
        room.copy_(x * 2)
        self.ids(x.long())
        return self.unnamed(self.square(self.twice(room) ** 2))


@pytest.fixture
def toy():
    return Toy().eval()


X = counted(2, 8)


def in_pieces(model, x, sizes, scale=1.0):
    return [model(piece * scale) for piece in x.split(sizes, 1)]


def test_run_takes_the_arguments_and_gives_the_output(toy):
    run = functools.partial(in_pieces, toy)
    output, cache = HookedRunner(toy).run_with_cache(X, [3, 1, 4], scale=0.5, run=run)
    assert [part.shape[1] for part in output] == [3, 1, 4]
    assert torch.equal(torch.cat(output, 1), X**2)
    assert torch.equal(cache["twice"], X)
    assert torch.equal(cache["square"], X**2)
    assert cache["ids"].dtype == torch.int64
    assert cache.axes("twice") == ("batch", "pos")
    assert list(cache) == ["twice", "square", "ids"]


def test_names_modes_types_and_edits_act_in_every_run(toy):
    runner, run = HookedRunner(toy), functools.partial(in_pieces, toy)
    with runner.hooks({"twice": lambda value, point: value + 1}):
        _, cache = runner.run_with_cache(
            X, [3, 4, 1], names=["square", "ids"], dtype=torch.float64, run=run
        )
    assert list(cache) == ["square", "ids"]
    assert cache["square"].dtype == torch.float64
    assert cache["ids"].dtype == torch.int64
    assert torch.equal(cache["square"], (2 * X.double() + 1) ** 2)
    assert torch.equal(runner.run_with_cache(X, [4, 4], mode="none", run=run)[0][0], 4 * X[:, :4] ** 2)  # fmt: skip


def test_edits_are_recorded(toy):
    """Contexts nest: the recorder sees what the edits gave."""
    runner, run = HookedRunner(toy), functools.partial(in_pieces, toy)
    with runner.hooks({"twice": lambda value, point: value * 0}):
        _, cache = runner.run_with_cache(X, [4, 4], names="twice", run=run)
    assert not cache["twice"].any()


def test_a_single_call_is_joined_too(toy):
    output, cache = HookedRunner(toy).run_with_cache(X[:, :3], run=toy)
    assert torch.equal(output, 4 * X[:, :3] ** 2)
    assert torch.equal(cache["twice"], 2 * X[:, :3])
    toy(X[:, :3] * 0)
    assert torch.equal(cache["twice"], 2 * X[:, :3])


def test_nothing_stays_registered(toy):
    runner = HookedRunner(toy)
    runner.run_with_cache(X, [4, 4], run=functools.partial(in_pieces, toy))
    with pytest.raises(ZeroDivisionError):
        runner.run_with_cache(run=lambda: (toy(X[:, :2]), 1 / 0))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in toy.modules())


def test_a_run_that_does_not_reach_a_point_is_an_error(toy):
    with pytest.raises(NeverFiredError, match="twice"):
        HookedRunner(toy).run_with_cache(run=lambda: None)


def test_a_run_that_only_promises_is_an_error(toy):
    with pytest.raises(
        NeverFiredError, match="an iterator, which may run the model only when it is read"
    ):
        HookedRunner(toy).run_with_cache(X, run=lambda x: (toy(part) for part in x.split(4, 1)))


def test_a_point_without_axes_is_refused(toy):
    run = functools.partial(in_pieces, toy)
    with pytest.raises(HookError, match="unnamed declares no axes"):
        HookedRunner(toy).run_with_cache(X, [4, 4], names="unnamed", run=run)


@pytest.mark.parametrize(
    "option",
    [
        dict(lazy=True),
        dict(grads=True),
        dict(positions=[0]),
        dict(positions=slice(0, 1)),
        dict(windows=torch.ones(2, 8, dtype=torch.bool)),
    ],
)
def test_options_that_speak_of_one_run_are_refused_before_it(toy, option):
    calls = []
    with pytest.raises(
        ValueError, match="run= takes neither lazy=, grads=, positions= nor windows="
    ):
        HookedRunner(toy).run_with_cache(run=lambda: calls.append(1), **option)
    assert not calls


def test_training_mode_is_refused_before_the_run(toy):
    calls = []
    toy.train()
    with pytest.raises(HookError, match=r"eval\(\)"):
        HookedRunner(toy).run_with_cache(run=lambda: calls.append(1))
    assert not calls


def test_without_run_a_point_that_fires_twice_is_an_error(toy):
    twice = nn.Sequential(toy, toy).eval()
    runner = HookedRunner(twice)
    with pytest.raises(HookError, match="fired twice"):
        runner.run_with_cache(X[:, :3], names="0.twice")
    with pytest.raises(HookError, match="fired twice"):
        runner.run_with_cache(X[:, :3], names="0.twice")


def test_graphs_reach_through_the_joined_values(toy):
    scale = torch.tensor(3.0, requires_grad=True)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = HookPoint("batch pos")

        def forward(self, x):
            return self.out(x * scale)

    model = Scaled().eval()
    run = functools.partial(in_pieces, model)
    runner = HookedRunner(model)
    _, cache = runner.run_with_cache(X, [4, 4], run=run, detach=False)
    cache["out"].sum().backward()
    assert scale.grad == X.sum()
    assert not runner.run_with_cache(X, [4, 4], run=run)[1]["out"].requires_grad


def test_inference_mode(toy):
    with torch.inference_mode():
        _, cache = HookedRunner(toy).run_with_cache(X, [3, 4, 1], run=functools.partial(in_pieces, toy))  # fmt: skip
    assert torch.equal(cache["square"], 4 * X**2)


# What a cache keeps alive.


class Split(nn.Module):
    """One map gives two parts of unequal size; each passes a point, and both lead on."""

    def __init__(self):
        super().__init__()
        self.both = nn.Linear(5, 10)
        self.small = HookPoint("batch pos d_small")
        self.large = HookPoint("batch pos d_large")
        self.spread = HookPoint("batch pos d")
        self.given = HookPoint("batch pos d")
        self.part = HookPoint("batch pos d")

    def forward(self, x):
        small, large = self.both(self.given(x)).split((3, 7), -1)
        spread = self.spread(self.both.bias.detach().clone().expand(2, 4, 10))
        part = self.part(x[:, :, :2])
        total = self.small(small).square().sum(-1) * self.large(large).sum(-1)
        return total * spread.sum(-1) + part.sum(-1)


@pytest.fixture
def split():
    torch.manual_seed(0)
    return Split().eval()


@pytest.fixture
def x():
    return torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(2))


NUMBERS = 4 * 2 * 4  # bytes of one number at every position


def test_a_part_alone_does_not_keep_the_whole_alive(split, x):
    for name, width in (("small", 3), ("large", 7)):
        _, cache = HookedRunner(split).run_with_cache(x, names=name)
        assert cache.nbytes == cache[name].nbytes == width * NUMBERS
        expected = split.both(x).split((3, 7), -1)[name == "large"]
        assert torch.equal(cache[name], expected)


def test_parts_that_fill_the_memory_are_not_copied(split, x):
    _, cache = HookedRunner(split).run_with_cache(x, names=["small", "large", "both"])
    assert cache.nbytes == 10 * NUMBERS
    addresses = {cache[name].untyped_storage().data_ptr() for name in cache}
    assert len(addresses) == 1
    _, cache = HookedRunner(split).run_with_cache(x, names=["small", "large"])
    assert len({cache[name].untyped_storage().data_ptr() for name in cache}) == 1
    assert cache.nbytes == 10 * NUMBERS


def test_the_same_part_at_two_points_counts_once():
    """Two names of a small part do not add up to the whole."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = HookPoint("batch d"), HookPoint("batch d")

        def forward(self, x):
            return self.second(self.first((x * 2)[:, :3]))

    _, cache = HookedRunner(Twice().eval()).run_with_cache(torch.ones(4, 6))
    assert cache.nbytes == 4 * 3 * 4
    assert torch.equal(cache["first"], cache["second"])


def test_an_expanded_value_stays_small(split, x):
    _, cache = HookedRunner(split).run_with_cache(x, names="spread")
    assert cache["spread"].shape == (2, 4, 10)
    assert cache.nbytes == 10 * 4
    assert torch.equal(cache["spread"][1, 2], split.both.bias)


def test_views_of_the_callers_input(split, x):
    _, cache = HookedRunner(split).run_with_cache(x, names=["part"])
    assert torch.equal(cache["part"], x[:, :, :2])
    assert cache.nbytes == 2 * NUMBERS
    _, cache = HookedRunner(split).run_with_cache(x, names=["given", "part"])
    assert cache.nbytes == 5 * NUMBERS
    large = torch.randn(2, 4, 50)
    _, cache = HookedRunner(split).run_with_cache(large[..., :5], names=["given"])
    assert cache.nbytes == 5 * NUMBERS


def test_the_whole_is_freed(split, x):
    alive = []
    handle = split.both.register_forward_hook(
        lambda module, args, output: alive.append(weakref.ref(output.untyped_storage()))
    )
    gc.disable()
    try:
        with torch.no_grad():
            _, small = HookedRunner(split).run_with_cache(x, names="small")
            _, both = HookedRunner(split).run_with_cache(x, names=["small", "large"])
    finally:
        gc.enable()
        handle.remove()
    assert small["small"].untyped_storage().nbytes() == small["small"].nbytes
    assert both["small"].untyped_storage().nbytes() == 10 * NUMBERS


def test_undetached_values_are_the_ones_that_lead_to_the_output(split, x):
    """So a gradient can be asked of them; a copy would lie beside the path."""
    runner = HookedRunner(split)
    output, cache = runner.run_with_cache(x, names="small", detach=False)
    (ours,) = torch.autograd.grad(output.sum(), cache["small"], retain_graph=True)
    output, watched = runner.run_with_cache(x, names="small", grads=True)
    output.sum().backward()
    torch.testing.assert_close(ours, watched.grads["small"])
    assert ours.any()
    split.zero_grad()
    cache["small"].sum().backward()
    assert split.both.weight.grad[:3].any()
    assert not split.both.weight.grad[3:].any()


def test_undetached_values_of_the_transformer(model, runner, tokens):
    """Queries, keys and values may be parts of one map's output."""
    logits, cache = runner.run_with_cache(tokens, names="blocks.*.attn.v", detach=False)
    ours = torch.autograd.grad(logits.sum(), list(cache.values()))
    logits, watched = runner.run_with_cache(tokens, names="blocks.*.attn.v", grads=True)
    logits.sum().backward()
    for gradient, name in zip(ours, cache, strict=True):
        torch.testing.assert_close(gradient, watched.grads[name])


def test_values_alone_do_not_keep_queries_and_keys_alive(model, runner, tokens):
    for part in ("q", "k", "v"):
        _, cache = runner.run_with_cache(tokens, names=f"blocks.*.attn.{part}")
        assert cache.nbytes == 3 * 4 * 7 * 10 * 4  # layers, batch, positions, width, bytes
    captured = runner.capture(tokens, names="blocks.1.attn.v")
    assert captured.nbytes == 4 * 7 * 10 * 4
    _, every = runner.run_with_cache(tokens, mode="full")
    parts = [every[part, 1] for part in ("q", "k", "v")]
    own = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    assert sum(own.values()) == 3 * 4 * 7 * 10 * 4
    assert every.nbytes == runner.plan(tokens, mode="full").nbytes


@pytest.mark.parametrize("transform", ["grad", "vmap", "jacrev"])
def test_values_are_kept_inside_the_transforms_of_torch(transform):
    """Their tensors have no memory that could be looked at."""

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = HookPoint("d")

        def forward(self, x):
            return self.part((x * 3)[:2]) ** 2

    runner = HookedRunner(Small().eval())

    def part(x, detach=False):
        return runner.run_with_cache(x, detach=detach)[1]["part"]

    x = torch.arange(1.0, 6.0)
    if transform == "grad":
        given = torch.func.grad(lambda x: part(x).sum())(x)
        assert given.tolist() == [3, 3, 0, 0, 0]
    elif transform == "vmap":
        given = torch.func.vmap(part)(torch.stack([x, -x]))
        assert given.tolist() == [[3, 6], [-3, -6]]
        given = torch.func.vmap(lambda x: part(x, detach=True))(torch.stack([x, -x]))
        assert given.tolist() == [[3, 6], [-3, -6]]
    else:
        assert torch.func.jacrev(part)(x).tolist() == [[3, 0, 0, 0, 0], [0, 3, 0, 0, 0]]
