"""KVCache: a text read in pieces gives what the whole gives, in bounded memory, also after a failure."""

import contextlib
import copy
import functools
import itertools
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hooks import HookedRunner, HookError
from models import KVCache, Transformer, TransformerConfig, fold_norms
from models import kvcache as module

VOCAB, N_CTX, LAYERS, HEADS, D_HEAD = 23, 19, 3, 4, 6
LENGTH = 13
LENGTHS = (5, 13, 8)  # of the rows of a padded batch
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
    "capped": dict(attn_cap=1.5),
    "capped window": dict(ROTARY, attn_cap=1.5, window=4, n_kv_heads=2),
    "attention only": dict(mlp="none", d_mlp=0),
    "post": dict(norm_place="post"),
    "window": dict(window=3),
    "window of one": dict(ROTARY, window=1),
    "window beyond": dict(window=31),
    "window first": dict(window=3, window_layers=(0,)),
    "window last": dict(ROTARY, window=5, window_layers=(1, 2), norm_place="output"),
}
WINDOWED = [form for form in FORMS if "window" in form]
UNWINDOWED = [form for form in FORMS if form not in WINDOWED]
EXAMPLES = settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def _numbers(monkeypatch):
    """Buffers grow often, and no graphs are made but where a test asks for them."""
    monkeypatch.setattr(module, "STEP", STEP)
    with torch.no_grad():
        yield


@functools.cache
def build(form="learned", **changes):
    """A random model whose every weight takes part."""
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
    """Logits after each prefix, each of them read by itself: no mask stands between the tokens."""
    with torch.no_grad():
        ends = range(1, tokens.shape[1] + 1)
        return torch.stack([model(tokens[:, :end])[:, -1] for end in ends], 1)


@functools.cache
def expected(form):
    return by_prefix(build(form), text(2, LENGTH))


def close(ours, theirs, atol=2e-5):
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


def read(model, pieces, cache, mask=None):
    """Logits of a text that is read piece by piece."""
    parts = []
    for piece in pieces:
        end = cache.length + piece.shape[1]
        seen = None if mask is None else mask[:, :end]
        parts.append(model(piece, attention_mask=seen, kv_cache=cache))
        assert cache.length == end
    return torch.cat(parts, 1)


@st.composite
def pieces(draw, length=LENGTH):
    """The sizes of the pieces of a text."""
    cuts = draw(st.sets(st.integers(1, length - 1)))
    bounds = [0, *sorted(cuts), length]
    return [end - start for start, end in itertools.pairwise(bounds)]


# What the cache promises first of all.


@pytest.mark.parametrize("form", FORMS)
@EXAMPLES
@given(sizes=pieces())
def test_pieces_equal_the_whole(form, sizes):
    model, tokens = build(form), text(2, LENGTH)
    close(read(model, tokens.split(sizes, 1), KVCache()), expected(form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [[1] * LENGTH, [LENGTH], [4, 4, 4, 1]])
def test_certain_pieces_equal_the_whole(form, sizes):
    model, tokens = build(form), text(2, LENGTH)
    close(read(model, tokens.split(sizes, 1), KVCache()), expected(form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [[4, 1, 3, 5], [1, 2, 10]])
def test_patterns_of_pieces_are_rows_of_the_whole_pattern(form, sizes):
    model, tokens, cache = build(form), text(2, LENGTH), KVCache()
    runner = HookedRunner(model)
    whole = runner.run_with_cache(tokens, names="blocks.*.attn.pattern")[1]
    for piece in tokens.split(sizes, 1):
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
    """Rows of several lengths, the same padded on the left with tokens that would matter, and the mask."""
    rows = [text(1, length, seed=seed + length) for length in LENGTHS]
    padded, mask = text(len(rows), LENGTH, seed=seed).clone(), torch.zeros(3, LENGTH).bool()
    for place, row in enumerate(rows):
        padded[place, -row.shape[1] :], mask[place, -row.shape[1] :] = row, True
    return rows, padded, mask


@functools.cache
def expected_alone(form):
    rows, _, _ = left_padded()
    return [by_prefix(build(form), row)[0] for row in rows]


@pytest.mark.parametrize("form", FORMS)
@EXAMPLES
@given(sizes=pieces(), hooked=st.booleans())
def test_a_left_padded_batch_in_pieces_gives_each_row_what_it_gets_alone(form, sizes, hooked):
    """Some pieces hold nothing but padding of a row; both forms of attention come to numbers."""
    model = build(form)
    _, padded, mask = left_padded()
    hooks = {"*.scores": lambda value, point: None} if hooked else {}
    with HookedRunner(model).hooks(hooks):
        logits = read(model, padded.split(sizes, 1), KVCache(), mask)
    assert logits.isfinite().all()
    for row, alone in enumerate(expected_alone(form)):
        close(logits[row, mask[row]], alone)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.uint8])
def test_masks_of_any_type_are_one_mask(dtype):
    model = build("rotary")
    _, padded, mask = left_padded()
    logits = read(model, padded.split([4, 1, 8], 1), KVCache(), mask.to(dtype))
    close(logits[0, mask[0]], expected_alone("rotary")[0])


@pytest.mark.parametrize("form", UNWINDOWED)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1), (3,)])
def test_right_padded_prompts_go_on(form, sizes):
    """Positions follow the mask: what comes next stands right after the last real token."""
    model = build(form)
    prompts, more = text(3, 8, seed=5), text(3, sum(sizes), seed=6)
    real = torch.tensor([3, 8, 5])
    mask = torch.arange(8) < real[:, None]
    cache = KVCache()
    logits = [model(prompts, attention_mask=mask, kv_cache=cache)]
    for piece in more.split(sizes, 1):
        mask = torch.cat([mask, torch.ones_like(piece, dtype=torch.bool)], 1)
        logits.append(model(piece, attention_mask=mask, kv_cache=cache))
    logits = torch.cat(logits, 1)
    for row, length in enumerate(real):
        alone = torch.cat([prompts[row, :length], more[row]])[None]
        close(logits[row, mask[row]], by_prefix(model, alone)[0])


@pytest.mark.parametrize("form", WINDOWED)
def test_right_padding_is_refused_where_windows_count_on_the_last_keys(form):
    model, cache = build(form), KVCache()
    mask = torch.arange(LENGTH) < torch.tensor([[9], [LENGTH]])
    with pytest.raises(ValueError, match="padding must stand on the left"):
        model(text(2, LENGTH), attention_mask=mask, kv_cache=cache)
    assert cache.length == 0
    close(read(model, text(2, LENGTH).split(5, 1), cache), expected(form))
    # Without a cache the windows count real tokens only.
    alone = by_prefix(model, text(2, LENGTH)[:1, :9])
    close(model(text(2, LENGTH), attention_mask=mask)[0, :9], alone[0])


@pytest.mark.parametrize("form", ["learned", "window"])
def test_a_cache_that_holds_padding_does_not_forget_it(form):
    """Without the mask, what is new is real, and what was padding stays so."""
    model, cache = build(form), KVCache()
    _, padded, mask = left_padded()
    logits = [model(padded[:, :7], attention_mask=mask[:, :7], kv_cache=cache)]
    # The second row's text is the longest; from here on there is no padding in the others either.
    logits.append(model(padded[:, 7:8], attention_mask=mask[:, :8], kv_cache=cache))
    logits += [model(piece, kv_cache=cache) for piece in padded[:, 8:].split([1, 4], 1)]
    for row, alone in enumerate(expected_alone(form)):
        close(torch.cat(logits, 1)[row, mask[row]], alone)


@pytest.mark.parametrize("first", ["none", "all real", "padded", "by query"])
def test_what_was_read_cannot_be_declared_padding_later(first):
    """Nor the other way round: positions, and whom the later tokens saw, would not fit together."""
    model, cache = build("rotary"), KVCache()
    tokens, mask = text(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.bool)
    masks = {"none": None, "all real": mask[:, :6], "by query": torch.ones(2, 6, 6).tril().bool()}
    padded = mask.clone()
    padded[0, :2] = False
    model(tokens[:, :6], attention_mask=masks.get(first, padded[:, :6]), kv_cache=cache)
    other = mask if first == "padded" else padded
    with pytest.raises(ValueError, match="attention_mask"):
        model(tokens[:, 6:], attention_mask=other, kv_cache=cache)
    assert cache.length == 6
    same = padded if first == "padded" else mask
    logits = model(tokens[:, 6:], attention_mask=same, kv_cache=cache)
    close(logits[1], expected("rotary")[1, 6:])
    alone = (
        by_prefix(model, tokens[:1, 2:])[:, 4:] if first == "padded" else expected("rotary")[:1, 6:]
    )
    close(logits[:1], alone)


def test_masks_of_the_two_kinds_do_not_mix():
    """A mask of queries and keys counts padding among the positions, the other one does not."""
    model, cache = build("rotary"), KVCache()
    _, padded, mask = left_padded()
    model(padded[:, :9], attention_mask=mask[:, :9], kv_cache=cache)
    with pytest.raises(ValueError, match="attention_mask"):
        model(padded[:, 9:], attention_mask=mask[:, None].expand(-1, 4, -1), kv_cache=cache)
    assert cache.length == 9
    logits = model(padded[:, 9:], attention_mask=mask, kv_cache=cache)
    close(logits[0], expected_alone("rotary")[0][-4:])


@pytest.mark.parametrize("form", ["learned", "window first", "capped window"])
@pytest.mark.parametrize("ndim", [3, 4])
def test_a_mask_of_queries_and_keys_holds_in_pieces_or_is_refused(form, ndim):
    """Such a mask may ask for keys that a window's cache has dropped."""
    model, tokens, cache = build(form), text(2, LENGTH), KVCache()
    generator = torch.Generator().manual_seed(4)
    mask = torch.rand(2, HEADS, LENGTH, LENGTH, generator=generator) < 0.6
    mask = (mask | torch.eye(LENGTH).bool()).tril()
    mask = mask if ndim == 4 else mask[:, 1]
    whole = model(tokens, attention_mask=mask)
    close(whole[:, :7], model(tokens[:, :7], attention_mask=mask[..., :7, :7]))
    refused = pytest.raises(ValueError, match="drops keys that an attention_mask")
    with refused if model.config.window else contextlib.nullcontext():
        for piece in tokens.split([7, 1, 5], 1):
            start, end = cache.length, cache.length + piece.shape[1]
            part = mask[..., start:end, :end]
            close(model(piece, attention_mask=part, kv_cache=cache), whole[:, start:end])


def test_edits_of_keys_and_values_are_in_the_cache():
    """The hooks acted on the first piece only; a rerun edits those positions only."""
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

    whole = runner.run_with_hooks(
        tokens, hooks={name: of_the_first(edit) for name, edit in edits.items()}
    )
    close(torch.cat([first, second], 1), whole)
    assert (second - expected("grouped")[:, 6:]).abs().amax() > 0.1


@pytest.mark.parametrize("form", ["window first", "rotary"])
def test_the_steps_by_hand_fill_a_cache_too(form):
    model, tokens, cache, parts = build(form), text(2, LENGTH), KVCache(), []
    for piece in tokens.split([5, 1, 7], 1):
        context = model.context(piece, None, cache)
        resid = model.input_resid(piece, context)
        for block in model.blocks:
            resid = block(resid, context)
        parts.append(model.unembed(resid))
        context.commit()
    close(torch.cat(parts, 1), expected(form))


# Memory.


def size(heads, positions, batch=2, width=D_HEAD, itemsize=4):
    """Bytes of the keys and the values of one layer."""
    return 2 * batch * heads * positions * width * itemsize


def test_full_layers_grow_in_steps_up_to_max_context():
    model, cache = build("rotary", n_kv_heads=2), KVCache(max_context=LENGTH - 3)
    assert cache.nbytes == 0
    for end, token in enumerate(text(2, LENGTH - 3).split(1, 1), start=1):
        model(token, kv_cache=cache)
        room = min(-(-end // STEP) * STEP, LENGTH - 3)
        assert cache.nbytes == LAYERS * size(2, room)


def test_room_is_made_in_whole_steps_for_a_long_piece():
    cache = KVCache()
    build("rotary")(text(2, 9), kv_cache=cache)
    assert cache.nbytes == LAYERS * size(HEADS, 12)


@pytest.mark.parametrize(("piece", "window"), [(1, 3), (1, 1), (2, 5), (7, 3), (7, 11)])
def test_a_window_bounds_the_memory(piece, window):
    """However long the text: the window, the new piece, and two steps of room at most."""
    config = dict(n_ctx=71, window=window, window_layers=(0, 2))
    model, cache = build("rotary", **config), KVCache()
    for tokens in text(2, 67).split(piece, 1):
        model(tokens, kv_cache=cache)
        full = size(HEADS, min(-(-cache.length // STEP) * STEP, 71))
        bound = full + 2 * size(HEADS, window - 1 + piece + 2 * STEP)
        assert cache.nbytes <= bound, cache.length
    assert cache.length == 67


@pytest.mark.parametrize("window", [0, 1, STEP - 1, STEP, STEP + 1, 2 * STEP])
def test_buffers_are_moved_once_a_step_at_most(window, monkeypatch):
    """Also where the window is as wide as a step or several."""
    buffers, extended = [], module.LayerCache.extended

    def noting(*args):
        keys, values = extended(*args)
        buffers.append(keys.untyped_storage())  # held, so that no address comes twice
        return keys, values

    monkeypatch.setattr(module.LayerCache, "extended", noting)
    model, cache = build("rotary", n_ctx=71, n_layers=1, window=window), KVCache()
    for token in text(2, 41).split(1, 1):
        model(token, kv_cache=cache)
    pointers = [buffer.data_ptr() for buffer in buffers]
    moves = sum(new != old for old, new in itertools.pairwise(pointers))
    assert 0 < moves <= 40 / STEP


def test_a_long_windowed_text_in_small_memory_has_the_right_end():
    model, cache, tokens = build("window", n_ctx=71), KVCache(), text(2, 67)
    logits = read(model, tokens.split(3, 1), cache)
    close(logits[:, -1], model(tokens)[:, -1])


def test_half_precision_is_kept_in_half_precision():
    model, cache = copy.deepcopy(build("capped window")).bfloat16(), KVCache()
    whole = model(text(2, LENGTH))
    logits = read(model, text(2, LENGTH).split([4, 1, 8], 1), cache)
    assert logits.dtype == torch.bfloat16
    assert cache.nbytes == copy_of(build("capped window")).nbytes / 2
    # Eight bits of precision, at each of some dozen steps.
    close(logits.float(), whole.float(), atol=0.03 * whole.abs().max().item())


def copy_of(model):
    cache = KVCache()
    read(model, text(2, LENGTH).split([4, 1, 8], 1), cache)
    return cache


# Limits, failures and what is refused.


def fired(model, *args, **kwargs):
    """How many points a call that must fail reached."""
    count = []
    hook = lambda value, point: count.append(point.name)  # noqa: E731  # a hook of one line
    with pytest.raises(ValueError, match="do not fit") as error:
        HookedRunner(model).run_with_hooks(*args, hooks={"*": hook}, **kwargs)
    return len(count), str(error.value)


@pytest.mark.parametrize("form", ["learned", "rotary", "window"])
@pytest.mark.parametrize(
    ("limit", "name"), [(7, "max_context"), (None, "context"), (40, "context")]
)
def test_overflow_is_an_error_before_any_work(form, limit, name):
    model, cache = build(form), KVCache(limit)
    most = 7 if limit == 7 else N_CTX
    tokens = text(2, N_CTX + 1)
    reference = by_prefix(model, tokens[:, :most])
    count, message = fired(model, tokens[:, : most + 1], kv_cache=cache)
    assert (count, cache.length) == (0, 0)
    assert message == f"0 cached and {most + 1} new tokens do not fit the {name} of {most}"
    close(model(tokens[:, : most - 2], kv_cache=cache), reference[:, :-2])
    held = cache.nbytes
    count, message = fired(model, tokens[:, :3], kv_cache=cache)
    assert (count, cache.length, cache.nbytes) == (0, most - 2, held)
    assert message == f"{most - 2} cached and 3 new tokens do not fit the {name} of {most}"
    close(model(tokens[:, most - 2 : most], kv_cache=cache), reference[:, -2:])
    assert fired(model, tokens[:, :1], kv_cache=cache)[0] == 0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("limit", [0, -3, 2.5, True])
def test_max_context_is_at_least_one(limit):
    with pytest.raises(
        ValueError, match=f"max_context is a whole number of at least 1, not {limit}"
    ):
        KVCache(limit)


FAILURES = ["embed", "blocks.0.resid_pre", "blocks.0.attn.v", "blocks.1.attn.z", "blocks.1.mlp_out"]
FAILURES += ["blocks.2.attn.k", "blocks.2.attn.z", "blocks.2.resid_post", "ln_final.normalized"]


@pytest.mark.parametrize("form", ["rotary", "window last"])
@pytest.mark.parametrize("at", FAILURES)
def test_an_exception_leaves_the_cache_as_it_was(form, at):
    """The failed call reads other tokens, and more of them than its buffers had room for."""
    model, tokens, cache = build(form), text(2, LENGTH), KVCache()
    runner = HookedRunner(model)

    def fail(value, point):
        raise KeyError("a hook's own")

    def failing(start):
        with pytest.raises(KeyError, match="a hook's own"):
            runner.run_with_hooks(text(2, 7, seed=9), hooks={at: fail}, kv_cache=cache)
        assert cache.length == start

    failing(0)
    parts = [model(tokens[:, :6], kv_cache=cache)]
    failing(6)
    parts.append(model(tokens[:, 6:7], kv_cache=cache))
    failing(7)
    parts.append(model(tokens[:, 7:], kv_cache=cache))
    close(torch.cat(parts, 1), expected(form))


@pytest.mark.parametrize("at", FAILURES)
def test_a_capture_ends_early_and_leaves_the_cache_as_it_was(at):
    model, tokens, cache = build("window first"), text(2, LENGTH), KVCache()
    runner = HookedRunner(model)
    whole = runner.run_with_cache(tokens, names=at)[1][at]
    parts = []
    for start, end in itertools.pairwise((0, 5, 6, LENGTH)):
        captured = runner.capture(tokens[:, start:end], names=at, kv_cache=cache)
        assert cache.length == start
        close(captured[at], whole[:, start:end])
        parts.append(model(tokens[:, start:end], kv_cache=cache))
    close(torch.cat(parts, 1), expected("window first"))


@pytest.mark.parametrize("form", ["rotary", "window last", "capped"])
def test_a_pass_that_ends_early_while_gradients_are_recorded_leaves_no_graph(form):
    """Gradients are on unless somebody switches them off: a capture or a failure must not spoil the cache."""
    model, tokens, cache = build(form), text(2, LENGTH), KVCache()
    runner = HookedRunner(model)
    parts = [model(tokens[:, :6], kv_cache=cache)]
    for at in ("blocks.0.mlp_out", "blocks.1.attn.pattern", "ln_final.normalized"):
        with torch.enable_grad():
            runner.capture(tokens[:, 6:9], names=at, kv_cache=cache)
            with pytest.raises(ZeroDivisionError):
                runner.run_with_hooks(
                    tokens[:, 6:], hooks={at: lambda value, point: 1 / 0}, kv_cache=cache
                )
        assert cache.length == 6
    parts.append(model(tokens[:, 6:8], kv_cache=cache))
    parts.append(model(tokens[:, 8:], kv_cache=cache))
    assert not parts[-1].requires_grad
    close(torch.cat(parts, 1), expected(form))


def test_after_a_failed_first_call_another_batch_may_come():
    model, cache = build("rotary"), KVCache()
    for at in FAILURES:
        with pytest.raises(ZeroDivisionError):
            HookedRunner(model).run_with_hooks(
                text(3, 5), hooks={at: lambda value, point: 1 / 0}, kv_cache=cache
            )
    close(read(model, text(2, LENGTH).split(5, 1), cache), expected("rotary"))


def test_an_unknown_token_leaves_the_cache_as_it_was():
    model, cache, tokens = build("window"), KVCache(), text(2, LENGTH)
    parts = [model(tokens[:, :6], kv_cache=cache)]
    with pytest.raises(ValueError, match="tokens are 0 to 22"):
        model(torch.full((2, 3), VOCAB), kv_cache=cache)
    assert cache.length == 6
    parts.append(model(tokens[:, 6:], kv_cache=cache))
    close(torch.cat(parts, 1), expected("window"))


def test_a_wrong_mask_leaves_the_cache_as_it_was():
    model, cache, tokens = build("rotary"), KVCache(), text(2, LENGTH)
    parts = [model(tokens[:, :6], kv_cache=cache)]
    for mask in (torch.ones(2, LENGTH - 6), torch.ones(2, LENGTH + 1), torch.ones(3, LENGTH)):
        with pytest.raises(ValueError, match="keys count cached positions too"):
            model(tokens[:, 6:], attention_mask=mask, kv_cache=cache)
        assert cache.length == 6
    parts.append(model(tokens[:, 6:], kv_cache=cache))
    close(torch.cat(parts, 1), expected("rotary"))


def test_another_batch_is_refused():
    model, cache = build(), KVCache()
    model(text(2, 5), kv_cache=cache)
    with pytest.raises(ValueError, match="holds 2 rows, and the tokens are 3 rows"):
        model(text(3, 2), kv_cache=cache)
    with pytest.raises(ValueError, match="holds 2 rows, and the tokens are 1 rows"):
        model(text(1, 2), kv_cache=cache)
    assert cache.length == 5


@pytest.mark.parametrize(
    "other",
    [
        dict(n_layers=2),
        dict(n_layers=5),
        dict(window=2),
        dict(window=2, window_layers=(1,)),
        dict(n_kv_heads=2),
        dict(n_kv_heads=1),
        dict(d_head=4),
        dict(d_head=1),
        dict(positions="none"),
        dict(qk_norm="head"),
    ],
)
def test_another_model_is_refused(other):
    """Some of them would fit by broadcasting."""
    first = dict(ROTARY, positions="sinusoidal")
    model, cache = build(**first), KVCache()
    model(text(2, 5), kv_cache=cache)
    with pytest.raises(ValueError, match="this KVCache belongs to a model"):
        build(**first | other)(text(2, 3), kv_cache=cache)
    assert cache.length == 5
    close(model(text(2, LENGTH)[:, :2], kv_cache=cache).shape, torch.Size([2, 2, VOCAB]))


def test_a_model_with_the_same_keys_goes_on():
    """Folded norms and another dropout change no key and no value."""
    model, cache = build("window"), KVCache()
    model(text(2, LENGTH)[:, :6], kv_cache=cache)
    twin = fold_norms(model)
    assert twin.config != model.config
    close(twin(text(2, LENGTH)[:, 6:], kv_cache=cache), expected("window")[:, 6:], atol=1e-4)


def test_another_type_is_refused():
    model, cache = build("window"), KVCache()
    model(text(2, 5), kv_cache=cache)
    with pytest.raises(ValueError, match="holds torch.float32, and the new keys are torch.float64"):
        copy.deepcopy(model).double()(text(2, 3), kv_cache=cache)
    assert cache.length == 5


def test_lazy_is_refused_with_a_cache():
    model, cache, tokens = build("window"), KVCache(), text(2, LENGTH)
    parts = [model(tokens[:, :6], kv_cache=cache)]
    with pytest.raises(HookError, match="KVCache"):
        HookedRunner(model).run_with_cache(tokens[:, 6:], kv_cache=cache, lazy=True)
    assert cache.length == 6
    parts.append(model(tokens[:, 6:], kv_cache=cache))
    close(torch.cat(parts, 1), expected("window"))


@pytest.mark.parametrize("start", [0, 6])
def test_a_plan_leaves_the_cache_as_it_was(start):
    model, cache, tokens = build("window"), KVCache(), text(2, LENGTH)
    runner = HookedRunner(model)
    if start:
        model(tokens[:, :start], kv_cache=cache)
    held = cache.nbytes
    try:
        plan = runner.plan(tokens[:, start:], kv_cache=cache, names="blocks.1.attn.pattern")
    except (HookError, ValueError):
        plan = None
    assert (cache.length, cache.nbytes) == (start, held)
    logits, values = runner.run_with_cache(
        tokens[:, start:], kv_cache=cache, names="blocks.1.attn.pattern"
    )
    assert plan is None or plan.nbytes == values.nbytes
    close(logits, expected("window")[:, start:])


def test_a_plan_takes_arguments_that_cannot_be_copied():
    class Locked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Identity()

        def forward(self, x, lock):
            with lock:
                return self.inner(x * 2)

    plan = HookedRunner(Locked().eval()).plan(torch.ones(3), threading.Lock())
    assert plan.nbytes == 12


def test_a_call_without_tokens_changes_nothing():
    model, cache, tokens = build("window"), KVCache(), text(2, LENGTH)
    model(tokens[:, :6], kv_cache=cache)
    assert model(tokens[:, :0], kv_cache=cache).shape == (2, 0, VOCAB)
    assert cache.length == 6
    close(model(tokens[:, 6:], kv_cache=cache), expected("window")[:, 6:])


def test_the_first_call_may_have_no_tokens():
    model, cache, tokens = build("window"), KVCache(), text(2, LENGTH)
    assert model(tokens[:, :0], kv_cache=cache).shape == (2, 0, VOCAB)
    assert cache.length == 0
    close(model(tokens, kv_cache=cache), expected("window"))


# Several at once.


@pytest.mark.parametrize("form", ["window last", "grouped"])
def test_a_deep_copy_branches_a_text(form):
    model, tokens, cache = build(form), text(2, LENGTH), KVCache()
    model(tokens[:, :6], kv_cache=cache)
    branch = copy.deepcopy(cache)
    assert (branch.length, branch.nbytes) == (6, cache.nbytes)
    other = torch.cat([tokens[:, :6], text(2, 7, seed=8)], 1)
    ours, theirs = [], []
    for start, end in itertools.pairwise((6, 8, 9, LENGTH)):
        theirs.append(model(other[:, start:end], kv_cache=branch))
        ours.append(model(tokens[:, start:end], kv_cache=cache))
    close(torch.cat(ours, 1), expected(form)[:, 6:])
    close(torch.cat(theirs, 1), by_prefix(model, other)[:, 6:])


def test_a_deep_copy_knows_of_the_padding():
    _, padded, mask = left_padded()
    model, cache = build("rotary"), KVCache()
    model(padded[:, :9], attention_mask=mask[:, :9], kv_cache=cache)
    branch = copy.deepcopy(cache)
    for kv_cache in (cache, branch):
        logits = model(padded[:, 9:], kv_cache=kv_cache)
        close(logits[2], expected_alone("rotary")[2][-4:])


def test_caches_are_independent():
    """Of one model and of several, in turn."""
    runs = [("window", 2), ("rotary", 3), ("window", 1), ("capped", 2)]
    caches = [KVCache() for _ in runs]
    parts = [[] for _ in runs]
    for start, end in itertools.pairwise((0, 4, 5, LENGTH)):
        for (form, batch), cache, own in zip(runs, caches, parts, strict=True):
            tokens = text(batch, LENGTH, seed=batch)
            own.append(build(form)(tokens[:, start:end], kv_cache=cache))
    for (form, batch), own in zip(runs, parts, strict=True):
        close(torch.cat(own, 1), by_prefix(build(form), text(batch, LENGTH, seed=batch)))


def test_threads_with_caches_of_their_own():
    model, results = build("window first"), {}
    texts = {seed: text(2, LENGTH, seed=seed) for seed in range(20, 26)}

    def work(seed):
        with torch.no_grad():
            results[seed] = read(model, texts[seed].split(1, 1), KVCache())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, tokens in texts.items():
        close(results[seed], by_prefix(model, tokens))


# Gradients, and where numbers are made otherwise.


class OverwrittenError(Exception):
    """What autograd says, as a RuntimeError, of values that it needs and that were written over."""


def gradients(model, run):
    """The gradients of a loss over all logits."""
    model.zero_grad()
    loss = run().log_softmax(-1)[..., 5].sum()
    try:
        loss.backward()
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            raise OverwrittenError from error
        raise
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("form", ["learned", "window", "grouped", "capped"])
@pytest.mark.parametrize("sizes", [[LENGTH], [6, 7], [6, 1, 6], [6, 1, 1, 5]])
def test_gradients_are_right_or_refused(form, sizes):
    """Keys that were written over must not lead to other gradients in silence."""
    model, tokens = copy.deepcopy(build(form)), text(2, LENGTH)
    refusal = contextlib.nullcontext()
    if len(sizes) > 1:
        refusal = contextlib.suppress(ValueError, OverwrittenError)
    with torch.enable_grad():
        whole = gradients(model, lambda: model(tokens))
        with refusal:
            ours = gradients(model, lambda: read(model, tokens.split(sizes, 1), KVCache()))
            assert ours.keys() == whole.keys()
            for name, gradient in whole.items():
                close(ours[name], gradient, atol=1e-4)


def test_what_was_read_without_gradients_goes_on_with_them():
    """The gradient of the later piece alone: the cached keys are constants."""
    model, tokens, cache = copy.deepcopy(build()), text(2, LENGTH), KVCache()
    model(tokens[:, :6], kv_cache=cache)
    with torch.enable_grad():

        def constant(value, point):
            return torch.cat([value[:, :6].detach(), value[:, 6:]], 1)

        def later():
            return HookedRunner(model).run_with_hooks(
                tokens, hooks={"*.attn.k": constant, "*.attn.v": constant}
            )[:, 6:]

        theirs = gradients(model, later)
        ours = gradients(model, lambda: model(tokens[:, 6:], kv_cache=cache))
        for name, gradient in theirs.items():
            close(ours[name], gradient, atol=1e-4)


@pytest.mark.parametrize("form", ["rotary", "window", "capped"])
def test_inference_mode(form):
    model, tokens, cache = build(form), text(2, LENGTH), KVCache()
    with torch.inference_mode():
        logits = read(model, tokens.split([6, 1, 6], 1), cache)
    close(logits, expected(form))


@pytest.mark.parametrize("form", ["rotary", "window", "multi-query", "capped"])
def test_autocast(form):
    """The same roundings in pieces as in the whole, up to a few of them."""
    model, tokens = build(form), text(2, LENGTH)
    with torch.autocast("cpu", torch.bfloat16):
        whole = model(tokens)
        logits = read(model, tokens.split([6, 1, 6], 1), KVCache())
    assert logits.dtype == whole.dtype
    close(logits.float(), whole.float(), atol=0.03 * whole.abs().max().item())
