"""The values that a run caches, the effect of an edit, and the state of the model afterwards."""

import copy
import warnings
from collections import OrderedDict
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from hooks import HookedRunner, HookPoint, Mode, Point
from hooks.base import errors
from hooks.names import resolve


def hook_counts(model):
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def leave(value, point):
    return None


def write(value, point):
    value[:, 3] = 0


def test_no_hooks_is_bitwise_the_model_without_points(model, runner, tokens):
    with_points = model(tokens)
    assert torch.equal(runner.run_with_cache(tokens, names="*.resid_post")[0], with_points)
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, HookPoint):
                setattr(module, name, nn.Identity())
    assert torch.equal(with_points, model(tokens))


def test_full_mode_keeps_every_point_with_the_axes_it_declares(runner, tokens):
    _, cache = runner.run_with_cache(tokens)
    assert list(cache) == list(runner.points)
    assert all(point.meaning for point in runner.points.values())
    assert "blocks.0-2.attn.z          batch pos head d_head     pattern·v" in runner.table()
    sizes = dict(batch=4, pos=7, query=7, key=7, head=2, kv_head=2, d_head=5, d_model=10, d_mlp=13)
    for name, value in cache.items():
        assert value.shape == tuple(sizes.get(axis, 1) for axis in cache.axes(name)), name


TARGETS = {"scores", "pattern", "v"}
STREAM = {"resid_pre", "resid_mid", "resid_post"}


@pytest.mark.parametrize(
    ("mode", "last_parts"),
    [("none", set()), ("svd_targets", TARGETS), ("residual", TARGETS | STREAM)],
)
def test_modes_choose_by_the_last_part_of_a_name(runner, tokens, mode, last_parts):
    _, cache = runner.run_with_cache(tokens, mode=mode)
    assert {name.rpartition(".")[2] for name in cache} == last_parts
    assert len(cache) == 3 * len(last_parts)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("blocks.*.attn.q", [f"blocks.{n}.attn.q" for n in range(3)]),
        (
            lambda point: "d_mlp" in point.axes,
            [f"blocks.{n}.mlp.{p}" for n in range(3) for p in ("pre", "post")],
        ),
        (["ln_final.scale", "embed"], ["embed", "ln_final.scale"]),
        ([Mode.none, "pos_embed"], ["pos_embed"]),
        ((name for name in ["embed", "pos_embed"]), ["embed", "pos_embed"]),
        ("blocks.?.mlp", ["blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp"]),
    ],
)
def test_selectors(runner, tokens, selector, expected):
    _, cache = runner.run_with_cache(tokens, names=selector)
    assert list(cache) == expected


@pytest.mark.parametrize("name", ["z", "mlp.post", "resid_pre"])
def test_the_last_part_of_names_is_not_a_name(runner, tokens, name):
    message = rf"named '{name}'; '\*\.{name}' selects this point in every layer"
    for run in (runner.run_with_cache, runner.capture, runner.plan):
        with pytest.raises(errors.UnknownNameError, match=message):
            run(tokens, names=name)
    with pytest.raises(errors.UnknownNameError, match=message):
        runner.run_with_hooks(tokens, hooks={name: lambda value, point: value})
    assert runner.capture(tokens, names=f"*.{name}")


@pytest.mark.parametrize(
    ("selector", "close"),
    [
        ("blocks.1.atn.z", "blocks.1.attn.z"),
        ("full", None),
        (lambda point: False, None),
        ([], None),
    ],
)
def test_a_selector_that_matches_nothing_is_an_error(runner, tokens, selector, close):
    for run in (runner.run_with_cache, runner.capture, runner.plan):
        with pytest.raises(errors.UnknownNameError, match=close) as caught:
            run(tokens, names=selector)
        assert caught.value.close_matches[:1] == ((close,) if close else ())
    foreign = HookedRunner(nn.Sequential(OrderedDict(v=nn.ReLU(), resid_pre=nn.ReLU())).eval())
    for mode in ("svd_targets", "residual"):
        with pytest.raises(errors.UnknownNameError, match=mode):
            foreign.run_with_cache(tokens, mode=mode)


@pytest.mark.parametrize("selector", ["blocks.7.*", "blocks.7.attn.z", "*.7.attn.*"])
def test_a_layer_that_does_not_exist_is_named(runner, tokens, selector):
    n_layers = runner.model.config.n_layers
    with pytest.raises(errors.UnknownNameError, match=f"layers 0 to {n_layers - 1}; got 7"):
        runner.run_with_cache(tokens, names=selector)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", [("q", 3), torch.ones(2), 7, None])
def test_whatever_is_unknown_is_named(name):
    error = errors.unknown_name(name, ["a", "b"], "thing")
    assert repr(name) in str(error)
    assert error.close_matches == ()
    assert errors.unknown_name("head", [name, "heads"], "thing").close_matches[0] == "heads"


@pytest.mark.usefixtures("unchecked")
def test_a_name_is_found_without_a_scan_of_all():
    class Unscanned(dict):
        __iter__ = keys = values = items = None

    known = Unscanned(a=Point("a"), b=Point("b"))
    assert resolve("b", known) == {"b": Point("b")}


@pytest.mark.usefixtures("unchecked")
def test_arguments_that_cannot_be(runner, tokens):
    point = HookedRunner(nn.Sequential(HookPoint("batch pos d_model")))
    with pytest.raises(errors.HookError, match=r"0 \[batch pos d_model\].*\(2, 3\)"):
        point.run_with_cache(torch.ones(2, 3), names="0")
    for axes in ("", "batch batch", "batch d-model", "2"):
        with pytest.raises(ValueError, match=repr(axes)):
            HookPoint(axes)
    for hooks in ({3: leave}, {"embed": 3}):
        with pytest.raises(TypeError, match="3"):
            runner.hooks(hooks)
    for mode, error in (("everything", ValueError), ("", ValueError), (0, TypeError)):
        with pytest.raises(error, match=f"got {mode!r}"):
            runner.run_with_cache(tokens, mode=mode)
    with pytest.raises(TypeError, match="None"):
        runner.capture(tokens, names=None)
    with pytest.raises(ValueError, match=r"names=.*mode="):
        runner.run_with_cache(tokens, names="embed", mode="full")
    with pytest.raises(ValueError, match="grads=True"):
        runner.capture(tokens, names="embed", grads=True)


def test_cached_runs_have_gradients_only_if_they_are_asked_for(model, runner, tokens):
    logits, _ = runner.run_with_cache(tokens, names="*.z")
    assert not logits.requires_grad
    assert torch.is_grad_enabled()
    assert model(tokens).requires_grad
    assert runner.run_with_hooks(tokens, hooks={"embed": leave}).requires_grad
    assert runner.run_with_cache(tokens, names="*.z", grads=True)[0].requires_grad
    with_graph, kept = runner.run_with_cache(tokens, names="*.z", detach=False)
    assert kept["z", 1].requires_grad
    assert torch.equal(with_graph, logits)
    assert not runner.capture(tokens, names="*.z")["z", 1].requires_grad
    with (
        runner.hooks(backward={"*.z": leave}),
        pytest.raises(errors.HookError, match="grads=True or detach=False"),
    ):
        runner.run_with_cache(tokens, names="embed")


def test_a_call_of_a_runner_runs_the_model(model, runner, tokens):
    output = runner(tokens)
    assert output.requires_grad
    assert torch.equal(output, model(tokens))
    zero = {"blocks.1.mlp_out": lambda value, point: value * 0}
    with runner.hooks(zero):
        edited = runner(tokens)
    assert torch.equal(edited, runner.run_with_hooks(tokens, hooks=zero))
    assert not torch.equal(edited, output)
    with pytest.raises(TypeError, match="hooks=.*run_with_hooks"):
        runner(tokens, hooks=zero)
    with pytest.raises(TypeError, match="forward"):
        runner()


def test_forms_of_other_libraries_are_named_with_ours(runner, tokens):
    with pytest.raises(TypeError, match="names="):
        runner.run_with_cache(tokens, names_filter="*.z")
    with pytest.raises(TypeError, match=r"hooks=\{"):
        runner.run_with_hooks(tokens, fwd_hooks=[("embed", leave)])
    with pytest.raises(TypeError, match=r"\(activation, point\).*\(value\)"):
        runner.hooks({"embed": lambda value: value})
    with pytest.raises(TypeError, match="a Point"):
        runner.run_with_cache(tokens, names=lambda name: name.endswith(".z"))

    class Filtered(nn.Module):
        def forward(self, x, names_filter):
            return x * names_filter

    filtered = HookedRunner(Filtered())
    assert filtered.run_with_hooks(torch.ones(2), names_filter=3.0).tolist() == [3, 3]


def test_points_know_their_layer_and_print_as_a_table(runner):
    assert runner.points["blocks.2.attn.z"].layer == 2
    assert runner.points["embed"].layer is None
    assert repr(runner.points) == runner.table()
    many = HookedRunner(nn.Sequential(OrderedDict((f"part_{n}", nn.ReLU()) for n in range(53))))
    assert len(repr(many.points).splitlines()) == 40
    assert len(many.table().splitlines()) == 53


@pytest.mark.parametrize("part", ["", "blocks.1.mlp.output_dropout"])
def test_a_mode_on_a_model_in_training_says_to_call_eval(model, runner, tokens, part):
    model.get_submodule(part).train()
    for choice in (dict(mode="residual"), {}, dict(names=["embed", [Mode.residual]])):
        with pytest.raises(errors.ModeError, match=r"model.eval\(\)"):
            runner.run_with_cache(tokens, **choice)
    assert len(runner.run_with_cache(tokens, mode="none")[1]) == 0
    assert list(runner.run_with_cache(tokens, names="embed")[1]) == ["embed"]


def test_hooks_receive_the_point_and_leave_or_replace_the_value(model, runner, tokens):
    seen, resid = [], torch.randn(4, 7, 10)
    hooks = {"blocks.1.attn.z": lambda value, point: seen.append((value.shape, point))}
    assert torch.equal(runner.run_with_hooks(tokens, hooks=hooks), model(tokens))
    ((shape, point),) = seen
    assert shape == (4, 7, 2, 5)
    assert (point.name, point.axes) == ("blocks.1.attn.z", ("batch", "pos", "head", "d_head"))
    edited = runner.run_with_hooks(tokens, hooks={"blocks.2.resid_post": lambda v, p: resid})
    assert torch.equal(edited, model.unembed(resid))


def test_edits_act_in_the_order_given_and_contexts_from_the_outside_in(runner, tokens):
    edits = {"blocks.*.mlp_out": lambda v, p: v * 0 + 1, "blocks.1.mlp_out": lambda v, p: v + 4}
    with runner.hooks(edits), runner.hooks({"blocks.2.mlp_out": lambda v, p: v * 3}):
        _, cache = runner.run_with_cache(tokens, names="blocks.*.mlp_out")
    assert [float(v.mean()) for v in cache.values()] == [1, 5, 3]


@pytest.mark.parametrize("inference", [True, False])
def test_writing_into_the_activation_is_an_edit_and_spares_other_points(runner, tokens, inference):
    def through_numpy(value, point):
        value.detach().numpy()[:] = 0

    with torch.inference_mode(inference):
        _, plain = runner.run_with_cache(tokens)
        with runner.hooks({"blocks.1.resid_pre": write, "blocks.0.attn.z": through_numpy}):
            _, cache = runner.run_with_cache(tokens)
    assert not cache["z", 0].any()
    assert not torch.equal(cache["resid_post", 0], plain["resid_post", 0])
    assert cache["resid_post", 0][:, 3].all()
    assert not cache["resid_pre", 1][:, 3].any()
    assert torch.equal(cache["resid_pre", 1][:, 4:], cache["resid_post", 0][:, 4:])


@pytest.mark.parametrize(
    ("result", "match"),
    [
        (
            lambda v: v[:1],
            r"blocks.1.attn.z \[batch pos head d_head\].*\[4, 7, 2, 5\].*\[1, 7, 2, 5\]",
        ),
        (lambda v: v.double(), "torch.float32.*torch.float64"),
        (lambda v: v.to("meta"), "cpu.*meta"),
        (lambda v: 3.0, "3.0"),
        (lambda v: [v.unsqueeze_(0)].clear(), r"\[4, 7, 2, 5\].*\[1, 4, 7, 2, 5\]"),
    ],
)
def test_an_edit_that_the_point_cannot_carry(runner, tokens, result, match):
    with pytest.raises(errors.EditError, match=match):
        runner.run_with_hooks(tokens, hooks={"blocks.1.attn.z": lambda v, p: result(v)})


def test_hooks_are_removed_after_an_exception_and_the_users_own_stay(model, runner, tokens):
    plain, calls = model(tokens), []
    model.blocks[1].attn.z.register_forward_hook(lambda *args: calls.append(1))
    before = hook_counts(model)
    with pytest.raises(ZeroDivisionError), runner.hooks({"*": lambda v, p: v + 1}):
        runner.run_with_hooks(tokens, hooks={"blocks.2.*": lambda v, p: 1 / 0})
    assert hook_counts(model) == before
    assert torch.equal(model(tokens), plain)
    assert len(calls) == 2


def test_an_error_of_a_hook_has_a_note_with_its_point(runner, tokens):
    def broken(value, point):
        return value[99]

    with pytest.raises(IndexError) as caught:
        runner.run_with_hooks(tokens, hooks={"blocks.1.mlp_out": broken})
    [note] = caught.value.__notes__
    assert "blocks.1.mlp_out [batch pos d_model]" in note
    backward = {"blocks.0.attn.z": broken}
    with pytest.raises(IndexError) as caught, runner.hooks({}, backward=backward):
        runner.model(tokens).sum().backward()
    assert "blocks.0.attn.z" in caught.value.__notes__[0]

    def refused(value, point):
        raise errors.EditError(f"not at {point}")

    # Errors of this package name the point already.
    with pytest.raises(errors.EditError) as caught:
        runner.run_with_hooks(tokens, hooks={"blocks.1.mlp_out": refused})
    assert not hasattr(caught.value, "__notes__")


def test_an_attribute_of_a_point_that_is_called_has_a_note(runner, tokens):
    def broken(value, point):
        return value * point.layer()

    with pytest.raises(TypeError) as caught:
        runner.run_with_hooks(tokens, hooks={"blocks.1.mlp_out": broken})
    assert "point.layer" in caught.value.__notes__[1]


def test_one_position_is_a_list_of_one(runner, tokens):
    with pytest.raises(TypeError, match=r"pos=\[5\]"):
        runner.run_with_cache(tokens, pos=5)


def test_an_argument_named_like_a_part_of_the_options_is_the_models():
    model = nn.Sequential(nn.Identity()).eval()
    model.forward = lambda x, placement: model[0](x * placement)
    assert HookedRunner(model).run_with_cache(torch.ones(1), placement=3)[1]["0"] == 3


def test_a_failed_entry_leaves_nothing(model, runner, tokens, monkeypatch):
    class Refusing(OrderedDict):
        def __setitem__(self, key, hook):
            raise ZeroDivisionError

    before, plain = hook_counts(model), model(tokens)
    monkeypatch.setattr(model.ln_final.scale, "_forward_hooks", Refusing())
    with pytest.raises(ZeroDivisionError), runner.hooks({"*": lambda value, point: value * 2}):
        pass
    assert hook_counts(model) == before
    assert torch.equal(model(tokens), plain)


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
    # The capture stops before most of the edited points. This is no error.
    with runner.hooks({"blocks.*.resid_pre": lambda value, point: value + 1}):
        edited = runner.capture(tokens, names="blocks.0.resid_pre")
    plain = runner.capture(tokens, names="blocks.0.resid_pre")
    assert torch.equal(edited["resid_pre", 0], plain["resid_pre", 0] + 1)


def test_the_models_own_code_cannot_swallow_the_stop():
    """`capture` stops a model that catches exceptions and captures values itself."""
    inner, outer = nn.Sequential(nn.Linear(2, 3)), nn.Linear(3, 5)
    model, x = nn.Sequential(inner, outer).eval(), torch.ones(1, 2)

    def forward(x):
        try:
            with suppress(Exception):
                return outer(HookedRunner(inner).capture(x, names="0")["0"])
        except BaseException as error:
            # The model formats the exception, as a model that logs exceptions does.
            repr(error)
            raise

    model.forward = forward
    assert torch.equal(HookedRunner(model).capture(x, names="0.0")["0.0"], inner(x))
    assert torch.equal(HookedRunner(model).capture(x, names="1")["1"], outer(inner(x)))


def test_a_capture_inside_the_model_lets_the_outer_one_stop():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.ReLU(), nn.Tanh())

        def forward(self, x):
            HookedRunner(self.inner).capture(x, names="1")
            raise AssertionError("the outer capture goes on")

    cache = HookedRunner(Outer().eval()).capture(torch.tensor([-2.0, 3.0]), names="inner.0")
    assert cache["inner.0"].tolist() == [0, 3]


def test_a_point_that_fires_never_or_twice_is_an_error():
    model, x = nn.ModuleDict({"left": nn.ReLU(), "right": nn.ReLU()}).eval(), torch.ones(2, 3)
    model.forward = lambda x, twice=False: model["left"](model["left"](x) if twice else x)
    runner = HookedRunner(model)
    for run in (runner.run_with_cache, runner.capture, runner.plan):
        with pytest.raises(errors.NeverFiredError, match="right"):
            run(x, names=["left", "right"])
    for edited in (dict(hooks={"*": leave}), dict(backward={"right": leave})):
        with pytest.raises(errors.NeverFiredError, match="right"):
            runner.run_with_hooks(x, **edited)
    with pytest.raises(ZeroDivisionError), runner.hooks({"*": leave}):
        # The caller gets this error, and not the error of the hooks.
        raise ZeroDivisionError(model(x))
    with pytest.raises(errors.HookError, match="left"):
        runner.run_with_cache(x, twice=True, names="left")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_model_writes_into_no_tensor_of_the_users():
    model, x = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True)), torch.randn(2, 3)
    array, given = np.full((2, 5), -1, "float32"), []
    mine, whole = -torch.ones(2, 5), -torch.ones(4, 5)
    for hook in (
        lambda value, point: mine,
        lambda value, point: whole[:2],
        lambda value, point: torch.from_numpy(array),
        lambda value, point: given.append(value.fill_(-1)),
        lambda value, point: given.append(value.detach()) or value.fill_(-1),
    ):
        assert not HookedRunner(model).run_with_hooks(x, hooks={"0": hook}).any()
    for kept in (mine, whole, array, *given):
        assert (kept == -1).all()


def test_a_model_run_inside_a_hook_is_a_plain_run(runner, tokens):
    other = torch.flip(tokens, (0, 1))
    expected = runner.capture(other, names="blocks.1.attn_out")["attn_out", 1]

    def resample(value, point):
        return runner.capture(other, names=point.name)[point.name]

    with runner.hooks({"blocks.1.attn_out": resample}):
        _, cache = runner.run_with_cache(tokens, names="blocks.1.*")
        captured = runner.capture(tokens, names="blocks.1.resid_mid")
    assert torch.equal(cache["attn_out", 1], expected)
    assert torch.equal(captured["resid_mid", 1], cache["resid_pre", 1] + expected)


def test_a_copy_of_a_model_made_under_hooks_is_not_edited(model, runner, tokens):
    plain = model(tokens)
    with runner.hooks({"blocks.1.attn.pattern": lambda value, point: value * 0}):
        copied = copy.deepcopy(model)
        runner.run_with_cache(tokens, mode="none")
    assert torch.equal(copied(tokens), plain)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_capture_lets_a_fully_sharded_model_finish():
    """FSDP keeps a record of its forward passes. In some versions, later passes fail if a pass was
    stopped early.
    """
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        inner, x, reached = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), torch.randn(2, 3), []
        expected = [inner[0](x), inner(x)]
        inner[1].register_forward_hook(lambda *args: reached.append(1))
        model = FullyShardedDataParallel(inner, use_orig_params=True, device_id=torch.device("cpu"))
        cache = HookedRunner(model).capture(x, names="_fsdp_wrapped_module.0")
        torch.testing.assert_close([*cache.values(), model(x)], expected)
        assert len(reached) == 2
    finally:
        distributed.destroy_process_group()


class Dropping(nn.Module):
    """A model with dropout, either by a module or by a function."""

    def __init__(self, by):
        super().__init__()
        self.by, self.linear = by, nn.Linear(3, 5)
        self.dropout, self.point = nn.Dropout(0.5), HookPoint("batch d_model")

    def forward(self, x):
        x = self.linear(x)
        if self.by == "module":
            x = self.dropout(x)
        elif self.by == "function":
            x = nn.functional.dropout(x, 0.5, self.training)
        return self.point(x)


CALLS = {
    "run_with_cache": lambda runner, x: runner.run_with_cache(x, names="point"),
    "capture": lambda runner, x: runner.capture(x, names="point"),
    "run_with_hooks": lambda runner, x: runner.run_with_hooks(x, hooks={"point": lambda v, p: v}),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("by", ["module", "function"])
@pytest.mark.parametrize("part", ["", "dropout"])
def test_a_run_that_draws_in_training_mode_warns_once(call, by, part):
    model, x = Dropping(by).eval(), torch.ones(2, 3)
    runner = HookedRunner(model)
    CALLS[call](runner, x)
    model.get_submodule(part).train()
    if part and by == "function":
        # No error, because the submodule in training mode draws no random numbers.
        CALLS[call](runner, x)
        return
    with warnings.catch_warnings(record=True) as all_:
        warnings.simplefilter("always")
        CALLS[call](runner, x)
        CALLS[call](runner, x)
    assert "the Dropping drew random numbers" in str(all_[0].message)
    assert len(all_) == 1
    assert all_[0].filename == __file__


def test_training_mode_without_draws_is_silent():
    runner = HookedRunner(Dropping("nothing").train())
    for call in CALLS.values():
        call(runner, torch.ones(2, 3))
