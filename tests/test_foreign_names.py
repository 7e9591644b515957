"""Names of TransformerLens: what they are here, against its own caches of small random models (see `make.py`)."""

import re

import pytest
import torch

from hooks import HookedRunner, UnknownNameError, hooks_name
from models import causal_mask
from models.checkpoints.transformer_lens import from_transformer_lens
from tests import transformer_lens as lens

pytestmark = pytest.mark.filterwarnings("ignore:these weights are centred")

REFUSED = {"alibi", "experts", "final_rms", "post_embedding_ln_learned"}


def loaded(name):
    """What TransformerLens has of a model, the model here, and our cache."""
    theirs = lens.read(name)
    model = from_transformer_lens(theirs.state, theirs.config, dtype=torch.float64).eval()
    return theirs, model, HookedRunner(model).run_with_cache(theirs.tokens)[1]


def translated(point, **options):
    """Our name and None, or None and the reason why there is none."""
    try:
        return hooks_name(point, **options), None
    except UnknownNameError as error:
        return None, str(error)


def by_formula(name, model, cache, state):
    """The value of a name that none of ours has, as the error of `hooks_name` says it."""
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
        "pos_embed": lambda: cache["attn.pos_embed", 1],
    }[last]()


CACHED = [name for name in lens.names() if name not in REFUSED and lens.read(name).cache]


@torch.no_grad()
@pytest.mark.parametrize("name", CACHED)
def test_values_are_theirs_by_name_or_by_the_formula(name):
    theirs, model, cache = loaded(name)
    for point, expected in theirs.cache.items():
        if re.search(r"[qk]_norm\.", point):
            continue  # has no formula
        ours, _ = translated(point, model=model)
        value = cache[ours] if ours else by_formula(point, model, cache, theirs.state)
        torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5, msg=f"{name} {point}")


@pytest.mark.parametrize("name", sorted({*lens.names()} - REFUSED))
def test_every_point_of_theirs_has_a_row(name):
    theirs, model, cache = loaded(name)
    unused = "mlp_out" if theirs.config["attn_only"] else "nothing"
    for point in theirs.points:
        if point.endswith(unused):
            continue  # it is there, and never fires
        ours, reason = translated(point, model=model)
        assert ours in cache if ours else point in reason and "no point of" not in reason


def test_points_of_experts_have_a_row():
    for point in lens.read("experts").points:
        assert "no point of" not in (translated(point)[1] or "")
