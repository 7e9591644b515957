"""Readings and patches of experts, compared with raw hooks on a copy that is not attached."""

import copy

import pytest
import torch

from hooks import CacheError, HookedRunner
from interp import (
    Pairs,
    activation_patching,
    attribution_patching,
    decompose,
    direct_logit_attribution,
    expert_load,
)
from models import attach
from tests.attachable import (
    BATCH,
    KINDS,
    LAYERS,
    NORMED,
    POS,
    TOKENS,
    N,
    agree,
    alone_of,
    call_of,
    experts_of,
    made,
)

# These models have latent or gated attention, or an MLP that is the sum of several modules. The
# readings of this test do not support them.
WITHOUT = """afmoe axk1 axk2 deepseek dots3 glm_moe_dsa glm4_moe_lite granitemoeshared jamba laguna lara_mini lfm2_moe mimo
    qwen3_next sarvam_mla"""
SUMS = [kind for kind in KINDS if not kind.startswith(tuple(WITHOUT.split()))]
PAIRS = Pairs(TOKENS[:1], TOKENS[1:2], torch.tensor([[5, 8]]))


def run(model, **given):
    with torch.no_grad():
        return HookedRunner(model).run_with_cache(input_ids=TOKENS, use_cache=False, **given)


def test_experts_that_read_vectors_times_their_weights():
    model = made("llama4_text")
    given = call_of(copy.deepcopy(model))[1].view(N, BATCH, POS, -1)
    attach(model)
    _, cache = run(model)
    parts = decompose(model, cache, experts=True)
    for n in range(N):
        agree(parts.values[parts.names.index(f"m{LAYERS - 1}.e{n}")], given[n])
    agree(parts.values.sum(0), cache[f"blocks.{LAYERS - 1}.resid_post"])


@pytest.mark.sampled(16)
@pytest.mark.parametrize("kind", SUMS)
def test_each_expert_adds_the_output_of_its_own_call(kind):
    model = made(kind)
    twin = copy.deepcopy(model)
    (x, index, weights), _, logits = call_of(twin)
    routing = torch.zeros(BATCH * POS, N).scatter(-1, index, weights)
    expected = alone_of(experts_of(twin), x) * routing[..., None]
    attach(model)
    _, cache = run(model)
    parts = decompose(model, cache, experts=True)
    names = [f"m{LAYERS - 1}.e{n}" for n in range(N)]
    ours = torch.stack([parts.values[parts.names.index(name)] for name in names], 2).flatten(0, 1)
    if kind.startswith("granitemoe"):
        expected = expected * model.config.residual_multiplier
    if kind == "minimax_m3_vl_text":
        expected = expected * model.config.routed_scaling_factor
    if kind not in NORMED:
        agree(ours, expected)
    agree(parts.values.sum(0), cache[f"blocks.{LAYERS - 1}.resid_post"])
    if not getattr(model.config, "logits_scaling", None) and not getattr(
        model.config, "logit_scale", None
    ):
        total = direct_logit_attribution(model, cache, right=5, experts=True, pos=-1).values.sum(0)
        agree(total, logits[:, -1, 5], tolerance=1e-4)


@pytest.mark.sampled(32)
@pytest.mark.parametrize("kind", KINDS)
def test_patches_of_weights_match_raw_hooks(kind):
    model = made(kind)
    twin = copy.deepcopy(model)
    (_, index, weights), *_ = call_of(twin)
    routing = torch.zeros(BATCH * POS, N).scatter(-1, index, weights).view(BATCH, POS, N)
    attach(model)

    def metric(logits):
        return (logits[1, -1, 5] - logits[1, -1, 8]).item()

    def with_weights(expert, share):
        """Return a change of the experts' arguments.

        At all positions of the second text, the weight of an expert moves by a share towards its
        weight in the first text.
        """

        def change(x, index, weights):
            now = routing.clone()
            now[1, :, expert] += share * (routing[0, :, expert] - routing[1, :, expert])
            every = torch.arange(N).expand(BATCH * POS, N)
            return x, every, now.flatten(0, 1)

        return metric(call_of(twin, change)[-1])

    base = with_weights(0, 0.0)
    last = LAYERS - 1
    patched = activation_patching(model, PAIRS, "routing", layers=last)
    assert patched.axes == ("layer", "expert", "example")
    true = torch.tensor([with_weights(n, 1.0) - base for n in range(N)])
    agree(patched.values[0, :, 0], true, tolerance=1e-4)
    estimated = attribution_patching(model, PAIRS, "routing", layers=last).values[0, :, 0]
    slopes = torch.tensor(
        [(with_weights(n, 0.01) - with_weights(n, -0.01)) / 0.02 for n in range(N)]
    )
    agree(estimated, slopes, tolerance=0.02)


def test_loads_are_counts():
    model = made("mixtral")
    attach(model)
    mask = torch.ones(BATCH, POS, dtype=torch.long)
    mask[0, -2:] = 0
    _, cache = run(model, attention_mask=mask, names="*.mlp.*")
    load, places = expert_load(model, cache), expert_load(model, cache, "pos", weighted=True)
    assert (load.axes, places.axes) == (
        ("layer", "expert", "example"),
        ("layer", "expert", "pos", "example"),
    )
    chosen, routing = cache["mlp.chosen", 1], cache["mlp.routing", 1]
    for expert in range(N):
        for text in range(BATCH):
            real = [pos for pos in range(POS) if mask[text, pos]]
            count = sum(expert in chosen[text, pos].tolist() for pos in real)
            assert load.values[1, expert, text].item() == pytest.approx(count / len(real))
            assert torch.equal(places.values[1, expert, real, text], routing[text, real, expert])
    assert places.values[:, :, -2:, 0].isnan().all()
    torch.testing.assert_close(places.mean(), places.values.nanmean(-1))
    with pytest.raises(ValueError, match="over .*got 'head'"):
        expert_load(model, cache, "head")
    some = run(model, names=["*embed", "*.scale", "*.z", "*mlp_out", "*.resid_*"])[1]
    decompose(model, some)
    with pytest.raises(CacheError, match=r"mlp\.routing.*mlp\.chosen.*mlp\.experts"):
        decompose(model, some, experts=True)
    with pytest.raises(CacheError, match="routing"):
        expert_load(model, run(model, names="*.mlp_out")[1])
