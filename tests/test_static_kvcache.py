"""StaticKVCache: what a growing cache gives, also from steps that were captured once and replayed."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hooks import HookedRunner
from models import StaticKVCache, Transformer
from tests.test_kvcache import (
    FORMS,
    HEADS,
    LAYERS,
    LENGTH,
    N_CTX,
    build,
    by_prefix,
    close,
    expected,
    expected_alone,
    left_padded,
    read,
    size,
    text,
)


@pytest.fixture(autouse=True)
def _no_graphs():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [[1] * LENGTH, [LENGTH], [4, 1, 1, 1, 4, 1, 1], [1, 2, 10]])
def test_pieces_equal_the_whole(form, sizes):
    cache = StaticKVCache(N_CTX)
    close(read(build(form), text(2, LENGTH).split(sizes, 1), cache), expected(form))
    assert cache.column.tolist() == [LENGTH]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hooks", [{}, {"*.scores": lambda value, point: None}])
def test_left_padded_rows_in_steps_get_what_they_get_alone(form, hooks):
    """First with the mask, then without: the cache remembers padding."""
    model, cache, (_, padded, mask) = build(form), StaticKVCache(LENGTH + 2), left_padded()
    with HookedRunner(model).hooks(hooks):
        logits = [model(padded[:, :8], attention_mask=mask[:, :8], kv_cache=cache)]
        logits += [model(piece, kv_cache=cache) for piece in padded[:, 8:10].split(1, 1)]
        logits += [model(padded[:, 10:12], attention_mask=mask[:, :12], kv_cache=cache)]
        logits += [model(padded[:, 12:], kv_cache=cache)]
    for row, alone in enumerate(expected_alone(form)):
        close(torch.cat(logits, 1)[row, mask[row]], alone)
    cache.reset()
    whole = read(model, text(3, LENGTH).split([3, 1, 9], 1), cache)
    close(whole, by_prefix(model, text(3, LENGTH)))


@pytest.mark.parametrize("form", ["learned", "window", "window last", "capped window"])
def test_right_padded_prompts_go_on(form):
    """With windows too, because no key is dropped."""
    model, cache, real = build(form), StaticKVCache(N_CTX), torch.tensor([3, 8, 5])
    prompts, more = text(3, 8, seed=5), text(3, 5, seed=6)
    mask = torch.arange(8) < real[:, None]
    model(prompts, attention_mask=mask, kv_cache=cache)
    logits = torch.cat([model(piece, kv_cache=cache) for piece in more.split(1, 1)], 1)
    for row, length in enumerate(real):
        alone = torch.cat([prompts[row, :length], more[row]])[None]
        close(logits[row], by_prefix(model, alone)[0, length:])


@pytest.mark.parametrize("form", ["rotary", "window", "capped window", "multi-query"])
def test_a_captured_step_is_replayed_for_other_texts(form):
    """No number of the first text is in it, nor any operation that reads one back."""
    model, cache, (_, padded, mask) = build(form), StaticKVCache(LENGTH), left_padded()

    def step(tokens):
        return model(tokens, kv_cache=cache)

    model(padded[:, :4], kv_cache=cache)
    captured = make_fx(step)(padded[:, 4:5])
    names = {node.target.__name__ for node in captured.graph.nodes if callable(node.target)}
    assert "index_copy_.default" in names
    assert not any("_local_scalar" in name or "nonzero" in name for name in names)
    for seed in (3, 11):
        _, padded, mask = left_padded(seed)
        cache.reset()
        logits = [model(padded[:, :8], attention_mask=mask[:, :8], kv_cache=cache)]
        for token in padded[:, 8:12].split(1, 1):
            logits.append(captured(token))
            cache.length += 1
        logits.append(model(padded[:, 12:], kv_cache=cache))
        for row, real in enumerate(mask):
            close(torch.cat(logits, 1)[row, real], by_prefix(model, padded[row : row + 1, real])[0])


def test_memory_is_taken_once():
    model, cache = build("window"), StaticKVCache(LENGTH)
    buffers = set()
    for piece in text(2, LENGTH).split([3, 1, 1, 8], 1):
        model(piece, kv_cache=cache)
        assert cache.nbytes == LAYERS * size(HEADS, LENGTH, width=5)
        buffers.add(tuple(layer._keys.data_ptr() for layer in cache.layers))
    cache.reset()
    model(text(2, 3), kv_cache=cache)
    buffers.add(tuple(layer._keys.data_ptr() for layer in cache.layers))
    assert len(buffers) == 1
    with pytest.raises(ValueError, match=f"{LENGTH}; got 3 and {LENGTH}"):
        model(text(2, LENGTH), kv_cache=cache)


@pytest.mark.parametrize("new", [1, 2])
def test_a_pass_that_ends_early_leaves_the_cache_as_it_was(new):
    model, cache, tokens = build("rotary"), StaticKVCache(N_CTX), text(2, LENGTH)

    def fail(value, point):
        raise KeyError("a hook's own")

    model(tokens[:, :6], kv_cache=cache)
    with pytest.raises(KeyError, match="a hook's own"):
        HookedRunner(model).run_with_hooks(
            text(2, new, seed=9), hooks={"blocks.1.attn.z": fail}, kv_cache=cache
        )
    assert (cache.length, cache.column.item()) == (6, 6)
    close(read(model, tokens[:, 6:].split([1, 6], 1), cache), expected("rotary")[:, 6:])


def test_gradients_and_other_batches_are_refused():
    model: Transformer = build("rotary")
    cache = StaticKVCache(N_CTX)
    with torch.enable_grad(), pytest.raises(ValueError, match="gradients"):
        model(text(2, 3), kv_cache=cache)
    model(text(2, 3), kv_cache=cache)
    with pytest.raises(ValueError, match=r"\(2\); got 3"):
        model(text(3, 1), kv_cache=cache)
    cache.reset()
    close(model(text(3, 2), kv_cache=cache), by_prefix(model, text(3, 2)))
