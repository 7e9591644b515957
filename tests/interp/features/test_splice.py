"""Dictionaries that are spliced into a model: their outputs and gradients, in every kind of run."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from hooks import HookedRunner, HookError, NeverFiredError, UnknownNameError
from interp import (
    Pairs,
    activation_patching,
    attribution_patching,
    edits,
    integrated_gradients,
    log_prob,
    run_circuit,
    sweep,
)
from interp.features import CrossLayerTranscoder, Dictionary, JumpReLU, TopK, splice
from interp.graph.graph import Graph
from models import Transformer, TransformerConfig, generate
from tests import tiny
from tests.reference import separately

D, FEATURES, HEADS, D_HEAD = 12, 29, 3, 4
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
TEXT = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8]]


def dictionary(d_in=D, d_out=D, n=FEATURES, seed=0, activation=None, skip=False, **about):
    """Return a dictionary with random weights and biases in float64."""
    draw = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    return Dictionary(
        random(d_in, n),
        random(n, d_out) / 4,
        random(n) / 3,
        random(d_out),
        activation or JumpReLU(random(n).abs()),
        W_skip=random(d_in, d_out) if skip else None,
        **about,
    )


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=11, n_ctx=16, n_layers=3, n_heads=HEADS, d_model=D)
    made = Transformer(config).double().eval()
    for parameter in made.parameters():
        parameter.data.normal_(std=0.4)
    return made


@pytest.fixture
def pairs():
    return Pairs(TOKENS, (TOKENS + 1) % 11, [[2, 4], [7, 0]])


def by_hand(model, name, change):
    """Return the logits of a run in which PyTorch's own hook changes the output of a module."""
    handle = model.get_submodule(name).register_forward_hook(lambda m, args, out: change(out))
    try:
        return model(TOKENS)
    finally:
        handle.remove()


PLACES = {
    "blocks.1.resid_post": {},
    "blocks.0.attn_out": {"activation": TopK(5)},
    "embed": {"activation": nn.ReLU()},
    "blocks.2.ln1.normalized": {"subtracts_b_dec": True},
    "blocks.1.attn.z": {},
    "blocks.2.mlp.post": {"d_in": 4 * D, "d_out": 4 * D},
    "ln_final.normalized": {},
}


@pytest.mark.parametrize("place", PLACES)
def test_nothing_changes_until_features_are_edited(model, place):
    before = model(TOKENS)
    for error in ("live", "frozen"):
        with splice(model, {place: dictionary(**PLACES[place])}, error=error) as runner:
            assert torch.equal(model(TOKENS), before)
            logits, cache = runner.run_with_cache(TOKENS, names="*.features")
        assert torch.equal(logits, before)
        assert cache.axes(f"{place}.features") == ("batch", "pos", "feature")
    plain = HookedRunner(model)
    assert torch.equal(model(TOKENS), before)
    assert f"{place}.features" not in plain.points
    assert not any("features" in name for name in model.state_dict())


@pytest.mark.parametrize("place", PLACES)
def test_features_edits_and_reconstructions_match_the_formula(model, place):
    d = dictionary(**PLACES[place])
    shift = d.b_dec if d.subtracts_b_dec else 0

    def encode(x):
        pre = (x.flatten(2) - shift) @ d.W_enc + d.b_enc
        if isinstance(d.activation, TopK):
            least = pre.sort(-1).values[..., -5:-4]
            return torch.where(pre >= least, pre.clamp(min=0), 0.0)
        threshold = getattr(d.activation, "threshold", 0)
        return torch.where((pre > threshold) & (pre > 0), pre, 0.0)

    def edited(x):
        features = encode(x)
        changed = features.clone()
        changed[..., [3, 7]] = 0
        changed[..., 5] += 2
        return x + ((changed - features) @ d.W_dec).view_as(x)

    def edit(features, point):
        features[..., [3, 7]] = 0
        features[..., 5] += 2

    hooks = {f"{place}.features": edit}
    with splice(model, {place: d}) as runner:
        cache = runner.capture(TOKENS, names=[place, f"{place}.features"])
        value = cache[place]
        assert_close(cache[f"{place}.features"], encode(value))
        assert (cache[f"{place}.features"] != 0).any()
        logits = runner.run_with_hooks(TOKENS, hooks=hooks)
    assert_close(logits, by_hand(model, place, edited))
    with splice(model, {place: d}, error=None) as runner:
        heard, cache = runner.run_with_cache(TOKENS, names=[place, "*.features"])
        unheard = model(TOKENS)
    rebuilt = by_hand(model, place, lambda x: (encode(x) @ d.W_dec + d.b_dec).view_as(x))
    assert_close(heard, rebuilt)
    assert_close(unheard, rebuilt)
    assert_close(cache[place], (encode(value) @ d.W_dec + d.b_dec).view_as(value))


def test_one_head_is_read_and_written(model):
    d = dictionary(D_HEAD, D_HEAD, head=1)
    place = "blocks.1.attn.z"

    def rebuilt(z):
        new = z.clone()
        new[:, :, 1] = d(z[:, :, 1])
        return new

    with splice(model, {place: d}, error=None):
        logits = model(TOKENS)
    assert_close(logits, by_hand(model, place, rebuilt))


def test_transcoders_read_one_point_and_write_another(model):
    d = dictionary(skip=True, reads="blocks.1.ln2.normalized", writes="blocks.1.mlp_out")
    read = HookedRunner(model).capture(TOKENS, names=d.reads)[d.reads]
    with splice(model, d, error=None):
        logits = model(TOKENS)
    features = d.activation(read @ d.W_enc + d.b_enc)
    output = features @ d.W_dec + d.b_dec + read @ d.W_skip
    assert_close(logits, by_hand(model, d.writes, lambda _: output))
    with splice(model, d) as runner:
        assert not torch.allclose(model(TOKENS), logits)
        assert_close(runner.capture(TOKENS, names="*.features")["features", 1], features)
    short = dictionary(skip=True)
    with splice(model, {d.writes: short}, error=None, reads="ln2.normalized"):
        assert_close(model(TOKENS), logits)


@pytest.mark.parametrize("error", ["live", "frozen", None])
def test_gradients(model, error):
    d = dictionary(skip=True, reads="blocks.1.ln2.normalized", writes="blocks.1.mlp_out")
    names = ["blocks.1.ln2.normalized", "blocks.1.mlp_out.features", "blocks.1.mlp_out"]
    with splice(model, d, error=error) as runner:
        logits, cache = runner.run_with_cache(TOKENS, names=names, grads=True)
        logits[:, -1, 3].sum().backward()
    read, features, output = (cache.grads[name] for name in names)
    assert_close(features, output @ d.W_dec.T)
    # With the live error, the gradient at the input is the gradient of the real MLP.
    if error == "live":
        mlp, x = model.blocks[1].mlp, cache[names[0]].detach().requires_grad_()
        (expected,) = torch.autograd.grad(mlp(x), x, output)
    else:
        active = cache[names[1]] != 0
        expected = (features * active) @ d.W_enc.T + output @ d.W_skip.T
    assert_close(read, expected)
    # Without a hook at the features, the gradient is the same.
    with splice(model, d, error=error) as runner:
        logits, cache = runner.run_with_cache(TOKENS, names=names[:1], grads=True)
        logits[:, -1, 3].sum().backward()
    assert_close(cache.grads[names[0]], expected)
    model.zero_grad()


def test_sweeps_share_forward_passes_and_equal_single_runs(model, pairs, monkeypatch):
    from interp.runs import sweep as sweeping

    jobs = [
        {"blocks.1.resid_post.features": edits.zero(feature=[n, 28 - n])} for n in range(11)
    ] + [{"blocks.2.mlp_out": edits.zero(pos=-1)}]
    with splice(model, {"blocks.1.resid_post": dictionary()}, error=None):
        alone = separately(model, pairs, jobs)
        # The sweep must resume in the middle, and not run whole forward passes.
        monkeypatch.setattr(sweeping, "WholeRuns", None)
        assert_close(sweep(model, pairs, jobs).values, alone)
    assert alone.abs().max() > 1e-3


@pytest.mark.parametrize("analysis", [activation_patching, attribution_patching])
def test_features_that_are_active_only_at_padding_are_left_out(model, analysis):
    tokens = torch.tensor([[1, 4, 1, 2], [3, 3, 5, 9]])
    corrupted = tokens.clone()
    corrupted[:, 3] = 6
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    pairs = Pairs(tokens, corrupted, metric=log_prob(2), attention_mask=mask)
    with splice(model, {"blocks.1.resid_post": dictionary(activation=TopK(1))}):
        effects = analysis(model, pairs, site="features")
        active = set()
        for texts in (pairs.clean, pairs.corrupted):
            for row, real in zip(texts, mask.bool(), strict=True):
                _, cache = HookedRunner(model).run_with_cache(row[real][None], names="*.features")
                active |= {*cache["features", 1].nonzero()[:, 2].tolist()}
        everywhere = HookedRunner(model).run_with_cache(tokens, names="*.features")[1]
        assert {*everywhere["features", 1].nonzero()[:, 2].tolist()} - active
    assert {*effects.labels["feature"]} == active


@pytest.mark.parametrize("analysis", [activation_patching, attribution_patching])
def test_patching_tries_the_features_that_are_active(model, pairs, analysis):
    with splice(model, {"blocks.1.resid_post": dictionary(activation=TopK(3))}) as runner:
        effects = analysis(model, pairs, site="features")
        clean, corrupted = (
            runner.capture(tokens, names="*.features")["features", 1]
            for tokens in (pairs.clean, pairs.corrupted)
        )
        active = [n for n in range(FEATURES) if clean[..., n].any() or corrupted[..., n].any()]
        assert effects.axes == ("layer", "feature", "example")
        assert [*effects.labels["feature"]] == active
        n = active[2]
        if analysis is activation_patching:
            edit = {"blocks.1.resid_post.features": edits.replace(clean, feature=n)}
            logits = runner.run_with_hooks(pairs.corrupted, hooks=edit)
            one = pairs.metric(logits) - pairs.metric(model(pairs.corrupted))
            assert_close(effects.select(feature=n).values[0], one)
    assert 3 < len(active) < FEATURES


@pytest.mark.parametrize("error", ["live", "frozen", None])
@pytest.mark.parametrize("mask", [None, [[1] * 7, [0, 0] + [1] * 5]])
def test_the_estimate_of_removed_features_is_a_gradient_through_the_decoder(model, error, mask):
    place, d = "blocks.1.resid_post", dictionary(activation=TopK(4))
    mask = None if mask is None else torch.tensor(mask)
    pairs = Pairs(TOKENS, answers=[[2, 4], [7, 0]], attention_mask=mask)
    with splice(model, {place: d}, error=error):
        found = attribution_patching(model, pairs, site="features", edit=edits.zero())
        exact = activation_patching(model, pairs, site="features", edit=edits.zero())
    assert found.labels == exact.labels

    nodes = {}

    def watch(module, args, x):
        nodes["features"] = d.encode(x).detach()
        value = x if error else d.decode(nodes["features"])
        nodes["value"] = value.detach().requires_grad_()
        return nodes["value"]

    handle = model.get_submodule(place).register_forward_hook(watch)
    last = model(TOKENS, attention_mask=mask)[:, -1]
    handle.remove()
    right, wrong = last[[0, 1], [2, 7]], last[[0, 1], [4, 0]]
    (gradient,) = torch.autograd.grad((right - wrong).sum(), nodes["value"])
    effects = -(nodes["features"] * (gradient @ d.W_dec.T)).sum(1).T
    assert_close(found.base, right - wrong)
    assert_close(found.values[0], effects[[*found.labels["feature"]]])
    assert found.values.abs().max() > 0.1


@pytest.mark.parametrize("error", ["live", "frozen", None])
@pytest.mark.parametrize("analysis", [attribution_patching, integrated_gradients])
def test_the_estimate_of_removed_features_is_exact_before_a_linear_unembedding(error, analysis):
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=11, n_ctx=16, n_layers=2, n_heads=3, d_model=D, norm="none"
    )
    plain = Transformer(config).double().eval()
    pairs = Pairs(TOKENS, answers=[[2, 4], [7, 0]])
    steps = {"steps": 1} if analysis is integrated_gradients else {}
    given = dict(site="features", layers=1, edit=edits.zero())
    with splice(plain, {"blocks.1.resid_post": dictionary(activation=TopK(4))}, error=error):
        exact = activation_patching(plain, pairs, **given)
        found = analysis(plain, pairs, **given, **steps)
    assert_close(found.values, exact.values)
    assert exact.values.abs().max() > 0.01


def test_integrated_gradients_of_features_are_complete(model, pairs):
    with splice(model, {"blocks.2.resid_post": dictionary()}, error=None):
        effects = integrated_gradients(model, pairs, site="features", layers=2, steps=64)
        whole = effects.target - effects.base
    assert_close(effects.values.sum((0, 1)), whole, rtol=0.02, atol=0.02)


def test_masked_runs_have_the_dictionaries(model, pairs):
    place = "blocks.1.mlp_out"
    with splice(model, {place: dictionary()}, error=None):
        logits = run_circuit(model, pairs, Graph(model).edges)
        assert_close(logits, model(pairs.clean))
    assert not torch.allclose(logits, model(pairs.clean))
    with pytest.raises(HookError, match="hook"), HookedRunner(model).hooks({place: edits.zero()}):
        run_circuit(model, pairs, Graph(model).edges)


def test_lazy_caches_are_read_inside(model):
    with splice(
        model, {"blocks.1.resid_post": dictionary(), "embed": dictionary(seed=1)}
    ) as runner:
        _, eager = runner.run_with_cache(TOKENS)
        _, lazy = runner.run_with_cache(TOKENS, lazy=True)
        for name in eager:
            assert_close(lazy[name], eager[name])
        lazy.drop()
    with pytest.raises(NeverFiredError, match="`with` statement that has ended"):
        lazy["blocks.1.resid_post.features"]


def test_generation_padding_and_threads(model):
    d = dictionary()
    hooks = {"blocks.1.resid_post.features": edits.scale(0.0)}
    with splice(model, {"blocks.1.resid_post": d}) as runner:
        with runner.hooks(hooks):
            fast = generate(model, TOKENS, max_new_tokens=5, temperature=0.0)
            tokens = TOKENS
            for _ in range(5):
                tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
        assert fast == tokens.tolist()
        mask = torch.tensor([[True] * 7, [False] * 2 + [True] * 5])
        padded = torch.tensor([TEXT[0], [0, 0, *TEXT[1]]])
        features = runner.capture(padded, names="*.features", attention_mask=mask)["features", 1]
        alone = runner.capture(torch.tensor([TEXT[1]]), names="*.features")["features", 1]
        assert_close(features[1:, 2:], alone)
        # A spliced dictionary is a part of the model, so it also acts in other threads.
        made = []
        thread = threading.Thread(target=lambda: made.append(model(TOKENS)))
        with splice(model, {"blocks.0.mlp_out": dictionary(seed=2)}, error=None):
            thread.start()
            thread.join()
            assert torch.equal(made[0], model(TOKENS))
        assert not torch.equal(made[0], model(TOKENS))


@pytest.mark.parametrize("norm", ["constant_norm_rescale", "layer_norm"])
@pytest.mark.parametrize("place", ["attn.z", "resid_post"])
def test_hooks_at_features_do_not_change_real_tokens_if_padding_is_zero(model, norm, place):
    """At padding, attention returns 0. A dictionary that divides by the norm of its input must not
    give NaN there.
    """
    name = f"blocks.1.{place}"
    made = dictionary(norm=norm)
    batch = model.to_tokens(TEXT, side="left")
    plain, real = model(batch), batch.attention_mask
    with splice(model, {name: made}) as runner:
        logits, cache = runner.run_with_cache(batch, names="*.features")
        assert torch.equal(logits[real], plain[real])
        assert cache[f"{name}.features"].isfinite().all()
        hooks = {f"{name}.features": edits.scale(0.5, batch=0)}
        edited = runner.run_with_hooks(batch, hooks=hooks)
        assert torch.equal(edited[1][real[1]], plain[1][real[1]])
        assert not torch.equal(edited[0], plain[0])
    zeros = torch.zeros(2, D, dtype=torch.float64)
    assert torch.equal(made.encode(zeros), made.activation((zeros @ made.W_enc) + made.b_enc))


def test_hooks_change_nothing_if_features_overflow(model):
    made = dictionary(activation=torch.nn.ReLU())
    made.W_enc.data[:, 3] = torch.inf
    with splice(model, {"blocks.1.resid_post": made}) as runner:
        logits, _ = runner.run_with_cache(TOKENS, names="*.features")
    assert torch.equal(logits, model(TOKENS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("error", ["live", "frozen", None])
def test_a_model_of_another_dtype(model, dtype, error):
    other = copy.deepcopy(model).to(dtype)
    d = dictionary(skip=True, reads="blocks.1.ln2.normalized", writes="blocks.1.mlp_out")
    before = other(TOKENS)
    with splice(other, d, error=error) as runner:
        unheard = other(TOKENS)
        logits, cache = runner.run_with_cache(TOKENS, names=[d.reads, d.writes, "*.features"])
    assert logits.dtype == unheard.dtype == cache[d.writes].dtype == dtype
    assert cache["features", 1].dtype == torch.float64
    assert_close(cache["features", 1], d.encode(cache[d.reads]))
    if error is None:
        assert_close(cache[d.writes], d(cache[d.reads]).to(dtype))
    else:
        assert torch.equal(unheard, before)
        assert torch.equal(logits, before)


def test_plan_and_copies(model):
    with splice(model, {"blocks.1.resid_post": dictionary()}, error=None) as runner:
        plan = runner.plan(TOKENS, names="*.features")
        assert plan.nbytes == 2 * 7 * FEATURES * 8
        copied = copy.deepcopy(model)
        logits = model(TOKENS)
    assert_close(copied(TOKENS), logits)
    assert not torch.allclose(model(TOKENS), logits)


def test_any_module_can_have_one():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(11, D), nn.Linear(D, D), nn.Linear(D, 5)).double().eval()
    d = dictionary(activation=nn.ReLU())
    with splice(plain, {"1": d}, error=None) as runner:
        assert [*runner.points] == ["0", "1", "1.features", "2"]
        logits, cache = runner.run_with_cache(TOKENS)
    x = plain[1](plain[0](TOKENS))
    features = (x @ d.W_enc + d.b_enc).relu()
    assert_close(cache["1.features"], features)
    assert_close(logits, plain[2](features @ d.W_dec + d.b_dec))
    assert [*HookedRunner(plain).points] == ["0", "1", "2"]


def test_attached_models(pairs):
    from models import attach

    reference = tiny.model("LlamaForCausalLM", hidden_size=D).double()
    model = copy.deepcopy(reference)
    attach(model)
    d = dictionary(reads="blocks.1.ln2.normalized", writes="blocks.1.mlp_out")
    before = model(TOKENS).logits
    with splice(model, d) as runner:
        assert torch.equal(model(TOKENS).logits, before)
        features = runner.capture(TOKENS, names="*.features")["features", 1]
        jobs = [{"blocks.1.mlp_out.features": edits.zero(feature=n)} for n in range(7)]
        swept = sweep(model, pairs, jobs)
        assert_close(swept.values, separately(model, pairs, jobs))
    read = []
    layer = reference.model.layers[1]
    layer.mlp.register_forward_pre_hook(lambda m, args: read.append(args[0]))
    with splice(model, d, error=None):
        logits = model(TOKENS).logits
    reference(TOKENS)
    expected = d.encode(read[0])
    assert_close(features, expected)
    layer.mlp.register_forward_hook(lambda m, args, out: expected @ d.W_dec + d.b_dec)
    assert_close(logits, reference(TOKENS).logits)


def test_attention_that_an_attached_model_computes_unseen_is_seen():
    from models import attach

    model = tiny.model("BloomForCausalLM", hidden_size=D, num_attention_heads=HEADS).double()
    attach(model)
    d, place = dictionary(), "blocks.1.attn.v"

    def rebuilt(value, point):
        return d(value.flatten(2)).view_as(value)

    expected = HookedRunner(model).run_with_hooks(TOKENS, hooks={place: rebuilt}).logits
    with splice(model, {place: d}, error=None):
        assert_close(model(TOKENS).logits, expected)


def test_a_splice_outside_a_with_statement_says_how_to_use_it(model):
    with pytest.raises(AttributeError, match=r"`with`.*as runner: runner.run_with_cache"):
        splice(model, {"blocks.1.resid_post": dictionary()}).run_with_cache(TOKENS)
    printed = repr(splice(model, {"blocks.1.resid_post": dictionary()}))
    assert "with splice(model, dictionary) as runner" in printed


def test_earlier_hooks_see_the_spliced_value(model):
    place, d, seen = "blocks.1.resid_post", dictionary(), []
    handle = HookedRunner(model).add({place: lambda value, point: seen.append(value.clone())})
    try:
        model(TOKENS)
        with splice(model, {place: d}, error=None):
            model(TOKENS)
    finally:
        handle.remove()
    assert_close(seen[1], d(seen[0]))


def test_a_point_that_a_fused_kernel_skips_is_reached(model):
    d = dictionary(1, 1, activation=nn.ReLU())
    with pytest.raises(ValueError, match="a vector at each position"):
        splice(model, {"blocks.0.ln1.scale": d}).__enter__()
    with pytest.raises(ValueError, match="a vector at each position"):
        splice(model, {"blocks.0.attn.pattern": d}).__enter__()


def test_two_at_a_time_and_leaving_after_an_error(model):
    before = model(TOKENS)
    one, two = dictionary(), dictionary(seed=1)
    with splice(model, {"blocks.0.resid_post": one, "blocks.1.resid_post": two}, error=None):
        both = model(TOKENS)
    with splice(model, {"blocks.0.resid_post": one}, error=None):
        with splice(model, {"blocks.1.resid_post": two}, error=None):
            assert torch.equal(model(TOKENS), both)
        alone = model(TOKENS)
        with pytest.raises(HookError, match="end the `with` of that part first"):
            splice(model, {"blocks.0.resid_post": two}).__enter__()
        assert torch.equal(model(TOKENS), alone)
    with pytest.raises(ZeroDivisionError), splice(model, {"blocks.0.resid_post": one}, error=None):
        raise ZeroDivisionError
    assert torch.equal(model(TOKENS), before)


def test_a_dictionary_that_never_acts_is_an_error():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x):
            return self.used(x)

    lazy = Skips().double().eval()
    with pytest.raises(NeverFiredError, match="unused"), splice(lazy, {"unused": dictionary()}):
        lazy(torch.zeros(2, 3, D, dtype=torch.float64))


WRONG = {
    "no such point": ({"blocks.1.resid_pots": dictionary()}, {}, UnknownNameError, "resid_post"),
    "width": ({"blocks.1.resid_post": dictionary(7, 7)}, {}, ValueError, "read vectors of size 12"),
    "written width": (
        {"blocks.1.mlp_out": dictionary(D, 7, reads="blocks.1.ln2.normalized")},
        {},
        ValueError,
        "write vectors of size 12",
    ),
    "heads in a row": ({"blocks.1.attn.z": dictionary(D_HEAD, D_HEAD)}, {}, ValueError, "12"),
    "no such head": (
        {"blocks.1.attn.z": dictionary(D_HEAD, D_HEAD, head=HEADS)},
        {},
        ValueError,
        f"head must be 0 to {HEADS - 1}",
    ),
    "reads nothing": ({"blocks.1.mlp_out": dictionary(skip=True)}, {}, ValueError, "reads="),
    "another block": (
        {"blocks.1.mlp_out": dictionary(skip=True)},
        {"reads": "blocks.0.resid_post"},
        HookError,
        "in the same block",
    ),
    "no place": (dictionary(), {}, ValueError, "point of the dictionary is unknown"),
    "error": ({"embed": dictionary()}, {"error": "dead"}, ValueError, "got 'dead'"),
    "no dictionary": ({"embed": nn.Linear(D, D)}, {}, TypeError, "load_sae"),
    "several layers": (
        {"embed": CrossLayerTranscoder([], [], [], torch.zeros(0, 1), [])},
        {},
        TypeError,
        "attribution graphs",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_refusals_come_before_anything_runs(model, wrong):
    dictionaries, options, kind, words = WRONG[wrong]
    with pytest.raises(kind, match=words):
        splice(model, dictionaries, **options).__enter__()
    assert not any("features" in name for name in HookedRunner(model).points)
