"""Names of TransformerLens, translated to names of this package.

The values of both are compared, with small random models of tests/transformer_lens/make.py.
"""

import re

import pytest
import torch

import interp
import models
from hooks import HookedRunner, UnknownNameError
from interp import hooks_name
from models import causal_mask, from_transformer_lens
from models.hints import HINTS
from tests import transformer_lens as lens
from tests.shipped import pydoc
from tests.transformer_lens import bridge

pytestmark = pytest.mark.filterwarnings("ignore:TransformerLens centred these weights")

REFUSED = {"alibi", "experts", "final_rms", "post_embedding_ln", "shortformer"}


def loaded(name):
    """Return the cache of TransformerLens, the same model here, and its cache."""
    theirs = lens.read(name)
    model = from_transformer_lens(theirs.state, theirs.config, dtype=torch.float64).eval()
    return theirs, model, HookedRunner(model).run_with_cache(theirs.tokens)[1]


def translated(point, **options):
    """Return our name and None, or None and the reason for a missing name."""
    try:
        return hooks_name(point, **options), None
    except UnknownNameError as error:
        return None, str(error)


def by_formula(name, model, cache, state):
    """Return the value of a name without an equivalent, by the formula in the error of
    `hooks_name`.
    """
    last = name.rpartition("hook_")[2]
    block = model.blocks[1]
    if last in ("q", "k"):
        return block.attn.project(cache["ln1.normalized", 1])["qk".index(last)]
    if last == "normalized":
        norm = name.rpartition(".")[0]
        return cache[f"{norm}.normalized"] / model.get_submodule(norm).weight
    if last == "attn_scores":
        scores, cap = cache["scores", 1], model.config.attn_cap
        scores = cap * torch.tanh(scores / cap) if cap else scores
        return scores.masked_fill(~causal_mask(scores.shape[-1]), -torch.inf)
    if last == "result":
        return torch.einsum("bphd,hdm->bphm", cache["z", 1], block.attn.W_O)
    if last in ("attn_in", "q_input"):
        return cache["resid_pre", 1][:, :, None].expand(-1, -1, model.config.n_heads, -1)
    if last in ("k_input", "v_input"):
        return cache["resid_pre", 1][:, :, None].expand(-1, -1, model.config.n_kv_heads, -1)
    if last == "mlp_in":
        return cache["resid_pre" if model.config.parallel else "resid_mid", 1]
    if last == "post":
        return cache["mlp.post", 1] + state["blocks.1.mlp.b_in"]
    return {
        "tokens": lambda: cache.inputs["tokens"].double(),
        "embed": lambda: cache["ln_embed.normalized"],
    }[last]()


CACHED = [name for name in lens.names() if name not in REFUSED and lens.read(name).cache]


@torch.no_grad()
@pytest.mark.parametrize("name", CACHED)
def test_values_are_theirs_by_name_or_by_the_formula(name):
    theirs, model, cache = loaded(name)
    for point, expected in theirs.cache.items():
        if re.search(r"[qk]_norm\.", point):
            # `by_formula` has no formula for these points.
            continue
        ours, _ = translated(point, model=model)
        value = cache[ours] if ours else by_formula(point, model, cache, theirs.state)
        torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5, msg=f"{name} {point}")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted({*lens.names()} - REFUSED))
def test_every_point_of_theirs_has_a_row(name):
    theirs, model, cache = loaded(name)
    unused = "mlp_out" if theirs.config["attn_only"] else "nothing"
    for point in theirs.points:
        if point.endswith(unused):
            continue  # TransformerLens has the point, but it never fires
        ours, reason = translated(point, model=model)
        assert ours in cache if ours else point in reason and "no point of" not in reason


def test_points_of_experts_have_a_row():
    for point in lens.read("experts").points:
        assert "no point of" not in (translated(point)[1] or "")


def test_names_are_read_as_their_get_act_name_does():
    """The expected names are in the docstring of `get_act_name` in TransformerLens."""
    for short in (("k", 6, "a"), ("k", 6), ("k6",), "blocks.6.attn.hook_k"):
        assert hooks_name(short, model=pydoc()) == "blocks.6.attn.k"
    assert hooks_name("pre", 2) == "blocks.2.mlp.pre"
    assert hooks_name("embed") == hooks_name("hook_embed") == "embed"
    assert hooks_name(("scale", 4, "ln1")) == hooks_name("scale4ln1") == "blocks.4.ln1.scale"
    assert hooks_name("scale") == "ln_final.scale"
    assert hooks_name("attn", 3) == hooks_name("pattern", 3) == "blocks.3.attn.pattern"
    assert hooks_name("resid_post", 1, "block") == "blocks.1.resid_post"
    for every in ("blocks.*.attn.hook_z", "*.attn.hook_z", "*hook_z", "attn.hook_z", "z"):
        assert hooks_name(every) == "blocks.*.attn.z"


def test_a_value_that_depends_on_the_model_needs_it():
    learned = pydoc()
    rms = from_transformer_lens(lens.read("rms").state, lens.read("rms").config)
    for name in ("blocks.3.attn.hook_q", "ln_final.hook_normalized"):
        for options in ({}, {"model": torch.nn.Linear(2, 2)}):
            with pytest.raises(UnknownNameError, match="is before .*: it is "):
                hooks_name(name, **options)
        assert hooks_name(name, model=learned)
    assert hooks_name("blocks.0.attn.hook_q", model=rms) == "blocks.0.attn.q"
    with pytest.raises(UnknownNameError, match="gain"):
        hooks_name("ln_final.hook_normalized", model=rms)
    with pytest.raises(UnknownNameError, match="gain and bias"):
        hooks_name("ln_final.hook_normalized", model=learned, version=4)


@torch.no_grad()
@pytest.mark.parametrize("kind", bridge.KINDS)
def test_values_of_the_bridge_are_theirs_by_name(kind):
    pytest.importorskip("transformers")
    theirs, model = bridge.read(kind), models.from_hf(bridge.made(kind))
    names, reasons = {}, {}
    for point in theirs:
        names[point], reasons[point] = translated(point, model=model, version=4)
    assert not any("no point of" in reason for reason in reasons.values() if reason)
    wanted = {point: name for point, name in names.items() if name}
    cache = HookedRunner(model).run_with_cache(bridge.TOKENS, names=[*wanted.values()])[1]
    for point, name in wanted.items():
        atol = 2e-5 * theirs[point].abs().max()
        torch.testing.assert_close(cache[name], theirs[point], atol=atol, rtol=0, msg=point)
    assert len(wanted) > 30
    # Some values differ from the values of version 4. The error gives a formula. Check each
    # formula.
    cache = HookedRunner(model).run_with_cache(bridge.TOKENS)[1]
    for norm in ("blocks.1.ln1", "blocks.1.ln2", "ln_final"):
        module = model.get_submodule(norm)
        plain = (cache[f"{norm}.normalized"] - getattr(module, "bias", 0)) / module.weight
        torch.testing.assert_close(plain, theirs[f"{norm}.hook_normalized"], atol=1e-4, rtol=1e-4)


def test_names_of_the_bridge_match_its_version():
    assert hooks_name("blocks.2.attn.o.hook_in", version=4) == "blocks.2.attn.z"
    for version, wrong in ((2, "blocks.2.attn.o.hook_in"), (2, "hook_scale"), (4, "hook_zz")):
        with pytest.raises(UnknownNameError, match=f"no point of TransformerLens {version}"):
            hooks_name(wrong, version=version)
    with pytest.raises(ValueError, match="version must be one of 2, 4"):
        hooks_name("hook_embed", version=3)


def test_errors_for_their_names_have_ours():
    runner = HookedRunner(pydoc())
    _, cache = runner.run_with_cache("a", names=["*.pattern", "*.scores", "*.attn.v"])
    for name, ours in {
        "blocks.1.hook_resid_pre": "blocks.1.resid_pre",
        "blocks.*.attn.hook_attn_scores": "blocks.*.attn.scores",
        "*hook_z": "blocks.*.attn.z",
        "blocks.1.hook_mlp_in": "blocks.1.resid_mid",
        "blocks.1.attn.o.hook_in": "blocks.1.attn.z",
        "hook_embed": "is embed",
    }.items():
        for refused in (runner.capture, runner.plan):
            with pytest.raises(UnknownNameError, match=f"TransformerLens .*{re.escape(ours)} "):
                refused("a", names=name)
        with pytest.raises(UnknownNameError, match=re.escape(ours)):
            runner.run_with_hooks("a", hooks={name: lambda value, point: None})
    for key, ours in {
        ("key", 1): "attn.k",
        ("attn_scores", 1): "attn.scores",
        ("result", 0): "W_O",
        "blocks.2.attn.hook_v": "blocks.2.attn.v",
    }.items():
        assert key not in cache
        with pytest.raises(UnknownNameError, match=f"TransformerLens .*{re.escape(ours)}"):
            cache[key]
    with pytest.raises(TypeError, match=re.escape("('ln1.scale', 0)")):
        cache["scale", 0, "ln1"]
    pairs = interp.Pairs("ab", "ac", ("b", "c"))
    with pytest.raises(UnknownNameError, match=re.escape("blocks.*.attn.z")):
        interp.activation_patching(runner.model, pairs, "hook_z")


def test_a_model_with_their_names_keeps_its_own_close_matches():
    theirs = torch.nn.ModuleDict({"hook_embed": torch.nn.Identity()})
    with pytest.raises(UnknownNameError, match="close matches: hook_embed$"):
        HookedRunner(theirs).capture(torch.ones(2), names="hook_pos_embed")


def test_errors_for_their_attributes_and_arguments_have_ours():
    model = pydoc()
    runner = HookedRunner(model)
    _, cache = runner.run_with_cache("a", names="embed")
    for theirs, ours in HINTS.attributes.items():
        for place in (model, cache):
            assert not hasattr(place, theirs)
            with pytest.raises(AttributeError, match=re.escape(ours)):
                getattr(place, theirs)
    for theirs, ours in HINTS.arguments.items():
        with pytest.raises(TypeError, match=re.escape(ours.removeprefix("nothing: "))):
            runner.run_with_hooks("a", **{theirs: None})
    for text in (*HINTS.attributes.values(), *HINTS.arguments.values()):
        for package, name in re.findall(r"(models|interp)\.(\w+)", text):
            assert hasattr({"models": models, "interp": interp}[package], name)
    for place in (model, runner, cache):
        with pytest.raises(AttributeError, match="no attribute 'blok'$"):
            _ = place.blok
