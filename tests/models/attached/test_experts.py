"""Points of mixtures of experts. The reference is a copy of the model that is not attached, with
PyTorch's own hooks and with plain arithmetic.
"""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F

from hooks import HookedRunner
from interp import edits
from interp.protocol import of
from models import attach
from tests import attachable
from tests.attachable import (
    BATCH,
    KINDS,
    LAYERS,
    MLP,
    NORMED,
    OTHERWISE,
    POS,
    TOKENS,
    N,
    agree,
    alone_of,
    call_of,
    edited,
    experts_of,
    logits,
    made,
)

SHARED = """afmoe aria_text axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 dots1 dots3_note_text ernie4_5_moe exaone_moe glm4_moe glm4_moe_lite glm_moe_dsa hunyuan_v1_moe
    hy_v3 kolibri1 laguna lara_mini minimax_m3_vl_text qwen2_moe qwen3_next sarvam_mla sarvam_moe solar_open""".split()


@pytest.mark.sampled(24)
@pytest.mark.parametrize("kind", KINDS)
def test_points_match_raw_hooks(kind):
    model = made(kind)
    twin = copy.deepcopy(model)
    (x, index, weights), output, expected = call_of(twin)
    with attach(model) as attached:
        assert torch.equal(logits(model), expected)
        runner = HookedRunner(model)
        names = [f"{MLP}.*", f"{MLP}_out"] if kind != "granitemoeshared" else f"{MLP}.*"
        with torch.no_grad():
            ran, cache = runner.run_with_cache(input_ids=TOKENS, use_cache=False, names=names)
    assert torch.equal(ran.logits, expected)
    assert "mlp.pre" in attached.left_out
    short = {name.removeprefix(MLP): value.flatten(0, 1) for name, value in cache.items()}
    assert (".shared" in short) == (kind in SHARED)
    assert torch.equal(short[".chosen"], index)
    routing = torch.zeros(BATCH * POS, N)
    for row, (numbers, shares) in enumerate(zip(index.tolist(), weights.tolist(), strict=True)):
        for number, share in zip(numbers, shares, strict=True):
            routing[row, number] = share
    assert torch.equal(short[".routing"], routing)
    routed_scale = model.config.routed_scaling_factor if kind == "minimax_m3_vl_text" else 1.0
    alone = alone_of(experts_of(twin), x) * routed_scale
    agree(short[".experts"], alone.gather(1, index[..., None].expand(-1, -1, x.shape[-1])))
    routed = torch.einsum("re,red->rd", routing, alone)
    agree(routed, output * routed_scale)
    if kind not in (*NORMED, "granitemoeshared"):
        factor = getattr(model.config, "residual_multiplier", 1.0)
        agree(short["_out"], factor * (routed + short.get(".shared", 0)))


@pytest.mark.sampled(32)
@pytest.mark.parametrize("kind", KINDS)
def test_edits_match_raw_hooks(kind):
    model = made(kind)
    twin = copy.deepcopy(model)
    (_, index, _), _, plain = call_of(twin)
    # In rows of all tokens, this is position 3 of the second text.
    at = POS + 3
    first, other = int(index[at, 0]), next(n for n in range(N) if n not in index[at])

    def cut(x, index, weights):
        return x, index, weights.masked_fill(index == first, 0)

    def more(x, index, weights):
        last = torch.full((len(x), 1), other)
        extra = torch.zeros(len(x), 1)
        extra[at] = 0.7
        return x, torch.cat([index, last], 1), torch.cat([weights, extra], 1)

    def set_weight(value, point):
        value[1, 3, other] = 0.7

    attach(model)
    gone = edited(model, {f"{MLP}.routing": edits.zero(expert=first)})
    assert torch.equal(gone, call_of(twin, cut)[-1])
    assert not torch.equal(gone, plain)
    agree(edited(model, {f"{MLP}.routing": set_weight}), call_of(twin, more)[-1])
    # Doubling the output of an expert equals doubling its weight.
    doubled = edited(model, {f"{MLP}.experts": edits.scale(2.0, pos=3, choice=0)})

    def twice(x, index, weights):
        weights = weights.clone()
        weights[3::POS, 0] *= 2
        return x, index, weights

    agree(doubled, call_of(twin, twice)[-1])
    assert torch.equal(edited(model, {f"{MLP}.experts": lambda value, point: value.clone()}), plain)


def test_experts_that_read_vectors_times_their_weights():
    """In Llama 4, each expert reads all vectors. They are 0 where the expert was not chosen."""
    model = made("llama4_text")
    twin = copy.deepcopy(model)
    _, output, _ = call_of(twin)
    given = output.view(N, BATCH, POS, -1)
    attach(model)
    runner, names = HookedRunner(model), [f"{MLP}.experts", f"{MLP}.shared", f"{MLP}_out"]
    with torch.no_grad():
        cache = runner.capture(input_ids=TOKENS, use_cache=False, names=names)
    assert torch.equal(cache[names[0]], given.movedim(0, 2))
    assert ((given != 0).any(-1).sum(0) == model.config.num_experts_per_tok).all()
    agree(given.sum(0) + cache[names[1]], cache[names[2]])

    def without(module, args, output):
        return output.view(N, BATCH, POS, -1).index_fill(0, torch.tensor([3]), 0).view_as(output)

    with experts_of(twin).register_forward_hook(without):
        expected = logits(twin)
    assert torch.equal(edited(model, {names[0]: edits.zero(expert=3)}), expected)
    # The model adds to the output of the shared expert in place. Here an edit replaces this output
    # by a tensor of the cache, and the addition must not change that tensor.
    before = cache[names[1]].clone()
    edited(model, {names[1]: edits.replace(cache)})
    assert torch.equal(cache[names[1]], before)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in SHARED and kind not in NORMED])
def test_the_shared_expert_is_edited_behind_its_gate(kind):
    model = made(kind)
    attach(model)
    runner, names = HookedRunner(model), [f"{MLP}.shared", f"{MLP}_out"]
    with torch.no_grad():
        plain = runner.capture(input_ids=TOKENS, use_cache=False, names=names)
        with runner.hooks({names[0]: edits.scale(2.0)}):
            doubled = runner.capture(input_ids=TOKENS, use_cache=False, names=names[1])
    agree(doubled[names[1]], plain[names[1]] + plain[names[0]])


@pytest.mark.sampled(32)
@pytest.mark.parametrize("kind", [*KINDS, *OTHERWISE])
def test_the_router_is_the_first_map_and_its_edits_choose(kind):
    model = made(kind)
    twin = copy.deepcopy(model)
    # Take the router of the MLP, because the attention of jetmoe has a router too.
    named = (
        (name, getattr(module, "weight", None), module) for name, module in twin.named_modules()
    )
    router = [
        m
        for name, w, m in named
        if "attention" not in name and w is not None and w.shape[0] == N and w.ndim == 2
    ][-1]
    read = []
    handle = router.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    plain = logits(twin)
    handle.remove()
    bias = getattr(router, "bias", None)
    expected = F.linear(read[0].float(), router.weight, bias)
    attach(model)
    runner = HookedRunner(model)
    with torch.no_grad():
        cache = runner.capture(input_ids=TOKENS, use_cache=False, names=f"{MLP}.router")
    agree(cache[f"{MLP}.router"].flatten(0, 1), expected.view(-1, N))
    with torch.no_grad():
        router.weight.copy_(router.weight.roll(1, 0))
        if bias is not None:
            bias.copy_(bias.roll(1, 0))
    agree(edited(model, {f"{MLP}.router": lambda value, point: value.roll(1, -1)}), logits(twin))
    assert not torch.allclose(logits(twin), plain, atol=1e-4)


@pytest.mark.sampled(32)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_finite_differences_also_of_experts_that_were_not_chosen(kind):
    model = made(kind)
    attach(model)
    runner, step = HookedRunner(model), 3e-3
    names = [f"{MLP}.routing", f"{MLP}.experts"]
    output, cache = runner.run_with_cache(
        input_ids=TOKENS, use_cache=False, names=names, grads=True
    )
    output.logits[1, -1, 5].backward()

    def moved(name, index, by):
        def hook(value, point):
            value[index] += by

        return edited(model, {name: hook})[1, -1, 5].item()

    for name, places in {
        names[0]: [(1, POS - 1, n) for n in range(N)],
        names[1]: [(1, POS - 1, 1, 4), (1, POS - 1, 0, 7)],
    }.items():
        for index in places:
            slope = (moved(name, index, step) - moved(name, index, -step)) / (2 * step)
            assert cache.grads[name][index].item() == pytest.approx(slope, rel=0.01, abs=1e-3)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("form", ["bfloat16", "padded", "lazy", "cached", "copied", "batched_mm"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_settings(kind, form):
    model = made(kind)
    if form == "bfloat16":
        model = model.bfloat16()
        # Other implementations need sizes of 16 bytes.
        model.set_experts_implementation("eager")
    if form == "batched_mm":
        model.set_experts_implementation("batched_mm")
    twin = copy.deepcopy(model)
    mask = torch.ones(BATCH, POS, dtype=torch.long)
    if form == "padded":
        mask[0, -3:] = 0
    attach(model)
    if form == "copied":
        model = copy.deepcopy(model)
    kept = {"lazy": True} if form == "lazy" else {"names": f"{MLP}*"}
    given = dict(input_ids=TOKENS, attention_mask=mask, use_cache=form == "cached")
    with torch.no_grad():
        expected = twin(**given).logits
        output, cache = HookedRunner(model).run_with_cache(**given, **kept)
        assert torch.equal(output.logits[mask.bool()], expected[mask.bool()])
        routing, chosen, given = (cache[f"{MLP}.{n}"] for n in ("routing", "chosen", "experts"))
    assert routing.shape == (BATCH, POS, N)
    total = torch.einsum("bpk,bpkd->bpd", routing.gather(-1, chosen).float(), given.float())
    shared = cache[f"{MLP}.shared"].float() if f"{MLP}.shared" in cache else 0
    agree(
        total + shared, cache[f"{MLP}_out"].float(), tolerance=0.02 if form == "bfloat16" else 1e-5
    )


def test_a_loss_of_the_router_does_not_stand_for_logits():
    model = made("mixtral")
    model.config.output_router_logits = True
    expected = logits(model)
    with attach(model):
        _, cache = HookedRunner(model).run_with_cache(TOKENS, use_cache=False, lazy=True)
        last = cache[f"blocks.{LAYERS - 1}.resid_post"]
        agree(of(model, "unembed").unembed(last), expected)


def test_left_out_gives_reasons():
    with attach(made("jetmoe")) as attached:
        assert "indices" in attached.left_out["mlp.routing"]
        assert "attn.router" in attached.left_out
    with attach(made("llama4_text")) as attached:
        assert "multiplied by their weights" in attached.left_out["mlp.routing"]
        assert "attn.router" not in attached.left_out
    with attach(made("doge")) as attached:
        assert {attached.left_out[name] for name in ("attn_out", "mlp.pre", "mlp_out")} == {
            "the stream that leaves the block is not the sum of its input and outputs of modules"
        }
    with attach(made("gemma4_text")) as attached:
        assert "scaled" in attached.left_out["mlp_out"]


def scaled(forward, x, *choice):
    return forward(x, *choice) * (1 + len(x) / 100)


def several(forward, x, index, weights):
    assert index.shape[1] > 1, "too few"
    return forward(x, index, weights)


def unheard(forward, x):
    F.linear(x, forward.__self__.weight)
    with torch._C.DisableTorchFunction():
        return forward(x)


@pytest.mark.parametrize(
    ("part", "code", "point", "why"),
    [
        ("experts", scaled, "mlp.experts", "is not their joint output"),
        ("experts", several, "mlp.experts", "one by one: too few"),
        ("gate", unheard, "mlp.router", "does not change which"),
    ],
)
def test_points_that_would_not_hold_are_left_out(part, code, point, why):
    model = made("mixtral")
    for layer in model.model.layers:
        module = getattr(layer.mlp, part)
        module.forward = functools.partial(code, module.forward)
    with attach(model) as attached:
        assert why in attached.left_out[point]
        assert f"{MLP}.{point.removeprefix('mlp.')}" not in HookedRunner(model).points


# Hybrid models: a block is a single mixer (attention, a state space or an MLP), or contains mixers
# of several kinds.
MAMBA = dict(mamba_n_heads=4, mamba_d_head=12, mamba_n_groups=1, mamba_d_state=6, mamba_d_conv=3)
NEMOTRON = attachable.MORE.get("nemotron_h", {}) | dict(
    layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "moe"],
    num_hidden_layers=5,
    conv_kernel=3,
)
MIXTURE = attachable.GROUPS["experts"]
COHERE = MIXTURE | dict(num_shared_experts=2)
GRANITE = dict(
    layers_block_type=["linear_attention", "full_attention"], shared_intermediate_size=10
)
HYBRIDS = {
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "latent": ("nemotron_h", NEMOTRON | dict(moe_latent_size=12)),
    "latent as wide": ("nemotron_h", NEMOTRON | dict(moe_latent_size=24)),
    "sum": ("cohere2_moe", COHERE | dict(shared_expert_combination_strategy="sum")),
    "mean": ("cohere2_moe", COHERE | dict(shared_expert_combination_strategy="average")),
    "granite": ("granitemoehybrid", MIXTURE | MAMBA | GRANITE | dict(residual_multiplier=0.7)),
}


def hybrid(name, monkeypatch):
    kind, sizes = HYBRIDS[name]
    monkeypatch.setitem(attachable.MODELS, kind, sizes)
    return made(kind)


def drawn_again(model, seed):
    """Replace the weights of a model by new random weights from the distribution of `made`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))


def test_names_do_not_depend_on_the_weights(monkeypatch):
    """An expert computes all its positions in one product. If one position goes to another expert,
    the product has another size, and the results of all other positions may round differently.
    """
    kinds = ["linear_attention", "moe", "full_attention", "mlp"]
    sizes = NEMOTRON | dict(layers_block_type=kinds, num_hidden_layers=4)
    monkeypatch.setitem(attachable.MODELS, "nemotron_h", sizes)
    model, names, moved = made("nemotron_h"), set(), 0
    mixture = next(m for m in model.modules() if type(m).__name__.endswith("MoE"))
    for seed in range(8):
        drawn_again(model, seed)
        x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            changed = mixture(torch.cat([x[:, :1].roll(1, -1), x[:, 1:]], 1))
            moved += not torch.equal(changed[:, 1:], mixture(x)[:, 1:])
        with attach(model) as attached:
            names.add((*HookedRunner(model).points, *attached.left_out))
    # For some of the weights, a changed position really changed the rounding at other positions.
    assert moved > 0
    ((*points,),) = names
    expected = ["0.mixer_out", "1.mlp_out", "2.attn_out", "3.mlp_out"]
    assert [n for n in points if n.startswith("blocks.") and n.endswith("_out")] == [
        f"blocks.{name}" for name in expected
    ]
    assert "blocks.1.mlp.shared" in points


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_the_output_of_a_mixture_is_the_sum_of_its_points(name, monkeypatch):
    model = hybrid(name, monkeypatch)
    twin, given = copy.deepcopy(model), {}
    mixture = [m for m in twin.modules() if hasattr(m, "experts") and hasattr(m, "forward")][-1]
    parts = {"experts": mixture.experts, "mixture": mixture}
    if hasattr(mixture, "shared_experts"):
        parts["shared"] = mixture.shared_experts
    for part, module in parts.items():
        module.register_forward_hook(
            lambda module, args, output, part=part: given.update({part: (args, output)})
        )
    expected = logits(twin)
    (x, index, weights), routed = given["experts"]
    attached = attach(model)
    mlp = f"blocks.{len(model.blocks) - 1}.mlp"
    names = [f"{mlp}.*"] if name == "granite" else [f"{mlp}.*", f"{mlp}_out"]
    ran, cache = HookedRunner(model).run_with_cache(input_ids=TOKENS, use_cache=False, names=names)
    assert torch.equal(ran.logits, expected)
    rows = {key.removeprefix(mlp): value.flatten(0, 1) for key, value in cache.items()}
    assert torch.equal(rows[".chosen"], index)
    assert torch.equal(rows[".routing"].gather(1, index), weights)
    half = 0.5 if name == "mean" else 1.0
    # The block of granite adds the sum of two modules to the stream.
    if name == "granite":
        assert {"mlp.shared", "mlp_out"} <= {*attached.left_out}
        assert ".shared" not in rows
    else:
        shared = given["shared"][1].flatten(0, -2)
        agree(rows[".shared"], half * shared)
        assert "mlp.shared" not in attached.left_out
        whole = given["mixture"][1].flatten(0, -2)
        agree(rows["_out"], whole)
    # Here the sum of the experts goes through another map, so experts have no outputs in d_model.
    if name.startswith("latent"):
        assert "mlp.experts" in attached.left_out
        assert ".experts" not in rows
        return
    alone = alone_of(mixture.experts, x).gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
    agree(rows[".experts"], half * alone)
    total = torch.einsum("rk,rkd->rd", weights, rows[".experts"])
    agree(total, half * routed)
    if name != "granite":
        agree(total + rows[".shared"], whole)
        doubled = edited(model, {f"{mlp}.shared": edits.scale(2.0)})
        mixture.shared_experts.register_forward_hook(lambda module, args, output: 2 * output)
        agree(doubled, logits(twin))


def test_a_router_whose_logits_are_all_equal_has_a_point(monkeypatch):
    """Before training, all logits of a router may be equal. The order of experts is then arbitrary."""
    model = made("mixtral")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "gate.weight" in name:
                weight.zero_()
    with attach(model) as attached:
        assert f"{MLP}.router" in HookedRunner(model).points
        assert "mlp.router" not in attached.left_out


class Latest(torch.autograd.Function):
    """A function that returns the mean of all positions so far. It has no derivative."""

    @staticmethod
    def forward(context, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class Mixer(torch.nn.Module):
    """A module that either mixes positions or is an MLP. Both forms have the same submodules."""

    def __init__(self, how, share):
        super().__init__()
        self.how, self.share = how, share
        self.up, self.down = torch.nn.Linear(12, 12), torch.nn.Linear(12, 12)
        self.last = torch.nn.Dropout(0.1)

    def forward(self, x):
        if self.how == "mean":
            x = x + self.share * (x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None] - x)
        elif self.how == "without derivative":
            x = x + Latest.apply(x)
        elif self.how == "without gradients":
            x = x + Latest.apply(x.detach())
        return self.last(self.down(torch.tanh(self.up(x))))


class OneMixerEach(torch.nn.Module):
    """A model whose blocks contain either a mixer or an MLP, in modules of the same classes."""

    def __init__(self, kinds, share=1.0):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(29, 12)
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in kinds)
        for layer, kind in zip(self.layers, kinds, strict=True):
            layer.norm, layer.mixer = torch.nn.LayerNorm(12), Mixer(kind, share)
            layer.forward = lambda x, layer=layer: x + layer.mixer(layer.norm(x))
        self.head = torch.nn.Linear(12, 29)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [1.0, 0.003])
def test_mixers_are_distinguished_from_mlps_in_any_precision(share, dtype):
    """A mixer may change other positions by less than the rounding of half precision."""
    torch.manual_seed(0)
    kinds = ["mlp", "mean", "mlp", "mean"]
    model = OneMixerEach(kinds, share).eval().to(dtype)
    with attach(model):
        points = HookedRunner(model).points
        for n, kind in enumerate(kinds):
            assert (f"blocks.{n}.mixer_out" in points) == (kind == "mean")
            assert (f"blocks.{n}.mlp_out" in points) == (kind == "mlp")
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("how", ["without derivative", "without gradients"])
def test_mixers_without_a_derivative_are_found_by_their_values(how):
    torch.manual_seed(0)
    kinds = [how, "mlp", how]
    model = OneMixerEach(kinds).eval()
    with attach(model):
        points = HookedRunner(model).points
        assert [f"blocks.{n}.mixer_out" in points for n in range(3)] == [True, False, True]
