"""Attached models that compute attention with code of their own.

`attach` finds scores and patterns by tracing this code. The reference is a copy of the model
without points, with PyTorch's own hooks.
"""

import contextlib
import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hooks import HookedRunner, HookError
from interp import edits, log_prob, sweep
from models import attach, detach
from tests import tiny
from tests.attachable import (
    BATCH,
    CACHE,
    HEADS,
    IS_5_24,
    POS,
    VOCAB,
    config_of,
    made,
    transformers,
)
from tests.attachable import agree as close
from tests.models.attached.kinds import in_form

pytestmark = pytest.mark.usefixtures("unchecked")

TOKENS = torch.randint(3, VOCAB, (BATCH, POS), generator=torch.Generator().manual_seed(1))
# The head, the position of the query and the earlier position of the key that are edited.
HEAD, AT, KEY = 1, 4, 2


def changed(name, attention=None, **changes):
    config = config_of(name)
    for field, value in changes.items():
        setattr(config, field, value)
    return made(name, attention, config)


OLD = dict(new_decoder_architecture=False, num_kv_heads=HEADS)
ALIBI = OLD | dict(alibi=True, multi_query=False)
VARIANTS = {
    "falcon eager": lambda: changed("falcon", "eager"),
    "falcon alibi": lambda: changed("falcon", **ALIBI),
    "falcon alibi eager": lambda: changed("falcon", "eager", **ALIBI),
    "falcon one-key": lambda: changed("falcon", multi_query=True, **OLD),
    "falcon one-key eager": lambda: changed("falcon", "eager", multi_query=True, **OLD),
}

# The names of the module of attention in a block, of its last linear map, and of the maps that
# compute queries, keys and values.
SEPARATE, FUSED = ("q_proj", "k_proj", "v_proj"), "query_key_value"
FAMILIES = {
    "bloom": ("self_attention", "dense", FUSED),
    "codegen": ("attn", "out_proj", "qkv_proj"),
    "falcon": ("self_attention", "dense", FUSED),
    "gpt_neo": ("attn.attention", "out_proj", SEPARATE),
    "gpt_neox_japanese": ("attention", "dense", FUSED),
    "gptj": ("attn", "out_proj", SEPARATE),
    "mpt": ("attn", "out_proj", "Wqkv"),
    "openai-gpt": ("attn", "c_proj", "c_attn"),
    "xglm": ("self_attn", "out_proj", SEPARATE),
}
if IS_5_24:  # in this version, GPT-J and CodeGen use the interface of the library
    del FAMILIES["codegen"], FAMILIES["gptj"]
KINDS = [*FAMILIES, *VARIANTS]


def model_of(kind):
    return VARIANTS[kind]() if kind in VARIANTS else made(kind)


def inside(model, kind, part):
    """Return a module of the attention in layer 1."""
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    return blocks[1].get_submodule(f"{FAMILIES[kind.split()[0]][0]}.{part}")


def made_by(model, kind, name):
    """Return the map that computes queries, keys or values, and the index of the head in it."""
    family, at = kind.split()[0], "qkv".index(name)
    maps = FAMILIES[family][2]
    if maps == SEPARATE:
        return inside(model, kind, maps[at]), HEAD
    if family in ("mpt", "openai-gpt"):
        start = at * HEADS + HEAD
    elif family == "codegen":
        start = HEAD * 3 + "qvk".index(name)
    elif "one-key" in kind:
        start = (HEAD, HEADS, HEADS + 1)[at]
    # Here, two heads of Falcon share one key.
    elif family == "falcon" and "alibi" not in kind:
        start = (HEAD, 2, 3)[at]
    else:
        start = HEAD * 3 + at
    return inside(model, kind, maps), start


def heads_of(kind, name):
    """Return the axis and the heads for an edit of `HEAD`.

    Falcon repeats shared keys before they reach the points, so several heads must be edited.
    """
    if name == "q" or not kind.startswith("falcon") or "alibi" in kind:
        heads = [HEAD]
    else:
        heads = [0] if "one-key" in kind else [0, 1]
    return {"head" if name == "q" else "kv_head": heads}


def logits(model, **given):
    return model(input_ids=TOKENS, **{"use_cache": False} | given).logits


def with_edit(model, name, edit):
    with attach(model):
        hooks = {f"blocks.1.attn.{name}": edit}
        return (
            HookedRunner(model)
            .run_with_hooks(input_ids=TOKENS, use_cache=False, hooks=hooks)
            .logits
        )


def size(model):
    return model.config.hidden_size // HEADS


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_head_of_queries_keys_or_values(kind, name):
    """Scaling a head at its point equals scaling it in the output of the map that computes it.

    The rotation of rotary positions is between the two, but it is linear.
    """
    model = model_of(kind)
    twin, d = copy.deepcopy(model), size(model)
    module, start = made_by(twin, kind, name)

    def scaled(module, args, output):
        output[:, AT, start * d : (start + 1) * d] *= 2.5

    module.register_forward_hook(scaled)
    ours = with_edit(model, name, edits.scale(2.5, pos=AT, **heads_of(kind, name)))
    close(ours, logits(twin))
    assert (ours - logits(model)).abs().max() > 1e-3


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_head_without_an_output(kind):
    """Setting `z` or the pattern of a head to zero equals setting the columns of this head to zero
    in the input of the last map.
    """
    model = model_of(kind)
    twin, d = copy.deepcopy(model), size(model)

    def zeroed(module, args):
        args[0][:, AT, HEAD * d : (HEAD + 1) * d] = 0

    inside(twin, kind, FAMILIES[kind.split()[0]][1]).register_forward_pre_hook(zeroed)
    theirs = logits(twin)
    close(with_edit(model, "z", edits.zero(head=HEAD, pos=AT)), theirs)
    close(with_edit(model, "pattern", edits.zero(head=HEAD, query=AT)), theirs)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_one_score(kind, monkeypatch):
    """An edit that adds to a score also adds to the input of the softmax."""
    model = model_of(kind)
    twin = copy.deepcopy(model)
    if kind in ("falcon", "falcon one-key"):
        twin.config._attn_implementation = "eager"
    # Falcon's eager code adds the slopes of ALiBi twice. So use the fused function as the reference
    # for Falcon with ALiBi, and add the number to its mask.
    name, at = ("scaled_dot_product_attention", 3) if kind == "falcon alibi" else ("softmax", 0)
    function, calls = getattr(F, name), []

    def with_more(*args, **kwargs):
        args = [*args, *(kwargs.pop(name) for name in ("attn_mask",) if name in kwargs)]
        calls.append(args)
        if len(calls) == 2:  # the second call is in layer 1
            args[at] = args[at].clone()
            args[at].view(BATCH, HEADS, POS, POS)[:, HEAD, AT, KEY] += 1.7
        return function(*args, **kwargs)

    monkeypatch.setattr(F, name, with_more)
    theirs = logits(twin)
    monkeypatch.undo()

    def add(scores, point):
        scores[:, HEAD, AT, KEY] += 1.7

    close(with_edit(model, "scores", add), theirs)
    assert (theirs - logits(model)).abs().max() > 1e-4


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_values_match_the_model(kind):
    """The point `v` equals the output of its map. Scores and patterns are computed from `q` and `k`
    by hand.
    """
    model, kept = model_of(kind), []
    module, start = made_by(model, kind, "v")
    module.register_forward_hook(lambda m, args, output: kept.append(output.clone()))
    with attach(model):
        cache = HookedRunner(model).run_with_cache(input_ids=TOKENS, use_cache=False)[1]
    d = size(model)
    columns, head = kept[-1][..., start * d : (start + 1) * d], heads_of(kind, "v")["kv_head"][0]
    assert torch.equal(cache["v", 1][:, :, head], columns)
    q, k, scores, pattern = (cache[name, 1].double() for name in ("q", "k", "scores", "pattern"))
    # These models do not scale scores, or scale queries before they reach the point.
    unscaled = kind.startswith(("gpt_neo ", "xglm")) or kind == "gpt_neo"
    products = torch.einsum("bqhd,bkhd->bhqk", q, k.expand_as(q))
    close(scores, products * (1 if unscaled else d**-0.5))
    # Only for models without a window and without slopes, which add to the scores.
    if "alibi" not in kind and kind not in ("bloom", "mpt", "gpt_neo"):
        hidden = torch.ones(POS, POS, dtype=torch.bool).triu(1)
        close(pattern, scores.masked_fill(hidden, -torch.inf).softmax(-1))


SETTINGS = {
    "plain": contextlib.nullcontext,
    "bfloat16": contextlib.nullcontext,
    "training": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
}


@pytest.mark.sampled(24)
@pytest.mark.filterwarnings("ignore:the .* drew random numbers")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_everywhere_change_nothing(kind, setting):
    model = model_of(kind).to(torch.bfloat16 if setting == "bfloat16" else torch.float32)
    twin = copy.deepcopy(model)
    with attach(model), SETTINGS[setting]():
        model.train(setting == "training")
        twin.train(setting == "training")
        names = [f"blocks.*.attn.{name}" for name in ("q", "k", "v", "scores", "pattern", "z")]
        torch.manual_seed(0)
        output, cache = HookedRunner(model).run_with_cache(
            input_ids=TOKENS, use_cache=False, names=names
        )
        torch.manual_seed(0)
        theirs = logits(twin)
        torch.manual_seed(0)
        assert torch.equal(logits(model), theirs)
    assert len(cache) == 12
    if setting == "bfloat16":
        assert cache["pattern", 1].dtype == torch.bfloat16
    rounded = setting in ("bfloat16", "autocast")
    # With hooks, Falcon's sdpa is replaced by another kernel.
    if twin.config._attn_implementation == "sdpa" and kind.startswith("falcon"):
        close(output.logits.float(), theirs.float(), tolerance=0.02 if rounded else 3e-6)
    else:
        assert torch.equal(output.logits, theirs)


CACHED = [kind for kind in KINDS if kind != "openai-gpt"]  # openai-gpt has no cache of keys


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", CACHED)
@torch.no_grad()
def test_pieces_in_a_cache_are_the_whole_text(kind, static, dtype):
    """A text that is read in pieces has the logits of the whole text, with the same edits.

    Keys that are edited in one piece stay edited for later pieces, even if the model computes its
    products with copies of the keys in float32.
    """
    if static and kind in ("gpt_neo", "falcon alibi", "falcon alibi eager"):
        pytest.skip("the model itself gives other numbers in a static cache, or fails")
    if kind == "xglm" and dtype == torch.float64:
        pytest.skip("the model itself cannot run in float64")
    model, pieces = model_of(kind).to(dtype), TOKENS.split([3, 1, 3], 1)
    hooks = {
        f"blocks.1.attn.{name}": edits.scale(-2.5, pos=[1, 5]) for name in ("q", "k", "v", "z")
    }
    hooks["blocks.0.attn.pattern"] = edits.scale(0.3, query=[2, 3])
    hooks["blocks.0.attn.scores"] = edits.scale(0.3, query=[2, 4])

    def in_pieces(*args):
        cache = transformers.DynamicCache(config=model.config)
        if static:
            cache = transformers.StaticCache(config=model.config, max_cache_len=9)
        return [model(piece, **{CACHE: cache}, use_cache=True).logits for piece in pieces]

    try:
        in_pieces()
    # The model fails in older versions of the library.
    except (RuntimeError, TypeError) as error:
        pytest.skip(f"the model itself fails: {error}")
    with attach(model):
        runner = HookedRunner(model)
        names = [f"blocks.1.attn.{name}" for name in ("q", "k", "v", "pattern", "z")]
        with runner.hooks(hooks):
            found, joined = runner.run_with_cache(TOKENS, run=in_pieces, names=names)
            output, whole = runner.run_with_cache(TOKENS, use_cache=False, names=names)
        close(torch.cat(found, 1), output.logits)
        for name in names:
            close(joined[name], whole[name])
        assert (output.logits - logits(model)).abs().max() > 1e-3


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_derivatives(kind):
    model = model_of(kind).requires_grad_(False)
    names = [f"blocks.1.attn.{name}" for name in ("q", "k", "v", "scores", "pattern", "z")]
    with attach(model):
        runner = HookedRunner(model)
        output, cache = runner.run_with_cache(TOKENS, use_cache=False, names=names, grads=True)
        output.logits[:, -1, 3].sum().backward()
        for name in names:
            step = torch.randn(cache[name].shape, generator=torch.Generator().manual_seed(0)) * 2e-3
            ends = [
                runner.run_with_hooks(TOKENS, hooks={name: lambda v, p, by=by: v + by}).logits
                for by in (step, -step)
            ]
            rise = (ends[0] - ends[1])[:, -1, 3].sum() / 2
            expected = (cache.grads[name] * step).sum()
            torch.testing.assert_close(rise, expected, rtol=0.02, atol=2e-5)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_sweeps_and_lazy_caches(kind):
    model, metric = model_of(kind), log_prob(3)
    jobs = [{f"blocks.1.attn.{name}": edits.zero(pos=at)} for name in "qkvz" for at in (2, 6)]
    with attach(model):
        runner = HookedRunner(model)
        base = metric(model(TOKENS).logits)
        alone = [metric(runner.run_with_hooks(TOKENS, hooks=job).logits) - base for job in jobs]
        close(sweep(model, TOKENS, jobs, metric).values, torch.stack(alone))
        eager, lazy = (runner.run_with_cache(TOKENS, lazy=how)[1] for how in (False, True))
        for name in eager:
            close(lazy[name], eager[name])


@pytest.mark.skipif(torch.__version__ < "2.9.9", reason="PyTorch 2.9 cannot trace hooks of a class")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # the compiler imports it
@pytest.mark.full
@pytest.mark.parametrize("kind", ["gpt_neo", "xglm", "falcon"])
@torch.no_grad()
def test_compiled(kind):
    model = model_of(kind)
    with attach(model):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(TOKENS, use_cache=False).logits, logits(model))
        torch._dynamo.reset()
        with HookedRunner(model).hooks({"blocks.1.attn.pattern": edits.zero(head=HEAD)}):
            close(
                torch.compile(model, backend="eager")(TOKENS, use_cache=False).logits, logits(model)
            )
    torch._dynamo.reset()


@torch.no_grad()
def test_hooks_are_confined_to_their_thread_and_run():
    model, found = model_of("gpt_neo"), []
    plain = logits(model)
    with attach(model):
        runner = HookedRunner(model)
        with runner.hooks({"blocks.1.attn.z": edits.zero()}):
            thread = threading.Thread(target=lambda: found.append(torch.no_grad()(logits)(model)))
            thread.start()
            thread.join()
            assert not torch.equal(logits(model), plain)
        # This capture stops in the middle of the module.
        runner.capture(TOKENS, names="blocks.0.attn.scores")
        seen = []
        with runner.hooks({"blocks.1.attn.q": lambda q, point: seen.append(q.softmax(-1) @ q.mT)}):
            # The products inside a hook are not the attention of the model.
            assert torch.equal(logits(model), plain)
        assert len(seen) == 1
    assert torch.equal(found[0], plain)
    assert torch.equal(logits(model), plain)


@torch.no_grad()
def test_other_code_than_at_attach_is_refused():
    model = model_of("falcon")
    with attach(model):
        plain = logits(model)
        with (
            HookedRunner(model).hooks({"blocks.1.attn.z": edits.zero()}),
            pytest.raises(HookError, match="FalconAttention"),
        ):
            logits(model, output_attentions=True)
        close(logits(model), plain)


@pytest.mark.parametrize("form", ["copied", "saved"])
@torch.no_grad()
def test_copies_have_points_of_their_own_and_are_detached(form):
    model = model_of("bloom")
    plain, hooks = logits(model), {"blocks.1.attn.scores": edits.scale(0.3, head=HEAD)}
    with torch.inference_mode(), attach(model):
        twin = in_form(model, form)
        with HookedRunner(twin).hooks(hooks):
            assert torch.equal(logits(model), plain)
            assert not torch.equal(logits(twin), plain)
    assert not any("forward" in vars(part) for part in model.modules())
    detach(twin)
    assert not any("forward" in vars(part) for part in twin.modules())
    assert torch.equal(logits(twin), plain)


@pytest.mark.parametrize("relative", [False, True])
@torch.no_grad()
def test_an_encoder_whose_last_map_is_elsewhere(relative):
    """Without relative positions, DeBERTa's attention has a form that `attach` recognises.

    With relative positions, it has more products, so `scores` and `pattern` have no points.
    """
    options = dict(relative_attention=relative, pos_att_type=["p2c"])
    model = tiny.model("DebertaV2ForMaskedLM", vocab_size=VOCAB, **options)
    theirs = model(input_ids=TOKENS, output_attentions=True)
    with attach(model) as attached:
        points = HookedRunner(model).points
        assert ("attn" in attached.left_out) == relative == ("blocks.1.attn.q" not in points)
        output, cache = HookedRunner(model).run_with_cache(input_ids=TOKENS)
    assert torch.equal(output.logits, theirs.logits)
    for layer, pattern in enumerate(() if relative else theirs.attentions):
        assert torch.equal(cache["pattern", layer], pattern)


@torch.no_grad()
def test_products_of_hooks_inside_the_module_are_not_taken_for_its_own():
    model = model_of("gpt_neo")
    with attach(model):
        inside(model, "gpt_neo", "q_proj").register_forward_hook(
            lambda m, a, out: (out @ out.mT) @ out
        )
        zero = {"blocks.1.attn.q": edits.zero()}
        with HookedRunner(model).hooks(zero), pytest.raises(HookError, match="GPTNeoSelfAttention"):
            logits(model)


def reversed_product(query, key, value, mask):
    scores = torch.matmul(key, query.mT).mT * 0.3
    return torch.matmul((scores + mask).softmax(-1), value), None


def capped(query, key, value, mask):
    scores = torch.tanh(torch.matmul(query, key.mT))
    return torch.matmul((scores + mask).softmax(-1), value), None


@pytest.mark.parametrize("attend", [reversed_product, capped])
@torch.no_grad()
def test_scores_that_differ_from_the_input_of_the_softmax_are_left_out(attend):
    model = model_of("gpt_neo")
    model.transformer.h[1].attn.attention._attn = attend
    plain = logits(model)
    with attach(model) as attached:
        assert "blocks.1.attn.q" not in HookedRunner(model).points
        assert "GPTNeoSelfAttention" in attached.left_out["attn"]
        assert torch.equal(HookedRunner(model).run_with_cache(input_ids=TOKENS)[0].logits, plain)
    assert torch.equal(logits(model), plain)


@torch.no_grad()
def test_attention_without_a_softmax_is_refused_after_attach():
    model = model_of("gpt_neo")
    with attach(model):
        model.transformer.h[1].attn.attention._attn = lambda query, key, value, mask: (value, None)
        zero = {"blocks.1.attn.z": edits.zero()}
        with HookedRunner(model).hooks(zero), pytest.raises(HookError, match="GPTNeoSelfAttention"):
            logits(model)


@torch.no_grad()
def test_a_cache_is_freed_without_hooks():
    model = model_of("gpt_neo")
    with attach(model):
        past = model(TOKENS, use_cache=True)[CACHE]
        alive = weakref.ref(past)
        del past
        gc.collect()
        assert alive() is None
