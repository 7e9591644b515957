"""What a run keeps, what an edit changes, and what is left on the model afterwards."""

import copy

import pytest
import torch
from torch import nn

from hooks import (
    ContextError,
    EditError,
    HookedRunner,
    HookError,
    HookPoint,
    Mode,
    ModeError,
    NeverFiredError,
    UnknownNameError,
)


def hook_counts(model):
    return [
        (name, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
        for name, m in model.named_modules()
    ]


def test_no_hooks_is_bitwise_the_model_without_points(model, tokens):
    with_points = model(tokens)
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, HookPoint):
                setattr(module, name, nn.Identity())
    assert torch.equal(with_points, model(tokens))


def test_a_cached_run_returns_the_models_own_output(model, runner, tokens):
    plain = model(tokens)
    output, _ = runner.run_with_cache(tokens, names="blocks.*.resid_post")
    assert torch.equal(output, plain)


def test_every_point_lies_on_the_compute_path(model, runner, tokens):
    plain = model(tokens)
    for name in runner.points:
        noise = torch.Generator().manual_seed(5)

        def nudge(value, point, noise=noise):
            return value * 1.1 + 0.1 * torch.randn(value.shape, generator=noise)

        edited = runner.run_with_hooks(tokens, hooks={name: nudge})
        assert (edited - plain).abs().max() > 1e-3, name


def test_full_mode_keeps_every_point_with_the_axes_it_declares(runner, tokens):
    _, cache = runner.run_with_cache(tokens)
    assert list(cache) == list(runner.points)
    sizes = dict(
        batch=4, pos=7, query=7, key=7, head=2, kv_head=2, d_head=5, d_model=10, d_mlp=13
    ) | {"1": 1}
    for name, value in cache.items():
        assert value.shape == tuple(sizes[axis] for axis in cache.axes(name)), name


def test_residual_and_attention_identities(model, runner, tokens):
    _, cache = runner.run_with_cache(tokens)
    assert torch.equal(cache["resid_pre", 0], cache["embed"] + cache["pos_embed"])
    for layer in range(3):
        get = lambda short, layer=layer: cache[short, layer]  # noqa: E731
        assert torch.equal(get("resid_mid"), get("resid_pre") + get("attn_out"))
        assert torch.equal(get("resid_post"), get("resid_mid") + get("mlp_out"))
        rows = get("pattern").sum(-1)
        torch.testing.assert_close(rows, torch.ones_like(rows))
        products = torch.einsum("bqhd,bkhd->bhqk", get("q"), get("k")) / 5**0.5
        torch.testing.assert_close(get("scores"), products)
        assert get("scores").isfinite().all()
        z = torch.einsum("bhqk,bkhd->bqhd", get("pattern"), get("v"))
        torch.testing.assert_close(get("z"), z)
        heads = torch.einsum("bqhd,hdm->bqm", get("z"), model.W_O[layer]) + model.b_O[layer]
        torch.testing.assert_close(get("attn_out"), heads)


@pytest.mark.parametrize(
    ("mode", "last_parts"),
    [
        ("none", set()),
        ("svd_targets", {"scores", "pattern", "v"}),
        ("residual", {"scores", "pattern", "v", "resid_pre", "resid_mid", "resid_post"}),
    ],
)
def test_modes_choose_by_the_last_part_of_a_name(runner, tokens, mode, last_parts):
    _, cache = runner.run_with_cache(tokens, mode=mode)
    assert {name.rpartition(".")[2] for name in cache} == last_parts
    assert len(cache) == 3 * len(last_parts)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("embed", ["embed"]),
        ("blocks.*.attn.q", [f"blocks.{n}.attn.q" for n in range(3)]),
        (lambda point: point.axes == ("batch", "pos", "d_mlp"), [f"blocks.{n}.mlp.{p}" for n in range(3) for p in ("pre", "post")]),
        (["ln_final.scale", "embed"], ["embed", "ln_final.scale"]),
        ([Mode.none, "pos_embed"], ["pos_embed"]),
        ("blocks.1.mlp", ["blocks.1.mlp"]),
        ((name for name in ["embed", "pos_embed"]), ["embed", "pos_embed"]),
        ("blocks.?.mlp", ["blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp"]),
    ],
)  # fmt: skip
def test_selectors(runner, tokens, selector, expected):
    _, cache = runner.run_with_cache(tokens, names=selector)
    assert list(cache) == expected


@pytest.mark.parametrize(
    ("selector", "match"),
    [
        ("blocks.1.attn.patern", "close matches: blocks.1.attn.pattern"),
        ("pattern", "close matches: blocks.0.attn.pattern"),
        ("full", "no hook point is named 'full', which is a mode: mode='full'"),
        ("blocks.*.attn.nothing", "no hook point is named"),
        (lambda point: False, "predicate"),
        ([], "an empty selector matches no hook point"),
    ],
)
def test_a_selector_that_matches_nothing_is_an_error(runner, tokens, selector, match):
    for run in (
        lambda: runner.run_with_cache(tokens, names=selector),
        lambda: runner.capture(tokens, names=selector),
        lambda: runner.plan(tokens, names=selector),
    ):
        with pytest.raises(UnknownNameError, match=match):
            run()


def test_close_matches_are_kept_as_an_attribute(runner, tokens):
    with pytest.raises(UnknownNameError) as caught:
        runner.run_with_hooks(tokens, hooks={"blocks.2.atn_out": lambda value, point: None})
    assert caught.value.close_matches[0] == "blocks.2.attn_out"


def test_a_mode_that_the_model_lacks_is_an_error():
    runner = HookedRunner(nn.Sequential(nn.Linear(2, 3)).eval())
    with pytest.raises(UnknownNameError, match="mode 'svd_targets' matches no hook point"):
        runner.run_with_cache(torch.ones(1, 2), mode="svd_targets")


def test_unknown_mode_and_double_choice(runner, tokens):
    with pytest.raises(
        ValueError, match="a mode is one of none, svd_targets, residual, full, not 'everything'"
    ):
        runner.run_with_cache(tokens, mode="everything")
    with pytest.raises(ValueError, match="give one of them"):
        runner.run_with_cache(tokens, names="embed", mode="full")


@pytest.mark.usefixtures("unchecked")
def test_a_selector_of_another_kind_is_an_error(runner):
    with pytest.raises(TypeError, match="a selector is a name"):
        runner.hooks({3: lambda value, point: None})


def test_a_mode_on_a_model_in_training_says_to_call_eval(model, runner, tokens):
    model.train()
    for mode in ("svd_targets", "residual", "full", None):
        with pytest.raises(ModeError, match=r"call model.eval\(\)"):
            runner.run_with_cache(tokens, mode=mode)
    for names in (Mode.full, ["embed", [Mode.residual]]):
        with pytest.raises(ModeError, match=r"call model.eval\(\)"):
            runner.capture(tokens, names=names)
    _, cache = runner.run_with_cache(tokens, mode="none")
    assert len(cache) == 0
    _, cache = runner.run_with_cache(tokens, names="embed")
    assert list(cache) == ["embed"]


def test_hooks_receive_the_point_and_may_leave_the_value(model, runner, tokens):
    seen = []
    output = runner.run_with_hooks(
        tokens, hooks={"blocks.1.attn.z": lambda value, point: seen.append((value.shape, point))}
    )
    ((shape, point),) = seen
    assert shape == (4, 7, 2, 5)
    assert (point.name, point.axes) == ("blocks.1.attn.z", ("batch", "pos", "head", "d_head"))
    assert torch.equal(output, model(tokens))


def test_an_edit_reaches_the_output_as_computed_by_hand(model, runner, tokens):
    resid = torch.randn(4, 7, 10, generator=torch.Generator().manual_seed(2))
    edited = runner.run_with_hooks(tokens, hooks={"blocks.2.resid_post": lambda v, p: resid})
    assert torch.equal(edited, model.unembed(resid))


def test_contexts_nest_and_inner_hooks_see_what_outer_ones_returned(runner, tokens):
    with (
        runner.hooks({"blocks.0.resid_pre": lambda value, point: value * 0 + 2}),
        runner.hooks({"blocks.0.resid_pre": lambda value, point: value * 3}),
    ):
        _, cache = runner.run_with_cache(tokens, names="blocks.0.resid_pre")
    assert torch.equal(cache["resid_pre", 0], torch.full((4, 7, 10), 6.0))


def test_two_selectors_at_one_point_act_in_the_order_given(runner, tokens):
    edits = {
        "blocks.*.mlp_out": lambda value, point: value * 0 + 1,
        "blocks.1.mlp_out": lambda value, point: value + 4,
    }
    with runner.hooks(edits):
        _, cache = runner.run_with_cache(tokens, names="blocks.*.mlp_out")
    assert [float(v.mean()) for v in cache.values()] == [1, 5, 1]


def test_writing_into_the_activation_is_an_edit_and_spares_other_points(runner, tokens):
    _, plain = runner.run_with_cache(tokens)

    def write(value, point):
        value[:, 3] = 0

    with runner.hooks({"blocks.1.resid_pre": write}):
        _, cache = runner.run_with_cache(tokens)
    assert torch.equal(cache["resid_post", 0], plain["resid_post", 0])
    assert not cache["resid_pre", 1][:, 3].any()
    assert torch.equal(cache["resid_pre", 1][:, 4:], plain["resid_pre", 1][:, 4:])


@pytest.mark.parametrize(
    ("result", "match"),
    [
        (lambda v: v[:1], r"blocks.1.attn.z \[batch pos head d_head\].*shape \(4, 7, 2, 5\).*\(1, 7, 2, 5\)"),
        (lambda v: v.double(), "dtype torch.float32.*torch.float64"),
        (lambda v: v.to("meta"), "device cpu.*meta"),
        (lambda v: 3.0, "returns a tensor or None, not float"),
    ],
)  # fmt: skip
def test_an_edit_that_the_point_cannot_carry(model, runner, tokens, result, match):
    before = hook_counts(model)
    with pytest.raises(EditError, match=match):
        runner.run_with_hooks(tokens, hooks={"blocks.1.attn.z": lambda v, p: result(v)})
    assert hook_counts(model) == before


def test_hooks_are_removed_after_an_exception_and_the_users_own_stay(model, runner, tokens):
    plain, calls = model(tokens), []
    own = model.blocks[1].attn.z.register_forward_hook(lambda *args: calls.append(1))
    before = hook_counts(model)

    def fail(value, point):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"), runner.hooks({"*": lambda v, p: v + 1}):
        runner.run_with_hooks(tokens, hooks={"blocks.2.*": fail})
    assert hook_counts(model) == before
    assert torch.equal(model(tokens), plain)
    assert calls
    own.remove()


def test_a_failed_entry_leaves_nothing(model, runner, tokens, monkeypatch):
    before = hook_counts(model)
    context = runner.hooks({"*": lambda value, point: value * 2})

    def refuse(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(model.ln_final.scale, "register_forward_hook", refuse)
    with pytest.raises(MemoryError), context:
        pass
    assert hook_counts(model) == before
    assert torch.equal(model(tokens), runner.run_with_cache(tokens, mode="none")[0])


def test_a_context_serves_once(runner, tokens):
    context = runner.hooks({"embed": lambda value, point: None})
    with context:
        runner.run_with_cache(tokens, mode="none")
    with pytest.raises(ContextError, match="one `with`"), context:
        pass


def test_capture_equals_a_full_run_and_goes_no_further(model, runner, tokens):
    names = ["embed", "blocks.1.resid_mid"]
    _, full = runner.run_with_cache(tokens, names=names)
    reached = []
    model.blocks[1].mlp.register_forward_hook(lambda *args: reached.append("mlp 1"))
    model.blocks[2].register_forward_pre_hook(lambda *args: reached.append("block 2"))
    cache = runner.capture(tokens, names=names)
    assert reached == []
    assert list(cache) == names
    assert all(torch.equal(cache[name], full[name]) for name in cache)
    assert list(runner.capture(tokens, names="blocks.1.resid_post")) == ["blocks.1.resid_post"]
    assert reached == ["mlp 1"]


def test_capture_under_edits_of_points_that_it_does_not_reach(runner, tokens):
    with runner.hooks({"blocks.*.resid_pre": lambda value, point: value + 1}):
        cache = runner.capture(tokens, names="blocks.0.resid_pre")
    plain = runner.capture(tokens, names="blocks.0.resid_pre")
    assert torch.equal(cache["resid_pre", 0], plain["resid_pre", 0] + 1)


def test_a_model_that_swallows_exceptions_cannot_swallow_the_stop():
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 5)

        def forward(self, x):
            try:
                return self.second(self.first(x))
            except Exception:
                return None

    model = Stubborn()
    cache = HookedRunner(model).capture(torch.ones(1, 2), names="first")
    assert torch.equal(cache["first"], model.first(torch.ones(1, 2)))


def test_captures_nest(runner, tokens):
    inner = []

    def look(value, point):
        inner.append(runner.capture(tokens, names="blocks.0.resid_post"))

    cache = None
    with runner.hooks({"blocks.1.attn_out": look}):
        cache = runner.capture(tokens, names="blocks.1.resid_mid")
    assert list(cache) == ["blocks.1.resid_mid"]
    assert list(inner[0]) == ["blocks.0.resid_post"]


class Branching(nn.Module):
    """Uses one of its two parts, and one of them twice if asked."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, twice=False):
        return self.left(self.left(x)) if twice else self.left(x)


def test_a_point_that_never_fires_is_an_error_in_every_kind_of_run():
    model, x = Branching().eval(), torch.ones(2, 3)
    runner = HookedRunner(model)
    before = hook_counts(model)
    runs = [
        lambda: runner.run_with_cache(x, names=["left", "right"]),
        lambda: runner.capture(x, names="right"),
        lambda: runner.run_with_hooks(x, hooks={"right": lambda value, point: value}),
        lambda: runner.plan(x, names="right"),
    ]
    for run in runs:
        with pytest.raises(NeverFiredError, match="never reached by this forward pass: right"):
            run()
    with pytest.raises(NeverFiredError), runner.hooks({"right": lambda value, point: value}):
        model(x)
    assert hook_counts(model) == before


def test_a_point_that_fires_twice_is_an_error_in_a_cache():
    runner = HookedRunner(Branching().eval())
    with pytest.raises(HookError, match="left fired twice"):
        runner.run_with_cache(torch.ones(2, 3), twice=True, names="left")


def test_a_value_that_the_model_overwrites_in_place_is_an_error():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True)).eval()
    runner = HookedRunner(model)
    with pytest.raises(HookError, match="0 was changed in place"):
        runner.run_with_cache(torch.ones(2, 3), names=["0", "1"])
    _, cache = runner.run_with_cache(torch.ones(2, 3), names="0", dtype=torch.float64)
    assert torch.equal(cache["0"], model[0](torch.ones(2, 3)).double())


def test_a_value_of_another_rank_than_its_axes_is_an_error():
    model = nn.Sequential(HookPoint("batch pos d_model"))
    with pytest.raises(HookError, match=r"0 \[batch pos d_model\] carried .*\(2, 3\)"):
        HookedRunner(model).run_with_cache(torch.ones(2, 3), names="0")


@pytest.mark.parametrize("axes", ["", "batch batch", "batch d-model", "2"])
def test_axes_are_distinct_identifiers(axes):
    with pytest.raises(ValueError, match="axes are distinct identifiers"):
        HookPoint(axes)


def test_table_lists_every_point_with_axes_and_meaning(runner):
    table = runner.table()
    assert len(table.splitlines()) == 2 + 17 + 2
    assert "blocks.0-2.attn.z          batch pos head d_head     pattern·v" in table
    assert all(point.meaning for point in runner.points.values())


def test_printed_models_show_axes(model):
    assert "HookPoint(batch pos head d_head)" in repr(model)


def test_a_model_run_inside_a_hook_is_a_plain_run(model, runner, tokens):
    other = torch.flip(tokens, (0, 1))
    expected = runner.capture(other, names="blocks.1.attn_out")["attn_out", 1]

    def resample(value, point):
        return runner.capture(other, names=point.name)[point.name]

    with runner.hooks({"blocks.1.attn_out": resample}):
        _, cache = runner.run_with_cache(tokens, names="blocks.1.*")
        captured = runner.capture(tokens, names="blocks.1.resid_mid")
    assert torch.equal(cache["attn_out", 1], expected)
    torch.testing.assert_close(captured["resid_mid", 1], cache["resid_mid", 1])
    resid = runner.capture(tokens, names="blocks.1.resid_pre")["resid_pre", 1]
    torch.testing.assert_close(captured["resid_mid", 1], resid + expected, atol=1e-5, rtol=0)


def test_a_capture_inside_the_models_own_forward_lets_an_outer_one_stop(model):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))

        def forward(self, x):
            return HookedRunner(self.inner).capture(x, names="1")["1"]

    nested, x = Nested().eval(), torch.ones(2, 3)
    cache = HookedRunner(nested).capture(x, names="inner.0")
    assert torch.equal(cache["inner.0"], nested.inner[0](x))


def test_a_copy_of_a_model_made_under_hooks_is_not_edited(model, runner, tokens):
    plain = model(tokens)
    with runner.hooks({"blocks.1.attn.pattern": lambda value, point: value * 0}):
        copied = copy.deepcopy(model)
        runner.run_with_cache(tokens, mode="none")
    assert torch.equal(copied(tokens), plain)


def test_inference_mode(model, runner, tokens):
    with torch.inference_mode():
        _, cache = runner.run_with_cache(tokens)
        _, lazy = runner.run_with_cache(tokens, lazy=True)

        def write(value, point):
            value[:, 3] = 0

        edited = runner.run_with_hooks(tokens, hooks={"blocks.1.resid_pre": write})
        expected = runner.run_with_hooks(
            tokens, hooks={"blocks.1.resid_pre": lambda v, p: v * (torch.arange(7) != 3)[:, None]}
        )
        assert torch.equal(edited, expected)
        for name in cache:
            torch.testing.assert_close(lazy[name], cache[name], atol=1e-5, rtol=0)
        inplace = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True)).eval()
        _, kept = HookedRunner(inplace).run_with_cache(torch.ones(2, 3), names="0")
        assert torch.equal(kept["0"], inplace[0](torch.ones(2, 3)))


def test_a_cached_weight_is_a_copy(tokens):
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.same = nn.Identity()

        def forward(self, x):
            return x + self.same(self.weight[:2])

    model = Weighted().eval()
    _, cache = HookedRunner(model).run_with_cache(torch.ones(2), names="same")
    with torch.no_grad():
        model.weight.mul_(5)
    assert cache["same"].tolist() == [1.0, 1.0]


def test_part_of_a_model_in_training_counts(model, runner, tokens):
    model.blocks[1].mlp.dropout.train()
    with pytest.raises(ModeError, match=r"call model.eval\(\)"):
        runner.run_with_cache(tokens)


@pytest.mark.usefixtures("unchecked")
def test_a_hook_that_is_no_function_is_named(runner):
    with pytest.raises(TypeError, match="the hook at 'embed' is a function, not 3"):
        runner.hooks({"embed": 3})


def test_edits_through_other_views_of_the_copy_count(runner, tokens):
    def write(value, point):
        value.detach().numpy()[:] = 0

    with runner.hooks({"blocks.0.mlp_out": write}):
        _, cache = runner.run_with_cache(tokens, names="blocks.0.mlp_out")
    assert not cache["mlp_out", 0].any()
