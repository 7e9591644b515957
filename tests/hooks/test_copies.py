"""Eager caches of models that write into no value: what is kept as it is, and what is copied all the same."""

import pytest
import torch

from hooks import CacheError, HookedRunner
from interp import run_with_cache
from models import Transformer, TransformerConfig


def _model(**options):
    config = dict(vocab_size=23, n_ctx=17, n_layers=2, n_heads=3, d_model=12, d_mlp=7)
    return Transformer(TransformerConfig(**config | options)).eval()


TOKENS = torch.tensor([[3, 0, 6, 2, 5]])


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_values_of_our_models_are_kept_without_copies(positions):
    model, made = _model(positions=positions), {}
    handle = model.blocks[1].mlp.post.register_forward_hook(
        lambda module, args, output: made.update(post=output)
    )
    _, copied = run_with_cache(model, TOKENS)
    assert copied["blocks.1.mlp.post"].data_ptr() != made["post"].data_ptr(), "a hook acts"
    handle.remove()
    forward = model.blocks[1].mlp.output.forward
    model.blocks[1].mlp.output.forward = lambda x: made.update(post=x) or forward(x)
    _, cache = run_with_cache(model, TOKENS)
    assert cache["blocks.1.mlp.post"].data_ptr() == made["post"].data_ptr()
    assert all(torch.equal(cache[name], value) for name, value in copied.items())
    # The streams between blocks are one tensor each, and the keys of a learned model part of all projections.
    distinct = {id(value): value for value in cache.values()}
    assert cache["resid_post", 0] is cache["resid_pre", 1]
    assert cache.nbytes == sum(value.nbytes for value in distinct.values())
    weights = {value.untyped_storage().data_ptr() for value in model.state_dict().values()}
    assert not weights & {value.untyped_storage().data_ptr() for value in cache.values()}


def test_a_part_of_a_larger_memory_is_copied():
    _, cache = run_with_cache(_model(), TOKENS, names="*.v")
    assert cache.nbytes == 2 * 5 * 12 * 4
    _, cache = run_with_cache(_model(), TOKENS, names=["*.q", "*.k", "*.v"])
    assert cache.nbytes == 3 * 2 * 5 * 12 * 4
    assert cache["q", 1].untyped_storage().nbytes() == 3 * 5 * 12 * 4, "one memory, wholly kept"


def test_what_the_caller_may_write_into_is_copied():
    model, resid = _model(), torch.randn(2, 5, 12)
    before = resid.clone()
    _, cache = run_with_cache(model, resid, starting_at_layer=1, names="blocks.1.resid_pre")
    resid.zero_()
    assert torch.equal(cache["resid_pre", 1], before)

    class Returns(Transformer):
        def forward(self, tokens):
            return self.embed(self.token_embedding(tokens))

    model = Returns(model.config).eval()
    embedded, cache = run_with_cache(model, torch.tensor([[3, 0, 6]]), names="embed")
    embedded.zero_()
    assert cache["embed"].any()


def test_values_are_copied_where_writes_are_possible_or_not_counted():
    model = _model()
    runner, doubled = HookedRunner(model), lambda value, point: value.mul_(2)
    with runner.hooks({"blocks.1.resid_pre": doubled}):
        _, cache = runner.run_with_cache(TOKENS)
    torch.testing.assert_close(cache["resid_pre", 1], 2 * cache["resid_post", 0])
    with torch.inference_mode():
        _, cache = runner.run_with_cache(TOKENS)
    assert cache["resid_post", 0].untyped_storage().nbytes() == 5 * 12 * 4
    handle = model.blocks[1].resid_pre.register_forward_hook(lambda m, args, value: value.mul_(2))
    _, cache = runner.run_with_cache(TOKENS)
    handle.remove()
    torch.testing.assert_close(cache["resid_pre", 1], 2 * cache["resid_post", 0])


def test_a_write_that_the_model_denied_is_an_error():
    model = _model()
    model.blocks[1].mlp.input.forward = lambda x: x.mul_(2)[..., :7]
    with pytest.raises(CacheError, match="blocks.1.ln2.normalized later"):
        run_with_cache(model, TOKENS)
    model.overwrites_values = True
    _, cache = run_with_cache(model, TOKENS)
    torch.testing.assert_close(cache["pre", 1], 2 * cache["ln2.normalized", 1][..., :7])
