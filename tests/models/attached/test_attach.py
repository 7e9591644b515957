"""attach: the points in models of `transformers`, and everything that must stay as it was."""

import copy
import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from hooks import HookedRunner, HookError, NeverFiredError, UnknownNameError
from hooks.session import is_listened_to
from interp import edits, log_prob, sweep
from interp.protocol import of
from models import attach, detach
from models.attached.context import keeps_only_keys
from models.text.tokenizer import CharTokenizer
from tests import tiny
from tests.attachable import CACHE
from tests.models.attached.kinds import KINDS, TOKENS, made
from tests.reference import separately

transformers = pytest.importorskip("transformers", reason="needs the extra hf")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@torch.no_grad()
def logits(model, **kwargs):
    return model(TOKENS, **kwargs).logits


def test_hooks_everywhere_leave_the_logits_of_an_encoder():
    kind, model = "bert", made("bert", dtype=torch.float32)
    before = logits(model)
    with attach(model):
        assert torch.equal(logits(model), before)
        with torch.no_grad():
            output, cache = HookedRunner(model).run_with_cache(TOKENS)
        assert torch.equal(
            output.logits, logits(made(kind, attention="eager", dtype=torch.float32))
        )
        assert len(cache) == len(HookedRunner(model).points)


def test_every_edit_changes_the_logits_of_an_encoder():
    model = made("bert")
    attach(model)
    runner, before = HookedRunner(model), logits(model)
    with torch.no_grad():
        for name in runner.points:
            edited = runner.run_with_hooks(TOKENS, hooks={name: lambda v, p: v + v.roll(1) / 2})
            assert (edited.logits - before).abs().max() > 1e-6, name


def trace(model):
    """Return everything that `attach` could leave behind in a model, to compare it."""
    modules = [(name, id(module)) for name, module in model.named_modules()]
    kept = [{k: v for k, v in vars(m).items() if k[0] != "_"} for m in model.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    configs = [id(m.config) for m in model.modules() if hasattr(m, "config")]
    return modules, [sorted(names) for names in kept], hooks, configs, str(model.config)


def test_removal_leaves_nothing():
    model = made("bert")
    before, state, plain = trace(model), list(model.state_dict()), logits(model)
    with attach(model) as attached:
        assert list(model.state_dict()) == state
        assert "blocks.2.resid_post" in HookedRunner(model).points
    assert trace(model) == before
    assert torch.equal(logits(model), plain)
    attached.remove()
    assert trace(model) == before
    with pytest.raises(UnknownNameError):
        HookedRunner(model).capture(TOKENS, names="blocks.2.resid_post")


def test_a_copy_has_points_of_its_own():
    model = made("llama")
    attach(model)
    twin, before = copy.deepcopy(model), logits(model)
    zero = {"blocks.1.attn.z": lambda v, p: v * 0, "blocks.1.mlp_out": lambda v, p: v * 0}
    with HookedRunner(twin).hooks(zero):
        assert torch.equal(logits(model), before)
        assert not torch.equal(logits(twin), before)
    half = twin.to(torch.bfloat16)
    cache = HookedRunner(half).capture(TOKENS, names="blocks.1.attn.pattern")
    assert cache["pattern", 1].dtype == torch.bfloat16


def test_hooks_stay_in_their_thread():
    model, found = made("gpt2"), []
    attach(model)
    before = logits(model)
    with HookedRunner(model).hooks({"blocks.1.attn.pattern": lambda v, p: v * 0}):
        thread = threading.Thread(target=lambda: found.append(logits(model)))
        thread.start()
        thread.join()
        assert not torch.equal(logits(model), before)
    assert torch.equal(found[0], before)


def test_a_model_in_training_mode_has_the_same_points():
    """`attach` compares runs, and dropout would make them differ. Modules keep their modes."""
    model = made("gpt2")
    with attach(model) as attached:
        points, left_out = {*HookedRunner(model).points}, attached.left_out
    model.train()
    model.lm_head.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    with attach(model) as attached:
        assert {*HookedRunner(model).points} == points
        assert attached.left_out == left_out
        assert {name: model.get_submodule(name).training for name in modes} == modes
        assert all(module.training for name, module in model.named_modules() if name not in modes)


def test_the_same_call_again_returns_the_attachment():
    model = made("gpt2")
    before, plain = trace(model), logits(model)
    words = CharTokenizer("abcdefgh")
    example = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}
    attached = attach(model, tokenizer=words, example=example, mlp="mlp")
    counted = []
    handle = HookedRunner(model).add({"blocks.1.mlp_out": lambda v, p: counted.append(1)})
    copied = {name: value.clone() for name, value in example.items()}
    assert attach(model, example=copied, mlp="mlp") is attached
    assert attached.tokenizer is words
    logits(model)
    assert counted == [1]
    others = CharTokenizer("hgfedcba")
    assert attach(model, tokenizer=others, example=copied, mlp="mlp").tokenizer is others
    handle.remove()
    attached.remove()
    assert trace(model) == before
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize(
    "settings",
    [{"mlp": "mlp"}, {"attn": "attn"}, {"blocks": "transformer.h.*"}, {"example": TOKENS}],
    ids=lambda settings: next(iter(settings)),
)
def test_other_settings_renew_the_attachment(settings, last):
    model = made("gpt2")
    before, plain = trace(model), logits(model)
    words = CharTokenizer("abcdefgh")
    attached = attach(model, tokenizer=words)
    names = list(HookedRunner(model).points)
    renewed = attach(model, **settings)
    assert renewed is not attached
    assert renewed.tokenizer is words
    assert list(HookedRunner(model).points) == names
    assert attach(model, **settings) is renewed
    (renewed if last else attached).remove()
    assert trace(model) == before
    assert torch.equal(logits(model), plain)


def test_an_example_that_differs_in_one_number_renews():
    model = made("bert")
    # `repr` of such a long tensor leaves numbers out, so it cannot be used to compare examples.
    long = torch.arange(2 * 700).view(100, 14) % 23
    attached, other = attach(model, example={"input_ids": long}), long.clone()
    other[50, 7] += 1
    assert attach(model, example={"input_ids": long.clone()}) is attached
    assert attach(model, example={"input_ids": other}) is not attached


def test_hooks_on_points_are_not_lost():
    model, counted = made("gpt2"), []
    attached = attach(model)
    runner = HookedRunner(model)
    handle = runner.add({"blocks.1.mlp_out": lambda v, p: counted.append(1)})
    with pytest.raises(HookError, match=r"blocks\.1\.mlp_out"):
        attach(model, mlp="mlp")
    assert attach(model) is attached
    logits(model)
    assert counted == [1]
    handle.remove()
    with runner.hooks({"blocks.2.attn.z": lambda v, p: v}), pytest.raises(HookError, match="z"):
        attach(model, mlp="mlp")
    assert attach(model, mlp="mlp") is not attached


def test_inner_withs_leave_the_points():
    model = made("gpt2")
    before = trace(model)
    with attach(model) as attached:
        copied = copy.deepcopy(model)
        with attach(model) as again:
            assert again is attached
        assert "blocks.1.resid_post" in HookedRunner(model).points
    assert trace(model) == before
    with attach(copied):
        assert "blocks.1.resid_post" in HookedRunner(copied).points
    assert "blocks.1.resid_post" not in HookedRunner(copied).points


def test_a_part_or_a_model_around_is_refused():
    model = made("gpt2")
    wrapper = nn.Sequential(model)
    attach(model)
    with pytest.raises(ValueError, match=r"0 is attached"):
        attach(wrapper)
    with pytest.raises(ValueError, match="larger attached model"):
        attach(model.transformer)
    attach(model).remove()


def test_wrong_calls_are_errors(monkeypatch):
    model = made("gpt2")
    with pytest.raises(ValueError, match=r"example=.* Linear has no nn\.Embedding"):
        attach(nn.Linear(2, 3))
    model.lm_head.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        attach(model)
    with pytest.raises(ValueError, match="ModuleList"):
        attach(tiny.model("AlbertForMaskedLM", embedding_size=6))
    model.embed = nn.Identity()
    with pytest.raises(ValueError, match="embed"):
        attach(model)
    model = made("gpt2")
    monkeypatch.setattr("transformers.__version__", "5.5.4")
    with pytest.raises(ImportError, match=r"5\.5\.4"):
        attach(model)


def gains(model, norm):
    """Return the norm module of the second block, or the final norm, whose gains are changed."""
    inner = getattr(model, "transformer", None) or model.model
    if norm == "ln_final":
        return inner.ln_f if hasattr(inner, "ln_f") else inner.norm
    block = (inner.h if hasattr(inner, "h") else inner.layers)[1]
    first, second = ("ln_1", "ln_2") if hasattr(block, "ln_1") else ("input_layernorm", "")
    second = second or (
        "pre_feedforward_layernorm"
        if hasattr(block, "pre_feedforward_layernorm")
        else "post_attention_layernorm"
    )
    return getattr(block, first if norm == "blocks.1.ln1" else second)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("norm", ["blocks.1.ln1", "blocks.1.ln2", "ln_final"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma3"])
def test_twice_the_scale_is_half_the_gain(kind, norm):
    model, by_hand = made(kind), made(kind)
    weight = gains(by_hand, norm).weight.data
    weight.copy_((1 + weight) / 2 - 1 if kind == "gemma3" else weight / 2)
    attach(model)
    edited = HookedRunner(model).run_with_hooks(TOKENS, hooks={f"{norm}.scale": lambda v, p: v * 2})
    torch.testing.assert_close(edited.logits, logits(by_hand), rtol=0, atol=1e-5)
    cache = HookedRunner(model).capture(TOKENS, names=[f"{norm}.scale", "blocks.1.resid_pre"])
    assert cache[f"{norm}.scale"].shape == (3, 5, 1)
    if kind == "gpt2" and norm == "blocks.1.ln1":
        expected = cache["resid_pre", 1].var(-1, correction=0, keepdim=True).add(1e-5).sqrt()
        torch.testing.assert_close(cache["ln1.scale", 1], expected)


def test_an_edit_of_the_stream_between_reaches_both_ways():
    model = made("gpt2")
    attach(model)
    new = torch.randn(3, 5, 12, dtype=torch.float64)
    with HookedRunner(model).hooks({"blocks.1.resid_mid": lambda v, p: new}):
        cache = HookedRunner(model).capture(TOKENS, names=["blocks.1.resid_*"])
    block = model.transformer.h[1]
    expected = new + block.mlp(block.ln_2(new))
    torch.testing.assert_close(cache["resid_post", 1], expected)


@torch.no_grad()
@pytest.mark.parametrize("part", ["self_attn", "mlp"])
def test_points_of_outputs_are_right_in_half_precision(part):
    """The points of attention and MLP are right, although the stream is so large that most of each
    added vector is lost in rounding.
    """
    model, raw = made("llama"), []
    model.model.embed_tokens.weight.mul_(30)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.02)
        layer.mlp.down_proj.weight.mul_(0.02)
    attach(model.bfloat16())
    getattr(model.model.layers[1], part).register_forward_hook(lambda m, a, o: raw.append(o))
    point = {"self_attn": "attn_out", "mlp": "mlp_out"}[part]
    cache = HookedRunner(model).capture(TOKENS, names=f"blocks.1.{point}")
    model(TOKENS)
    assert torch.equal(cache[point, 1], raw[-1] if part == "mlp" else raw[-1][0])


@torch.no_grad()
def test_outputs_that_are_scaled_before_they_are_added():
    model = tiny.model("GraniteForCausalLM", residual_multiplier=0.7, logits_scaling=3.0)
    attach(model)
    runner = HookedRunner(model)
    cache = runner.run_with_cache(TOKENS)[1]
    raw = HookedRunner(model).capture(TOKENS, names="model.layers.1.mlp")
    torch.testing.assert_close(cache["mlp_out", 1], raw["model.layers.1.mlp"] * 0.7)
    with runner.hooks({"blocks.1.mlp_out": edits.add(torch.ones(12))}):
        edited = runner.capture(TOKENS, names="blocks.1.resid_post")
    torch.testing.assert_close(edited["resid_post", 1], cache["resid_post", 1] + 1)
    language = of(model, "unembed")
    torch.testing.assert_close(language.unembed(cache["resid_post", -1]), logits(model))


POINTS = ["resid_pre", "resid_mid", "attn.k", "attn.v", "attn.z", "mlp.post"]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma3"])
def test_edits_during_generation_match_the_whole_text(kind):
    model = made(kind)
    attach(model)
    hooks = {f"blocks.1.{point}": edits.scale(-2.5, pos=[2, 6]) for point in POINTS}
    hooks["blocks.1.attn.scores"] = edits.scale(-2.5, query=6)
    runner = HookedRunner(model)
    options = dict(max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    with runner.hooks(hooks):
        made_by = model.generate(TOKENS, output_logits=True, **options)
        whole = model(made_by.sequences[:, :-1], use_cache=False).logits
    found = torch.stack(made_by.logits, 1)  # `generate` returns logits in float32
    torch.testing.assert_close(found.double(), whole[:, 4:], rtol=0, atol=1e-5)
    assert not torch.equal(whole, model(made_by.sequences[:, :-1]).logits)


class Grown(transformers.cache_utils.DynamicLayer):
    pass


class Recurrent(transformers.cache_utils.DynamicLayer):
    def __init__(self):
        super().__init__()
        self.states = None


class Fixed(transformers.cache_utils.StaticLayer):
    pass


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (Grown(), True),
        (transformers.cache_utils.DynamicSlidingWindowLayer(5), True),
        (Fixed(9), False),
        (Recurrent(), False),
        (object(), False),
        (None, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_layer_of_a_cache_is_known_by_its_attributes(layer, expected):
    assert keeps_only_keys(layer) == expected
    if hasattr(layer, "update"):
        layer.update(*torch.ones(2, 1, 2, 3, 4))
        assert keeps_only_keys(layer) == expected


@torch.no_grad()
def test_a_static_cache_takes_edited_keys():
    model, steps = made("llama"), TOKENS.split([3, 1, 1], 1)
    attach(model)
    hooks = {"blocks.1.attn.k": edits.scale(-2.5, pos=[1, 3])}
    cache = transformers.StaticCache(config=model.config, max_cache_len=7)
    # The name of the class does not matter.
    cache.layers = [Fixed(7) for _ in cache.layers]
    with HookedRunner(model).hooks(hooks):
        found = [model(piece, **{CACHE: cache}, use_cache=True).logits for piece in steps]
        torch.testing.assert_close(torch.cat(found, 1), logits(model, use_cache=False))
    cache.reset()

    def run(tokens):
        return [model(piece, **{CACHE: cache}, use_cache=True) for piece in steps]

    runner, names = HookedRunner(model), ["blocks.1.attn.pattern", "blocks.1.attn.v"]
    joined = runner.run_with_cache(TOKENS, run=run, names=names)[1]
    whole = runner.capture(TOKENS, names=names)
    for name in names:
        torch.testing.assert_close(joined[name], whole[name])


@torch.no_grad()
def test_a_generation_is_one_cache():
    model = made("gpt2")
    attach(model)
    runner = HookedRunner(model)
    run = partial(model.generate, max_new_tokens=3, do_sample=False)
    names = ["blocks.1.attn.*", "blocks.*.resid_post"]
    tokens, cache = runner.run_with_cache(TOKENS, run=run, names=names)
    whole = runner.run_with_cache(tokens[:, :-1], names=names)[1]
    for name in cache:
        seen = whole[name].tril() if name.endswith("scores") else whole[name]
        found = cache[name].tril() if name.endswith("scores") else cache[name]
        torch.testing.assert_close(found, seen)


@torch.no_grad()
def test_lazy_caches(kind):
    model = made(kind)
    attach(model)
    runner = HookedRunner(model)
    eager, lazy = (runner.run_with_cache(TOKENS, lazy=how)[1] for how in (False, True))
    assert list(lazy) == list(eager)
    for name in eager:
        torch.testing.assert_close(lazy[name], eager[name])
    if kind in ("bert", "bloom"):
        return
    past = model(TOKENS[:, :3], use_cache=True)[CACHE]
    with runner.hooks({"blocks.1.attn_out": edits.scale(3.0, pos=4)}):
        lazy = runner.run_with_cache(TOKENS[:, 3:], **{CACHE: past}, lazy=True)[1]
        whole = runner.run_with_cache(TOKENS, use_cache=False)[1]
    for part in ("attn.k", "resid_mid", "resid_post"):
        torch.testing.assert_close(lazy[part, 2], whole[part, 2][:, 3:], rtol=0, atol=1e-6)
    # The pattern has no keys that the window has dropped.
    seen = lazy["attn.pattern", 2]
    expected = whole["attn.pattern", 2][:, :, 3:, -seen.shape[-1] :]
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-6)


def test_gradients_are_derivatives():
    # Use GPT-2, because other models compute norms in float32, which is too coarse for differences.
    model = made("gpt2").requires_grad_(False)
    attach(model)
    runner = HookedRunner(model)
    names = [f"blocks.1.{part}" for part in ("resid_mid", "attn.scores", "attn.k", "ln2.scale")]
    output, cache = runner.run_with_cache(TOKENS, names=names, grads=True)
    output.logits[:, -1, 3].sum().backward()
    for name in names:
        step = torch.randn_like(cache[name]) * 1e-6
        ends = [
            runner.run_with_hooks(TOKENS, hooks={name: lambda v, p, by=by: v + by})
            for by in (step, -step)
        ]
        found = ((ends[0].logits - ends[1].logits)[:, -1, 3]).sum() / 2
        torch.testing.assert_close(found, (cache.grads[name] * step).sum(), rtol=1e-4, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma3", "bloom"])
def test_steps_and_sweeps(kind):
    model = made(kind)
    attach(model)
    language, runner = of(model, "blocks", "input_resid", "unembed"), HookedRunner(model)
    cache = runner.run_with_cache(TOKENS, names="blocks.*.resid_*")[1]
    torch.testing.assert_close(language.unembed(cache["resid_post", -1]), logits(model))
    torch.testing.assert_close(language.input_resid(TOKENS), cache["resid_pre", 0])
    assert not is_listened_to(model), "or sweeps would run the whole model for each edit"
    sizes = language.config
    assert (sizes.vocab_size, sizes.n_layers, sizes.n_heads, sizes.d_model) == (23, 3, 2, 12)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    changes = [
        {f"blocks.{layer}.{part}": edits.scale(2.0, pos=pos)}
        for layer in (0, 2)
        for part in ("resid_mid", "attn_out", *(["attn.v"] if kind != "bloom" else []))
        for pos in (2, 4)
    ]
    # In float64, padded rows of BLOOM are NaN.
    for given in (None, mask) if kind != "bloom" else (None,):
        swept, alone = (
            effects(model, TOKENS, changes, log_prob(3), attention_mask=given)
            for effects in (sweep, separately)
        )
        torch.testing.assert_close(swept.values, alone)


def test_weights_where_the_family_is_known():
    model = made("gpt2")
    attach(model)
    assert of(model, "W_E").W_E.data_ptr() == model.transformer.wte.weight.data_ptr()
    weight = model.transformer.h[1].attn.c_attn.weight
    assert torch.equal(of(model, "W_Q").W_Q[1, 1], weight[:, 6:12])
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(of(model, "W_Q").W_Q[1, 1], weight[:, 6:12])
    bloom = made("bloom")
    attach(bloom)
    with pytest.raises(TypeError, match="from_hf"):
        of(bloom, "W_Q")


@torch.no_grad()
def test_a_block_without_attention():
    kinds = ["full_attention", "conv", "full_attention"]
    model = tiny.model("Lfm2ForCausalLM", layer_types=kinds, hidden_size=16)
    attach(model)
    cache = HookedRunner(model).run_with_cache(TOKENS)[1]
    assert "blocks.0.attn_out" in cache
    assert "blocks.1.attn_out" not in cache
    added = cache["resid_post", 1] - cache["resid_mid", 1]
    torch.testing.assert_close(cache["mlp_out", 1], added, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_model_that_is_dropped_is_freed():
    model = made("gpt2")
    attach(model)
    HookedRunner(model).run_with_cache(TOKENS)
    past = model(TOKENS, use_cache=True)[CACHE]
    alive = [weakref.ref(model), weakref.ref(past)]
    del model, past
    gc.collect()
    assert [what() for what in alive] == [None, None]


@torch.no_grad()
def test_positions_of_a_step_whose_mask_comes_first():
    model = made("gpt2")
    attach(model)
    past = model(TOKENS[:, :4], use_cache=True)[CACHE]
    step = dict(attention_mask=torch.ones_like(TOKENS), input_ids=TOKENS[:, 4:])
    with HookedRunner(model).hooks({"pos_embed": edits.scale(2.0)}):
        found = model(**step, **{CACHE: copy.deepcopy(past)}).logits
    model.transformer.wpe.weight.mul_(2)
    assert torch.equal(found, model(**step, **{CACHE: past}).logits)


@torch.no_grad()
def test_attention_that_adds_nothing_does_not_get_another_value():
    """In some new models, the output maps of attention are zero. Then `resid_mid` equals
    `resid_pre`, and `attach` must not take another value for the output of attention.
    """
    model = made("llama")
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
    attach(model)
    cache = HookedRunner(model).run_with_cache(TOKENS)[1]
    for layer in range(3):
        name = f"blocks.{layer}.attn_out"
        assert name not in cache or not cache[name].any()


@pytest.mark.parametrize("again", [False, True])
def test_a_runner_whose_points_were_removed_says_so(again):
    model = tiny.model("GPT2LMHeadModel")
    attach(model)
    runner = HookedRunner(model)
    detach(model)
    if again:
        attach(model)
    for run in (runner.run_with_cache, lambda tokens: runner.capture(tokens, names="*.z")):
        with pytest.raises(NeverFiredError, match=r"by detach; make a new HookedRunner\(model\)"):
            run(torch.tensor([[3, 1]]))
