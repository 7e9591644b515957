"""KVCache: a text that is read in pieces gives the same numbers as the whole text.

The memory is bounded, and a run that fails does not change the cache.
"""

import contextlib
import copy
import functools
import itertools

import pytest
import torch

from hooks import HookedRunner, HookError
from models import KVCache, RotaryBase, Transformer, TransformerConfig, fold_norms, kernels
from models.running import kvcache as module
from models.running import masks
from tests.reference import masked

VOCAB, N_CTX, LAYERS, HEADS, D_HEAD = 23, 19, 3, 4, 6
LENGTH = 13
# The lengths of the rows of a padded batch.
LENGTHS = (5, 13, 8)
STEP = 4

SIZES = dict(vocab_size=VOCAB, n_ctx=N_CTX, n_layers=LAYERS, n_heads=HEADS, d_model=20, d_mlp=11)
ROTARY = dict(positions="rotary", d_head=D_HEAD)
FORMS = {
    "learned": {},
    "rotary": ROTARY,
    "sinusoidal": dict(positions="sinusoidal", norm="rmsnorm"),
    "unplaced": dict(positions="none", parallel=True),
    "grouped": dict(ROTARY, n_kv_heads=2, qk_norm="head", mlp="gated"),
    "multi-query": dict(n_kv_heads=1, norm_place="sandwich"),
    "capped window": dict(ROTARY, attn_cap=1.5, window=4, n_kv_heads=2),
    "post": dict(norm_place="post"),
    "window": dict(window=3),
    "window of one": dict(ROTARY, window=1),
    "window beyond": dict(window=31),
    "window first": dict(window=3, window_layers=(0,)),
    "window last": dict(ROTARY, window=5, window_layers=(1, 2), norm_place="output"),
}
WINDOWED = [form for form in FORMS if "window" in form]
UNWINDOWED = [form for form in FORMS if form not in WINDOWED]


@pytest.fixture(autouse=True)
def _numbers(monkeypatch):
    """Use small buffers that grow often, and small blocks of queries. Switch gradients off."""
    monkeypatch.setattr(module, "STEP", STEP)
    for blocks in (kernels, masks):
        monkeypatch.setattr(blocks, "BLOCK", 4)
    with torch.no_grad():
        yield


@functools.cache
def build(form="learned", **changes):
    """Return a random model in which every weight matters."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = Transformer(TransformerConfig(**SIZES | FORMS[form] | changes)).eval()
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model


@functools.cache
def text(*shape, seed=1):
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def by_prefix(model, tokens):
    """Return the logits after each prefix. Each prefix is a run of its own without a mask."""
    with torch.no_grad():
        ends = range(1, tokens.shape[1] + 1)
        return torch.stack([model(tokens[:, :end])[:, -1] for end in ends], 1)


@functools.cache
def expected(form):
    return by_prefix(build(form), text(2, LENGTH))


def close(ours, theirs, atol=2e-5):
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


def read(model, pieces, cache, mask=None):
    """Return the logits of a text that is read piece by piece."""
    parts = []
    for piece in pieces:
        end = cache.length + piece.shape[1]
        seen = None if mask is None else mask[:, :end]
        parts.append(model(piece, attention_mask=seen, kv_cache=cache))
        assert cache.length == end
    return torch.cat(parts, 1)


# --- the main promise of the cache


@pytest.mark.sampled(16)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [[1] * LENGTH, [LENGTH], [4, 4, 4, 1], [1, 2, 10]])
def test_pieces_equal_the_whole(form, sizes):
    close(read(build(form), text(2, LENGTH).split(sizes, 1), KVCache()), expected(form))


@pytest.mark.parametrize("form", FORMS)
def test_patterns_of_pieces_are_rows_of_the_whole_pattern(form):
    model, tokens, cache = build(form), text(2, LENGTH), KVCache()
    runner = HookedRunner(model)
    whole = runner.run_with_cache(tokens, names="blocks.*.attn.pattern")[1]
    for piece in tokens.split([4, 1, 3, 5], 1):
        start = cache.length
        logits, part = runner.run_with_cache(piece, names="blocks.*.attn.pattern", kv_cache=cache)
        close(logits, expected(form)[:, start : cache.length])
        for layer, window in enumerate(model.config.windows):
            rows = whole["pattern", layer][:, :, start : cache.length, : cache.length]
            seen = part["pattern", layer].shape[-1]
            assert seen == cache.length - (max(0, start - window + 1) if window else 0)
            assert not rows[..., :-seen].any()
            close(part["pattern", layer], rows[..., -seen:])


def left_padded(seed=3):
    """Return texts of several lengths, the batch of these texts with padding on the left, and its
    mask. The padding consists of ordinary tokens, so a model that reads it gives other numbers.
    """
    rows = [text(1, length, seed=seed + length) for length in LENGTHS]
    padded, mask = text(len(rows), LENGTH, seed=seed).clone(), torch.zeros(3, LENGTH).bool()
    for place, row in enumerate(rows):
        padded[place, -row.shape[1] :], mask[place, -row.shape[1] :] = row, True
    return rows, padded, mask


@functools.cache
def expected_alone(form):
    rows, _, _ = left_padded()
    return [by_prefix(build(form), row)[0] for row in rows]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("sizes", "hooked"), [([3, 1, 1, 8], True), ([1] * LENGTH, False), ([8, 5], False)]
)
def test_a_left_padded_batch_in_pieces_equals_each_text_alone(form, sizes, hooked):
    """Some pieces of a text contain only padding. The explicit and the fused form of attention
    still return finite numbers.
    """
    model = build(form)
    _, padded, mask = left_padded()
    hooks = {"*.scores": lambda value, point: None} if hooked else {}
    with HookedRunner(model).hooks(hooks):
        logits = read(model, padded.split(sizes, 1), KVCache(), mask)
    assert logits.isfinite().all()
    for row, alone in enumerate(expected_alone(form)):
        close(logits[row, mask[row]], alone)


@pytest.mark.parametrize("form", UNWINDOWED)
def test_right_padded_prompts_go_on(form):
    """Positions follow the mask: the next token comes directly after the last real token."""
    model, cache, real = build(form), KVCache(), torch.tensor([3, 8, 5])
    prompts, more = text(3, 8, seed=5), text(3, 3, seed=6)
    mask = torch.cat([torch.arange(8) < real[:, None], torch.ones(3, 3).bool()], 1)
    logits = read(model, torch.cat([prompts, more], 1).split([8, 2, 1], 1), cache, mask)
    for row, length in enumerate(real):
        alone = torch.cat([prompts[row, :length], more[row]])[None]
        close(logits[row, mask[row]], by_prefix(model, alone)[0])


def test_right_padding_with_a_window_and_a_cache_is_an_error():
    model, cache = build("window last"), KVCache()
    mask = torch.arange(LENGTH) < torch.tensor([[9], [LENGTH]])
    with pytest.raises(ValueError, match="padding"):
        model(text(2, LENGTH), attention_mask=mask, kv_cache=cache)
    assert cache.length == 0
    # Without a cache, the same mask is allowed: windows count real tokens.
    logits = model(text(2, LENGTH), attention_mask=mask)
    close(logits[0, :9], by_prefix(model, text(2, LENGTH)[:1, :9])[0])


@pytest.mark.parametrize("form", ["learned", "window"])
def test_a_cache_that_holds_padding_does_not_forget_it(form):
    """Without a mask, new tokens are real and padding stays padding, also in a copy of
    the cache.
    """
    model, cache = build(form), KVCache()
    _, padded, mask = left_padded()
    logits = [model(padded[:, :8], attention_mask=mask[:, :8], kv_cache=cache)]
    branch = copy.deepcopy(cache)
    logits += [model(piece, kv_cache=cache) for piece in padded[:, 8:].split([1, 4], 1)]
    for row, alone in enumerate(expected_alone(form)):
        close(torch.cat(logits, 1)[row, mask[row]], alone)
        close(model(padded[:, 8:], kv_cache=copy.deepcopy(branch))[row], alone[-5:])
        # A mask of queries and keys does not change padding to real tokens either.
        if form == "learned":
            by_query = dict(query_key_mask=torch.ones(LENGTH, LENGTH).tril()[8:])
            close(model(padded[:, 8:], kv_cache=copy.deepcopy(branch), **by_query)[row], alone[-5:])


@pytest.mark.parametrize("first", ["none", "all real", "padded", "by query"])
def test_tokens_that_were_read_cannot_become_padding_later(first):
    """Padding cannot become real tokens later either. In both cases, the positions and keys of
    earlier pieces would be wrong.
    """
    model, cache = build("rotary"), KVCache()
    tokens, mask = text(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.bool)
    padded = mask.clone()
    padded[0, :2] = False
    masks = {"none": None, "all real": mask[:, :6], "padded": padded[:, :6]}
    masks["by query"] = torch.ones(2, 6, 6).tril().bool()
    model(tokens[:, :6], **masked(masks[first]), kv_cache=cache)
    same, other = (padded, mask) if first == "padded" else (mask, padded)
    with pytest.raises(ValueError, match="attention_mask"):
        model(tokens[:, 6:], attention_mask=other, kv_cache=cache)
    assert cache.length == 6
    logits = model(tokens[:, 6:], attention_mask=same, kv_cache=cache)
    close(logits[1], expected("rotary")[1, 6:])
    whole = by_prefix(model, tokens[:1, 2:])[:, 4:]
    close(logits[:1], whole if first == "padded" else expected("rotary")[:1, 6:])


@pytest.mark.parametrize("form", ["learned", "window first"])
@pytest.mark.parametrize("ndim", [3, 4])
def test_a_mask_of_queries_and_keys_acts_in_pieces_or_is_an_error(form, ndim):
    """Such a mask may ask for keys that a window's cache has dropped."""
    model, tokens, cache = build(form), text(2, LENGTH), KVCache()
    generator = torch.Generator().manual_seed(4)
    mask = torch.rand(2, HEADS, LENGTH, LENGTH, generator=generator) < 0.6
    mask = (mask | torch.eye(LENGTH).bool()).tril()
    mask = mask if ndim == 4 else mask[:, 1]
    whole = model(tokens, query_key_mask=mask)
    refused = pytest.raises(ValueError, match="window")
    with refused if model.config.window else contextlib.nullcontext():
        for piece in tokens.split([7, 1, 5], 1):
            start, end = cache.length, cache.length + piece.shape[1]
            part = mask[..., start:end, :end]
            close(model(piece, query_key_mask=part, kv_cache=cache), whole[:, start:end])


def test_edits_of_keys_and_values_are_in_the_cache():
    """The edits are active only for the first piece. The reference is a run of the whole text, in
    which the same edits act only at the positions of this piece.
    """
    model, tokens = build("grouped"), text(2, LENGTH)
    runner = HookedRunner(model)
    edits = {
        "blocks.0.attn.k": lambda value, point: value * 1.7,
        "blocks.1.attn.v": lambda value, point: value.flip(2),
        "blocks.1.mlp_out": lambda value, point: value - 0.5,
    }
    cache = KVCache()
    with runner.hooks(edits):
        first = model(tokens[:, :6], kv_cache=cache)
    second = model(tokens[:, 6:], kv_cache=cache)

    def of_the_first(edit):
        return lambda value, point: torch.cat([edit(value[:, :6], point), value[:, 6:]], 1)

    hooks = {name: of_the_first(edit) for name, edit in edits.items()}
    close(torch.cat([first, second], 1), runner.run_with_hooks(tokens, hooks=hooks))
    assert (second - expected("grouped")[:, 6:]).abs().amax() > 0.1


# --- memory


def size(heads, positions, batch=2, width=D_HEAD, itemsize=4):
    """Return the bytes of the keys and values of one layer."""
    return 2 * batch * heads * positions * width * itemsize


def test_full_layers_grow_in_steps_up_to_max_context():
    model, cache = build("rotary", n_kv_heads=2), KVCache(max_context=LENGTH - 3)
    assert cache.nbytes == 0
    for end, token in enumerate(text(2, LENGTH - 3).split(1, 1), start=1):
        model(token, kv_cache=cache)
        room = min(-(-end // STEP) * STEP, LENGTH - 3)
        assert cache.nbytes == LAYERS * size(2, room)


@pytest.mark.parametrize(("piece", "window"), [(1, 3), (2, 5), (7, 3), (7, 11)])
def test_a_window_bounds_the_memory(piece, window):
    """A layer keeps at most the window, the new piece, and the room of two steps, for any
    length.
    """
    model = build("rotary", n_ctx=71, window=window, window_layers=(0, 2))
    cache, tokens = KVCache(), text(2, 67)
    for part in tokens.split(piece, 1):
        logits = model(part, kv_cache=cache)
        full = size(HEADS, min(-(-cache.length // STEP) * STEP, 71))
        bound = full + 2 * size(HEADS, window - 1 + piece + 2 * STEP)
        assert cache.nbytes <= bound, cache.length
    close(logits[:, -1], model(tokens)[:, -1])


@pytest.mark.parametrize("window", [0, 1, STEP, 2 * STEP])
def test_buffers_are_moved_once_a_step_at_most(window, monkeypatch):
    """This also holds if the window is as wide as one step or several steps of the buffer."""
    buffers, extended = [], module.LayerCache.store

    def noting(*args):
        keys, values = extended(*args)
        # Keep the storage alive, so that no address occurs twice.
        buffers.append(keys.untyped_storage())
        return keys, values

    monkeypatch.setattr(module.LayerCache, "store", noting)
    model, cache = build("rotary", n_ctx=71, n_layers=1, window=window), KVCache()
    for token in text(2, 41).split(1, 1):
        model(token, kv_cache=cache)
    pointers = [buffer.data_ptr() for buffer in buffers]
    moves = sum(new != old for old, new in itertools.pairwise(pointers))
    assert 0 < moves <= 40 / STEP


def test_half_precision_is_kept_in_half_precision():
    pieces = text(2, LENGTH).split([4, 1, 8], 1)
    model, cache, wide = copy.deepcopy(build("capped window")).bfloat16(), KVCache(), KVCache()
    read(build("capped window"), pieces, wide)
    logits, whole = read(model, pieces, cache), model(text(2, LENGTH))
    assert logits.dtype == torch.bfloat16
    assert cache.nbytes == wide.nbytes / 2
    # bfloat16 has eight bits of precision, and there are some dozen steps that round.
    close(logits.float(), whole.float(), atol=0.03 * whole.abs().max().item())


# --- limits, failures and what is refused


@pytest.mark.parametrize("form", ["learned", "rotary"])
@pytest.mark.parametrize("limit", [7, None, 40])
def test_overflow_is_an_error_before_any_work(form, limit):
    model, cache, reached = build(form), KVCache(limit), []
    most = 7 if limit == 7 else N_CTX
    tokens = text(2, N_CTX + 1)
    hooks = {"*": lambda value, point: reached.append(point.name)}
    for held, new in ((0, most + 1), (most - 2, 3)):
        if held:
            model(tokens[:, :held], kv_cache=cache)
        with pytest.raises(ValueError, match=f"{most}; got {held} and {new}"):
            HookedRunner(model).run_with_hooks(tokens[:, :new], hooks=hooks, kv_cache=cache)
        assert cache.length == held
    assert not reached
    last = model(tokens[:, most - 2 : most], kv_cache=cache)
    close(last, by_prefix(model, tokens[:, :most])[:, -2:])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("limit", [0, -3, 2.5, True])
def test_max_context_is_at_least_one(limit):
    with pytest.raises(
        ValueError if type(limit) is int else TypeError, match=f"max_context .*{limit}"
    ):
        KVCache(limit)


FAILURES = ["embed", "blocks.0.attn.v", "blocks.1.attn.z", "blocks.2.attn.k", "ln_final.normalized"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", ["rotary", "window last", "window first"])
@pytest.mark.parametrize("at", FAILURES)
@pytest.mark.parametrize("recording", [False, True])
def test_a_pass_that_ends_early_leaves_the_cache_as_it_was(form, at, recording):
    """A run fails by an error of a hook, wrong tokens, too many tokens, or the stop of
    a capture.
    """
    model, tokens, cache, parts = build(form), text(2, LENGTH), KVCache(), []
    runner = HookedRunner(model)
    whole = runner.run_with_cache(tokens, names=at)[1][at]

    def fail(value, point):
        raise KeyError("a hook's own")

    with pytest.raises(KeyError, match="a hook's own"):
        runner.run_with_hooks(text(3, 5), hooks={at: fail}, kv_cache=cache)
    for start, end in itertools.pairwise((0, 6, 7, LENGTH)):
        with torch.set_grad_enabled(recording):
            with pytest.raises(KeyError, match="a hook's own"):
                runner.run_with_hooks(text(2, 6, seed=9), hooks={at: fail}, kv_cache=cache)
            captured = runner.capture(tokens[:, start:end], names=at, kv_cache=cache)
        assert cache.length == start
        close(captured[at], whole[:, start:end])
        parts.append(model(tokens[:, start:end], kv_cache=cache))
    assert not parts[-1].requires_grad
    close(torch.cat(parts, 1), expected(form))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(tokens=torch.full((2, 3), VOCAB)), "23"),
        (dict(tokens=text(3, 2)), r"\(2\); got 3"),
        (dict(tokens=text(1, 2)), r"\(2\); got 1"),
        (dict(attention_mask=torch.ones(2, LENGTH - 6)), r"\[2, 7\]"),
        (dict(attention_mask=torch.ones(3, LENGTH)), r"\[3, 13\]"),
        (dict(lazy=True), "KVCache"),
    ],
)
def test_a_rejected_call_leaves_the_cache_as_it_was(change, match):
    model, cache, tokens = build("window"), KVCache(), text(2, LENGTH)
    model(tokens[:, :6], kv_cache=cache)
    with pytest.raises((ValueError, HookError), match=match):
        HookedRunner(model).run_with_cache(**dict(tokens=tokens[:, 6:]) | change, kv_cache=cache)
    assert cache.length == 6
    close(model(tokens[:, 6:], kv_cache=cache), expected("window")[:, 6:])


@pytest.mark.parametrize(
    "other",
    [
        dict(n_layers=2),
        dict(window=2, window_layers=(1,)),
        dict(n_kv_heads=1),
        dict(d_head=1),
        dict(positions="none"),
        dict(qk_norm="head"),
        dict(window_rotary=RotaryBase(theta=7.0)),
    ],
)
def test_another_model_is_refused(other):
    """Without the check, PyTorch would broadcast the keys of some of these models."""
    first = dict(ROTARY, positions="sinusoidal")
    if "window_rotary" in other:
        first = dict(ROTARY, window=3, window_layers=(1,))
    model, cache = build(**first), KVCache()
    model(text(2, 5), kv_cache=cache)
    name = "windows" if "window" in other else next(iter(other))
    with pytest.raises(ValueError, match=f"KVCache.*same {name}"):
        build(**first | other)(text(2, 3), kv_cache=cache)
    assert cache.length == 5


def test_a_model_with_the_same_keys_goes_on():
    """Twins with folded norms, or in float64, can continue the cache of a model.

    The first has the same keys and values, and the second has them with smaller rounding errors.
    """
    model, tokens = build("window"), text(2, LENGTH)
    twin = fold_norms(model)
    assert twin.config != model.config
    for other in (twin, copy.deepcopy(model).double()):
        cache = KVCache()
        model(tokens[:, :6], kv_cache=cache)
        logits = read(other, tokens[:, 6:].split([1, 6], 1), cache)
        close(logits.float(), expected("window")[:, 6:], atol=1e-4)


@pytest.mark.parametrize("start", [0, 6])
def test_a_plan_and_a_call_without_tokens_leave_the_cache_as_it_was(start):
    model, cache, tokens = build("window"), KVCache(), text(2, LENGTH)
    runner = HookedRunner(model)
    if start:
        model(tokens[:, :start], kv_cache=cache)
    held = cache.nbytes
    given = dict(kv_cache=cache, names="blocks.1.attn.pattern")
    plan = runner.plan(tokens[:, start:], **given)
    assert (cache.length, cache.nbytes) == (start, held)
    assert model(tokens[:, :0], kv_cache=cache).shape == (2, 0, VOCAB)
    assert cache.length == start
    logits, values = runner.run_with_cache(tokens[:, start:], **given)
    assert plan.nbytes == values.nbytes
    close(logits, expected("window")[:, start:])


# --- gradients, and other code paths for the same numbers


def gradients(model, run):
    """Return the gradients of the weights, for a loss over all logits."""
    model.zero_grad()
    run().log_softmax(-1)[..., 5].sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("form", ["learned", "window", "grouped", "capped window"])
@pytest.mark.parametrize("sizes", [[LENGTH], [6, 1, 1, 5]])
def test_gradients_flow_through_pieces(form, sizes):
    """A text in pieces has the gradients of the whole text, also after a run that ended early."""
    model, tokens, cache = copy.deepcopy(build(form)), text(2, LENGTH), KVCache()
    with torch.enable_grad():
        whole = gradients(model, lambda: model(tokens))
        HookedRunner(model).capture(tokens, names="blocks.1.attn.z", kv_cache=cache)
        ours = gradients(model, lambda: read(model, tokens.split(sizes, 1), cache))
    assert ours.keys() == whole.keys()
    for name, gradient in whole.items():
        close(ours[name], gradient, atol=1e-4)


def test_a_cache_without_gradients_can_be_continued_with_gradients():
    """The cached keys and values have no gradient, so they are constants for the later piece."""
    model, tokens, cache = copy.deepcopy(build()), text(2, LENGTH), KVCache()
    model(tokens[:, :6], kv_cache=cache)
    with torch.enable_grad():

        def constant(value, point):
            return torch.cat([value[:, :6].detach(), value[:, 6:]], 1)

        def later():
            hooks = {"*.attn.k": constant, "*.attn.v": constant}
            return HookedRunner(model).run_with_hooks(tokens, hooks=hooks)[:, 6:]

        theirs = gradients(model, later)
        ours = gradients(model, lambda: model(tokens[:, 6:], kv_cache=cache))
    for name, gradient in theirs.items():
        close(ours[name], gradient, atol=1e-4)


@pytest.mark.parametrize("form", ["rotary", "window", "capped window"])
def test_inference_mode(form):
    model, tokens, cache = build(form), text(2, LENGTH), KVCache()
    with torch.inference_mode():
        first = read(model, tokens[:, :7].split([6, 1], 1), cache)
    later = read(model, tokens[:, 7:].split([1, 5], 1), cache)
    close(torch.cat([first, later], 1), expected(form))
