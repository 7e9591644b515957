"""Values of several runs joined as one run, and the memory that a cache keeps alive."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

from hooks import HookedRunner, HookError, HookPoint, NeverFiredError
from hooks.capture import join

# Sizes all differ: batch 2, positions 3 and 1 and 4, width 5.


@pytest.mark.parametrize(
    ("axes", "shape", "at"),
    [("batch pos d", (2, 8, 5), 1), ("pos", (8,), 0), ("batch head d pos", (2, 7, 5, 8), 3)],
)
def test_positions_follow_each_other(axes, shape, at):
    whole = torch.randn(shape)
    assert torch.equal(join(whole.split((3, 1, 4), at), "here", tuple(axes.split())), whole)


@pytest.mark.parametrize(
    ("axes", "parts", "joined"),
    [
        # The runs have two queries, one query, and two queries. In the last run, a window has
        # dropped the first three keys.
        (
            "query key",
            [[[11, 12], [21, 22]], [[31, 32, 33]], [[44, 45], [54, 55]]],
            [
                [11, 12, 0, 0, 0],
                [21, 22, 0, 0, 0],
                [31, 32, 33, 0, 0],
                [0, 0, 0, 44, 45],
                [0, 0, 0, 54, 55],
            ],
        ),
        # Before the first run, the cache of keys already had two positions.
        ("query key", [[[13, 14, 15]], [[23, 24, 25, 26]]], [[13, 14, 15, 0], [23, 24, 25, 26]]),
        ("key pos", [[[1]], [[2], [3]]], [[1, 2], [0, 3]]),
    ],
)
def test_keys_end_where_their_queries_end(axes, parts, joined):
    given = join([torch.tensor(part) for part in parts], "here", tuple(axes.split()))
    assert given.tolist() == joined


@pytest.mark.parametrize("axes", ["", "batch d", "query pos d", "batch key"])
def test_values_without_one_axis_of_positions_are_refused(axes):
    with pytest.raises(HookError, match=f"here .*{axes}"):
        join([torch.ones(2, 3, 5)], "here", tuple(axes.split()))


# Tests of run_with_cache(run=...), where one call runs the model several times.


class Toy(nn.Module):
    """A model that doubles and squares its tokens, in a buffer that every run overwrites."""

    def __init__(self):
        super().__init__()
        self.twice, self.square = HookPoint("batch pos"), HookPoint("batch pos")
        self.ids = HookPoint("pos batch")
        self.unnamed = nn.Identity()
        self.room = torch.zeros(2, 4)

    def forward(self, x):
        room = self.room[:, : x.shape[1]]
        room.copy_(x * 2)
        self.ids(x.long().T)
        return self.unnamed(self.square(self.twice(room) ** 2))


@pytest.fixture
def toy():
    return Toy().eval()


X = torch.arange(1.0, 17.0).view(2, 8)


def in_pieces(model, x, sizes, scale=1.0):
    return [model(piece * scale) for piece in x.split(sizes, 1)]


@pytest.mark.parametrize("inference", [True, False])
def test_run_takes_the_arguments_and_gives_the_output(toy, inference):
    run = functools.partial(in_pieces, toy)
    with torch.inference_mode(inference):
        output, cache = HookedRunner(toy).run_with_cache(X, [3, 1, 4], scale=0.5, run=run)
    assert [part.shape[1] for part in output] == [3, 1, 4]
    assert torch.equal(torch.cat(output, 1), X**2)
    assert torch.equal(cache["twice"], X)
    assert torch.equal(cache["square"], X**2)
    assert torch.equal(cache["ids"], (X / 2).long().T)
    assert cache.axes("twice") == ("batch", "pos")
    assert list(cache) == ["twice", "square", "ids"]


def test_names_types_and_edits_act_in_every_run(toy):
    runner, run = HookedRunner(toy), functools.partial(in_pieces, toy)
    with runner.hooks({"twice": lambda value, point: value + 1}):
        _, cache = runner.run_with_cache(
            X, [3, 4, 1], names=["twice", "square", "ids"], dtype=torch.float64, run=run
        )
    assert cache["ids"].dtype == torch.int64
    toy(X[:, :3] * 0)
    assert torch.equal(cache["twice"], 2 * X.double() + 1), "a later run writes where this one did"
    assert torch.equal(cache["square"], (2 * X.double() + 1) ** 2)


class Reads(nn.Module):
    """A model with arguments of several kinds."""

    def __init__(self):
        super().__init__()
        self.point = HookPoint("batch pos")

    def forward(
        self,
        ids,
        attention_mask=None,
        scale=1.0,
        step=0,
        places=None,
        kinds=None,
        rows=None,
        **more,
    ):
        return self.point(ids * scale)


def test_a_joined_run_has_the_inputs_of_all_runs():
    model, ids = Reads().eval(), torch.arange(16).view(2, 8)
    mask = torch.ones(2, 8).tril(6)

    def run(ids):
        for start, stop in ((0, 5), (5, 6), (6, 8)):
            seen = mask[:, :stop]
            options = {"scale": 0.5, "step": start, "late": start > 5}
            options["places"] = torch.arange(start, stop)
            # `rows` has another number of rows in each run, and `kinds` is not given in all runs,
            # although both have a column for each token. So they are not joined.
            options["rows"] = torch.ones(start + 1, stop - start, dtype=torch.int64)
            if start:
                options["kinds"] = ids[:, start:stop]
            model(ids[:, start:stop], seen, **options)

    _, cache = HookedRunner(model).run_with_cache(ids, run=run)
    assert cache["point"].shape == (2, 8)
    assert torch.equal(cache.inputs["ids"], ids)
    assert torch.equal(cache.inputs["attention_mask"], mask)
    # Only inputs that fit together in all runs are joined, and numbers that are the same in all.
    assert cache.inputs.keys() == {"ids", "attention_mask", "scale"}
    assert cache.inputs["scale"] == 0.5
    ids.zero_()
    assert cache.inputs["ids"][1, 7] == 15


def test_runs_that_fail(toy):
    runner = HookedRunner(toy)
    with pytest.raises(ZeroDivisionError):
        runner.run_with_cache(run=lambda: (toy(X[:, :2]), 1 / 0))
    with pytest.raises(NeverFiredError, match="twice"):
        runner.run_with_cache(run=lambda: None)
    with pytest.raises(NeverFiredError, match="iterator"):
        runner.run_with_cache(X, run=lambda x: (toy(part) for part in x.split(4, 1)))
    with pytest.raises(HookError, match="unnamed"):
        runner.run_with_cache(X[:, :4], names="unnamed", run=toy)
    # A point must have one value in each call of the model.
    with pytest.raises(HookError, match="0.twice"):
        HookedRunner(nn.Sequential(toy, toy).eval()).run_with_cache(X[:, :3], names="0.twice")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in toy.modules())


def test_options_that_speak_of_one_run_are_refused_before_it(toy):
    runner, calls = HookedRunner(toy), []
    for option in (dict(lazy=True), dict(grads=True), dict(pos=[0])):
        with pytest.raises(ValueError, match=f"{next(iter(option))}="):
            runner.run_with_cache(run=lambda: calls.append(1), **option)
    toy.train()
    with pytest.raises(HookError, match=r"eval\(\)"):
        runner.run_with_cache(run=lambda: calls.append(1))
    assert not calls


def test_graphs_reach_through_the_joined_values():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), HookPoint("batch pos d")).eval()
    run, x = functools.partial(in_pieces, model), X[..., None]
    _, cache = HookedRunner(model).run_with_cache(x, [4, 4], names="1", run=run, detach=False)
    cache["1"].sum().backward()
    assert model[0].weight.grad == X.sum()


# Tests of the memory that a cache keeps alive.


class Split(nn.Module):
    """A linear map whose output is split into two parts of unequal size, each with a point."""

    def __init__(self):
        super().__init__()
        self.both = nn.Linear(5, 10)
        for name in ("small", "again", "large", "spread", "given", "part"):
            setattr(self, name, HookPoint("batch pos d"))

    def forward(self, x):
        small, large = self.both(self.given(x)).split((3, 7), -1)
        spread = self.spread(self.both.bias.detach().clone().expand(2, 4, 10))
        part = self.part(x[:, :, :2])
        total = self.again(self.small(small)).square().sum(-1) * self.large(large).sum(-1)
        return total * spread.sum(-1) + part.sum(-1)


@pytest.mark.parametrize(
    ("names", "width"),  # `width` is how many numbers are kept at each of the 2 x 4 positions
    [
        ("small", 3),
        ("large", 7),
        (["small", "large", "both"], 3 + 7 + 10),
        (["small", "again"], 3),  # both names have the same tensor
        ("spread", 10 / 8),  # an expanded value stays small
        ("part", 2),  # a view of the caller's input
        (["given", "part"], 5 + 2),  # the caller owns them, so each is copied
    ],
)
def test_a_cache_keeps_no_more_than_its_values_need(names, width):
    split, x = Split().eval(), torch.randn(2, 4, 5)
    small, large = split.both(x).split((3, 7), -1)
    expected = dict(small=small, again=small, large=large, both=split.both(x), given=x)
    expected |= dict(part=x[:, :, :2], spread=split.both.bias.expand(2, 4, 10))
    _, cache = HookedRunner(split).run_with_cache(x, names=names)
    assert cache.nbytes == width * 2 * 4 * 4
    for name, value in cache.items():
        assert torch.equal(value, expected[name]), name


class Sharing(nn.Linear):
    """A module with points at tensors that other code can write into.

    They are inputs, outputs, weights, buffers and NumPy arrays.
    """

    def __init__(self):
        super().__init__(5, 5)
        self.register_buffer("keys", torch.zeros(2, 5))
        self.room = np.zeros((2, 5), "float32")
        for name in ("given", "w", "stored", "kept", "inner", "more", "out"):
            setattr(self, name, HookPoint("batch d"))

    def forward(self, x, more):
        self.w(self.weight[:2])
        keys, room = self.keys.copy_(x.detach()), torch.from_numpy(self.room).copy_(x.detach() * 3)
        inner = self.inner(super().forward(self.given(x) + self.stored(keys) + self.kept(room)))
        return self.out(inner * self.more(more))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(("traced", "detach"), [(True, True), (False, True), (False, False)])
def test_values_are_the_caches_own(mode, traced, detach):
    """The values of a cache do not change if the caller writes into all tensors of the run."""
    model, x = Sharing().eval().requires_grad_(traced), torch.randn(2, 5, requires_grad=traced)
    more = torch.randn(2, 5, requires_grad=traced)
    inner = x @ model.weight.T * 5 + model.bias
    expected = dict(given=x, w=model.weight[:2], stored=x, kept=x * 3, inner=inner, more=more)
    expected["out"] = inner * more
    expected = {name: value.detach().clone() for name, value in expected.items()}
    with mode():
        output, cache = HookedRunner(model).run_with_cache(x, more=more, detach=detach)
    with torch.no_grad() if mode is torch.enable_grad else mode():
        for tensor in (x, more, output, model.weight, model.keys):
            tensor.zero_()
    model.room[:] = 0
    for name, value in expected.items():
        torch.testing.assert_close(cache[name], value)


def test_gradients_are_the_caches_own():
    model, x = nn.Sequential(HookPoint("d"), HookPoint("d")), torch.ones(3, requires_grad=True)
    output, cache = HookedRunner(model.eval()).run_with_cache(x, grads=True)
    (output * 2).sum().backward(retain_graph=True)
    first = dict(cache.grads)
    (output * 5).sum().backward(retain_graph=True)
    second = dict(cache.grads)
    x.grad.zero_()
    for name in ("0", "1"):
        assert first[name].tolist() == [2, 2, 2]
        assert second[name].tolist() == [5, 5, 5]


def test_undetached_values_are_on_the_path_to_the_output(runner, tokens):
    """Gradients reach these tensors. A copy would not be on the path of the gradient."""
    logits, cache = runner.run_with_cache(tokens, names="blocks.*.attn.v", detach=False)
    ours = torch.autograd.grad(logits.sum(), list(cache.values()))
    logits, watched = runner.run_with_cache(tokens, names="blocks.*.attn.v", grads=True)
    logits.sum().backward()
    for gradient, name in zip(ours, cache, strict=True):
        assert gradient.any()
        torch.testing.assert_close(gradient, watched.grads[name])


def test_values_alone_do_not_keep_queries_and_keys_alive(runner, tokens):
    for part in ("q", "k", "v"):
        _, cache = runner.run_with_cache(tokens, names=f"blocks.*.attn.{part}")
        # The factors are layers, batch, positions, width and bytes per number.
        assert cache.nbytes == 3 * 4 * 7 * 10 * 4
    assert runner.capture(tokens, names="blocks.1.attn.v").nbytes == 4 * 7 * 10 * 4
    _, every = runner.run_with_cache(tokens, mode="full")
    storages = [every[part, 1].untyped_storage() for part in ("q", "k", "v")]
    own = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert sum(own.values()) == 3 * 4 * 7 * 10 * 4
    # Both names belong to the same tensor.
    names = ["blocks.0.resid_post", "blocks.1.resid_pre"]
    assert runner.run_with_cache(tokens, names=names)[1].nbytes == 4 * 7 * 10 * 4


def test_values_are_kept_inside_the_transforms_of_torch():
    """Inside transforms such as `torch.func.vmap`, the memory of tensors cannot be read."""

    model, x = nn.Sequential(HookPoint("d")).eval(), torch.arange(1.0, 6.0)
    model.forward = lambda x: model[0]((x * 3)[:2])

    def part(x, detach=False):
        return HookedRunner(model).run_with_cache(x, detach=detach)[1]["0"]

    assert torch.func.grad(lambda x: part(x).sum())(x).tolist() == [3, 3, 0, 0, 0]
    assert torch.func.jacrev(part)(x).tolist() == [[3, 0, 0, 0, 0], [0, 3, 0, 0, 0]]
    for detach in (False, True):
        both = torch.func.vmap(functools.partial(part, detach=detach))(torch.stack([x, -x]))
        assert both.tolist() == [[3, 6], [-3, -6]]
