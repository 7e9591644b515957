"""Attached models in unusual settings: precision, kernels, positions, caches, adapters and inputs.

The reference is the same model without points.
"""

import contextlib
import copy
import itertools
import random

import pytest
import torch
from torch import nn

from hooks import HookedRunner, HookError, HookPoint, SelectionError, start_of_piece
from hooks.base import all_but
from interp import (
    Pairs,
    activation_patching,
    decompose,
    direct_logit_attribution,
    edge_attribution,
    edits,
    log_prob,
    logit_lens,
    run_circuit,
    run_with_cache,
    sweep,
)
from interp.graph import Graph
from interp.protocol import of
from models import Sampling, attach, detach, from_hf, generate
from models.attached.context import _is_causal, past_of
from models.attached.parts import norm_of
from models.attached.probe import Call
from tests import attachable, seeing, tiny
from tests.attachable import CACHE
from tests.models.attached.kinds import KINDS, TOKENS, in_form, made

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

MORE = {
    **KINDS,
    "roberta": ("RobertaForMaskedLM", dict(pad_token_id=0)),
    "distilbert": ("DistilBertForMaskedLM", dict(hidden_dim=17)),
    "modernbert": ("ModernBertForMaskedLM", dict(cls_token_id=1, sep_token_id=2)),
    "bart": ("BartForCausalLM", dict(is_encoder_decoder=False)),
    "ctrl": ("CTRLLMHeadModel", dict(dff=17)),
}
PADDED = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])


def other(kind, dtype=torch.float32):
    """Return a tiny random model of a kind in `MORE`."""
    name, sizes = MORE[kind]
    return tiny.model(name, **sizes).to(dtype)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kind",
    [
        "gpt2",
        "llama",
        "gemma3",
        "bloom",
        "bert",
        "roberta",
        "distilbert",
        "modernbert",
        "bart",
        "ctrl",
    ],
)
def test_half_precision_has_the_points_and_embeddings_of_single(kind, dtype):
    single = other(kind)
    with attach(single):
        points = {*HookedRunner(single).points}
        _, wanted = run_with_cache(single, TOKENS, names="embed")
    half = other(kind, dtype)
    with attach(half):
        assert {*HookedRunner(half).points} == points
        _, cache = run_with_cache(half, TOKENS, names="embed")
    torch.testing.assert_close(cache["embed"].float(), wanted["embed"], rtol=0.02, atol=0.002)


def in_half(name, dtype):
    """Return a model of attachable.json in half precision.

    Its experts have sizes that the kernels for half precision accept.
    """
    sizes = attachable.SIZES | dict(intermediate_size=24) | attachable.MODELS.get(name, {})
    if "moe_intermediate_size" in sizes:
        sizes |= dict(moe_intermediate_size=16)
    if name == "falcon":
        del sizes["head_dim"]
    return attachable.made(name, config=transformers.CONFIG_MAPPING[name](**sizes)).to(dtype)


@pytest.mark.sampled(64)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", attachable.MODELS)
def test_every_architecture_has_the_points_of_single_precision_in_half(name, dtype):
    points = []
    for precision in (torch.float32, dtype):
        model = in_half(name, precision)
        with attach(model):
            points.append({*HookedRunner(model).points})
    assert points[0] == points[1]


@pytest.mark.filterwarnings("ignore")  # models warn that they use slow code
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_beside_a_stream_of_another_precision_are_found_in_half(dtype):
    sizes = attachable.SIZES | dict(state_size=5, time_step_rank=3)
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).eval().to(dtype)
    with attach(model):
        _, cache = HookedRunner(model).run_with_cache(TOKENS % 29, use_cache=False)
    x = cache["resid_pre", 1].to(dtype).double()
    scale = (x.square().mean(-1, keepdim=True) + model.config.layer_norm_epsilon).sqrt()
    torch.testing.assert_close(cache["ln1.scale", 1].double(), scale, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_term_of_attention_that_rounding_hides_is_found(dtype, monkeypatch):
    """The model has a kernel of its own, which adds a small bias for each key to the scores.

    The bias changes the logits only by a few times the rounding of bfloat16. `attach` must find it.
    """

    def tilted(module, query, key, value, attention_mask, scaling=None, **kwargs):
        at = torch.arange(query.shape[2])
        scores = query @ key.mT * (scaling or query.shape[-1] ** -0.5) + 0.01 * at
        pattern = scores.masked_fill(at[:, None] < at, -1e9).softmax(-1).to(value.dtype)
        return (pattern @ value).transpose(1, 2).contiguous(), None

    kernels = type(transformers.AttentionInterface())._global_mapping
    monkeypatch.setitem(kernels, "sdpa", tilted)
    with attach(made("gpt2", attention="sdpa", dtype=dtype)) as attached:
        assert attached.left_out["pattern"] == "attention adds terms that are not supported"
        assert "blocks.1.attn.scores" not in HookedRunner(attached.model).points


@pytest.mark.skipif("inkling_text" not in transformers.CONFIG_MAPPING, reason="needs Inkling")
def test_a_bias_by_distance_is_in_the_pattern():
    config = attachable.config_of("inkling_text")
    config.swa_head_dim = 10  # another size than head_dim
    model = attachable.made("inkling_text", "eager", config)
    tokens = torch.arange(7)[None]
    with torch.no_grad():
        wanted = model(tokens, output_attentions=True).attentions
        with attach(model):
            _, cache = run_with_cache(model, tokens, names="*.pattern")
    for layer, pattern in enumerate(wanted):
        torch.testing.assert_close(cache["pattern", layer], pattern)


WIDE = {
    "bert": dict(hidden_size=768, num_attention_heads=12, intermediate_size=64),
    "roberta": dict(hidden_size=768, num_attention_heads=12, intermediate_size=64),
    "modernbert": dict(hidden_size=768, num_attention_heads=12, intermediate_size=64, head_dim=64),
    "bloom": dict(hidden_size=1024, n_head=16),
    "ctrl": dict(n_embd=768, n_head=12),
    "gpt2": dict(n_embd=768, n_head=12),
    "llama": dict(
        hidden_size=1024, num_attention_heads=16, num_key_value_heads=16, intermediate_size=64
    ),
    "gemma3": dict(
        hidden_size=1024, num_attention_heads=8, num_key_value_heads=8, intermediate_size=64
    ),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("kind", "dtype"), [*zip(WIDE, [torch.bfloat16, torch.float16] * 4, strict=True)]
)
def test_real_widths_in_half_precision(kind, dtype):
    """In half precision, `attach` finds the same points as in float32.

    Embeddings and streams equal the values that PyTorch's hooks see on a copy without points.
    """
    name, sizes = MORE[kind]
    single = tiny.model(name, **sizes | WIDE[kind])
    for norm in single.modules():
        if isinstance(norm, nn.LayerNorm):
            nn.init.normal_(norm.weight, 1.0, 0.2)
    model, plain, seen = copy.deepcopy(single).to(dtype), copy.deepcopy(single).to(dtype), {}
    logits = plain(input_ids=TOKENS).logits
    with attach(single):
        points = {*HookedRunner(single).points}
    with attach(model):
        assert {*HookedRunner(model).points} == points
        assert torch.equal(model(input_ids=TOKENS).logits, logits)
        _, cache = run_with_cache(model, TOKENS, names=["embed", "blocks.0.resid_pre"])
        at = next(n for n, module in model.named_modules() if module is model.blocks[0].module)
    plain.get_input_embeddings().register_forward_hook(
        lambda module, args, output: seen.update(embed=output.detach().clone())
    )
    plain.get_submodule(at).register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(stream=next(iter([*args, *kwargs.values()]))),
        with_kwargs=True,
    )
    plain(input_ids=TOKENS)
    assert torch.equal(cache["embed"], seen["embed"])
    assert torch.equal(cache["resid_pre", 0], seen["stream"])


def near(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """An attention kernel in which queries see only the last two keys, whatever the mask is."""
    at = torch.arange(query.shape[2])
    allowed = (at[:, None] >= at) & (at[:, None] - at < 2)
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    scores = (query @ key.mT * (scaling or query.shape[-1] ** -0.5)).masked_fill(~allowed, -1e9)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_registered_kernel_stays(kind):
    transformers.AttentionInterface.register("near", near)
    model = made(kind, attention="near")
    with torch.no_grad():
        plain = model(TOKENS).logits
        assert not torch.allclose(plain, made(kind, attention="sdpa")(TOKENS).logits)
        with attach(model) as attached:
            torch.testing.assert_close(model(TOKENS).logits, plain, rtol=0, atol=0)
            assert {"scores", "pattern"} <= {*attached.left_out}
            logits, _ = run_with_cache(model, TOKENS, names="*.z")
            torch.testing.assert_close(logits.logits, plain, rtol=0, atol=0)
        assert model.config._attn_implementation == "near"


@pytest.mark.parametrize("at_attach", [torch.bfloat16, torch.float32])
def test_a_mode_of_attention_of_its_own_stays(at_attach):
    """GPT-2 has an option to compute its products in another order and in float32.

    Only in half precision do the numbers of this option differ from the usual kernels.
    """
    config = tiny.config("GPT2Config", reorder_and_upcast_attn=True)
    model = made("gpt2", config, "eager", torch.bfloat16)
    with torch.no_grad():
        plain = model(TOKENS).logits
        with attach(model.to(at_attach)):
            model.bfloat16()
            assert torch.equal(model(TOKENS).logits, plain)
            output, cache = run_with_cache(model, TOKENS, names="*.attn.*")
            assert torch.equal(output.logits, plain)
            assert len(cache) == 18
            # The code of this option adds a product to memory that was not written before, with the
            # factor 0. In this mode, PyTorch fills such memory with NaN, so a mistake would show.
            torch.use_deterministic_algorithms(True)
            try:
                same = {"blocks.1.attn.scores": lambda scores, point: scores + 0}
                edited = HookedRunner(model).run_with_hooks(TOKENS, hooks=same).logits
            finally:
                torch.use_deterministic_algorithms(False)
            torch.testing.assert_close(edited, plain)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_padding_on_the_left_counts_no_positions(kind):
    """The effects of a padded batch equal the effects of each text alone."""
    model, right = made(kind), torch.tensor([4, 8, 15])
    corrupted = TOKENS.clone()
    corrupted[:, 3] = torch.tensor([16, 22, 11])
    with attach(model):
        padded = Pairs(TOKENS, corrupted, right, attention_mask=PADDED)
        together = activation_patching(model, padded, site="resid_pre")
        for row, mask in enumerate(PADDED.bool()):
            alone = Pairs(TOKENS[row][mask][None], corrupted[row][mask][None], right[row][None])
            effects = activation_patching(model, alone, site="resid_pre")
            torch.testing.assert_close(together.values[:, mask, row], effects.values[..., 0])
            metric, jobs = log_prob(int(right[row])), [{"blocks.1.mlp_out": edits.zero()}]
            swept = sweep(model, TOKENS, jobs, metric, attention_mask=PADDED)
            zeroed = sweep(model, TOKENS[row][mask][None], jobs, metric)
            torch.testing.assert_close(swept.values[0, row], zeroed.values[0, 0])


def bloom_with(embedding, dtype):
    """Return a small BLOOM, which accepts no positions, with other embeddings."""
    torch.manual_seed(0)
    embedding.reset_parameters()
    config = transformers.BloomConfig(vocab_size=23, hidden_size=128, n_layer=2, n_head=4)
    model = transformers.BloomForCausalLM(config).eval()
    model.transformer.word_embeddings = embedding
    return model.to(dtype)


class Mapped(nn.Embedding):
    """Embeddings that round differently if they read another number of columns.

    Some processors round a linear map of embeddings in this way, because PyTorch uses another
    kernel for fewer rows. Here the last bit of every third number differs on every processor.
    """

    def forward(self, tokens):
        values = super().forward(tokens)
        if tokens.shape[1] % 2:
            values[..., ::3] *= 1 + torch.finfo(values.dtype).eps
        return values


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_on_the_left_of_a_model_that_maps_its_embeddings(dtype):
    embedding = Mapped(23, 128)
    model = bloom_with(embedding, dtype)
    # With fewer columns, the values are rounded differently.
    assert not torch.equal(embedding(TOKENS[:, 1:]), embedding(TOKENS)[:, 1:])
    alone = [
        model(row[mask][None], use_cache=False).logits[0]
        for row, mask in zip(TOKENS, PADDED.bool(), strict=True)
    ]
    with attach(model):
        logits = model(TOKENS, attention_mask=PADDED, use_cache=False).logits
    for row, mask, expected in zip(logits, PADDED.bool(), alone, strict=True):
        attachable.agree(row[mask], expected, tolerance=0.05 if dtype == torch.bfloat16 else 1e-5)


class Counted(nn.Embedding):
    """Embeddings with a small vector for each column, which padding moves to another token."""

    def forward(self, tokens):
        columns = torch.arange(tokens.shape[1])[:, None].to(self.weight.dtype)
        return super().forward(tokens) + 0.1 * torch.sin(columns + torch.arange(128))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_on_the_left_of_a_model_that_adds_a_vector_for_each_column_is_an_error(dtype):
    """In bfloat16, the vectors change the logits by less than the rounding of a run."""
    model = bloom_with(Counted(23, 128), dtype)
    with attach(model), pytest.raises(ValueError, match="must be padded on the right"):
        model(TOKENS, attention_mask=PADDED, use_cache=False)


@torch.no_grad()
@pytest.mark.parametrize("size", [0.01, 11.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cap_of_logits_that_rounding_hides_is_kept(dtype, size):
    model = attachable.made("gemma2")
    cap = model.config.final_logit_softcapping
    assert cap == 30
    # Separate this weight from the embeddings, with which it is tied.
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    model.lm_head.weight.mul_(size / attachable.logits(model).abs().max())
    model.to(dtype)
    with attach(model):
        _, cache = HookedRunner(model).run_with_cache(attachable.TOKENS, names="*.resid_post")
        language, stream = of(model, "unembed"), cache["resid_post", -1]
        expected = attachable.logits(model)
        tolerance = 0.01 if dtype == torch.bfloat16 else 1e-5
        attachable.agree(language.unembed(stream), expected, tolerance=tolerance)
        model.lm_head.weight.mul_(100 / size)
        twin = model.lm_head(model.model.norm(stream)).float()
        assert twin.abs().max() > cap
        capped = torch.tanh(twin / cap) * cap
        attachable.agree(language.unembed(stream).float(), capped, tolerance=tolerance)


@torch.no_grad()
def test_a_norm_that_returns_its_input_is_a_norm_and_dropout_is_not():
    """A norm of numbers that are 1 or -1 returns its input, like dropout and the identity.

    So `attach` cannot tell a norm from them by rounding.
    """
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(0)).sign()
    norm = nn.RMSNorm(24, eps=0.0, elementwise_affine=False)
    assert torch.equal(norm(x), x)
    for module, is_norm in ((norm, True), (nn.Dropout(0.3).eval(), False), (nn.Identity(), False)):
        for dtype in (torch.float32, torch.bfloat16):
            read = x.to(dtype)
            call = Call("some", module, [read], 0, output=module(read), ended=1)
            assert (norm_of(call) is not None) == is_norm


@torch.no_grad()
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_norm_of_inputs_with_mean_zero_is_told_from_the_other_kind(kind, dtype):
    """The first norm of Bloom reads the output of another norm, whose mean is 0."""
    for seed in range(20):
        x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(seed))
        x = (x - x.mean(-1, keepdim=True)).to(dtype)
        module = kind(24, eps=1e-5).to(dtype)
        call = Call("some", module, [x], 0, output=module(x), ended=1)
        assert norm_of(call).centered == (kind is nn.LayerNorm)


class NormWithConstant(nn.Module):
    """A norm whose code contains epsilon as a number, like the norms of some families."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, NormWithConstant])
def test_the_epsilon_of_a_norm_is_found_although_the_inputs_are_large(kind, dtype):
    x = 30 * torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(7)).to(dtype)
    for eps in [1e-6] if kind is NormWithConstant else [1e-12, 1e-8, 1.5625e-07, 1e-5, 3e-3]:
        norm = kind() if kind is NormWithConstant else kind(24, eps=eps)
        norm = tiny.redraw(norm, 0.1).to(dtype)
        call = Call("some", norm, [x], 0, output=norm(x), ended=1)
        assert norm_of(call).eps == eps


@pytest.mark.parametrize("least", [float("-inf"), torch.finfo(torch.float32).min])
def test_a_mask_with_a_bias_shows_which_keys_are_seen(least):
    past = torch.full((5, 5), least).triu(1)
    bias = torch.arange(25.0).view(5, 5) / 7 - 2
    for mask, is_causal in ((past, True), (past + bias, True), (bias, False), (0 * bias, False)):
        assert _is_causal(nn.Linear(3, 3), {"attention_mask": mask}, 5) == is_causal
    for mask in (past == 0, (past == 0).long()):
        assert _is_causal(nn.Linear(3, 3), {"attention_mask": mask}, 5)
        assert not _is_causal(nn.Linear(3, 3), {"attention_mask": mask.mT}, 5)


def test_hidden_states_collected_before_attach_show_edits():
    model = made("llama")
    with torch.no_grad():
        model(TOKENS, output_hidden_states=True)
        with attach(model):
            zero = {"blocks.1.resid_post": edits.zero()}
            with HookedRunner(model).hooks(zero):
                output = model(TOKENS, output_hidden_states=True)
    assert output.hidden_states[2].abs().max() == 0
    assert output.hidden_states[1].abs().max() > 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_hidden_states_may_be_collected_beside_edges(when):
    """`transformers` collects hidden states with hooks of its own.

    These hooks only read values, so they do not disturb an analysis of edges.
    """
    model, metric = made("llama"), log_prob(3)
    corrupted = (TOKENS + 1) % 23
    if when == "before":
        model(TOKENS, output_hidden_states=True)
    with attach(model):
        if when == "after":
            model(TOKENS, output_hidden_states=True)
        scores = edge_attribution(model, Pairs(TOKENS, corrupted, metric=metric))
        twin = made("llama")
        with attach(twin):
            wanted = edge_attribution(twin, Pairs(TOKENS, corrupted, metric=metric))
        assert torch.equal(scores.values, wanted.values)
        acts = HookedRunner(model).hooks({"blocks.0.mlp_out": edits.zero()})
        with acts, pytest.raises(HookError, match="no hook may be active"):
            edge_attribution(model, Pairs(TOKENS, corrupted, metric=metric))


def test_attention_that_is_set_after_attach_is_said():
    model = made("llama")
    attach(model)
    model.set_attn_implementation("eager")
    with pytest.raises(HookError, match=r"'eager': call detach\(model\)"):
        run_with_cache(model, TOKENS, names="*.pattern")
    detach(model)
    attach(model)
    pattern = run_with_cache(model, TOKENS, names="*.pattern")[1]["pattern", 0]
    twin = made("llama")
    twin.set_attn_implementation("eager")
    torch.testing.assert_close(pattern, twin(TOKENS, output_attentions=True).attentions[0])


def test_attention_that_is_set_after_attach_is_followed():
    model, twin = made("llama"), made("llama")
    attached = attach(model)
    model.set_attn_implementation("eager")
    twin.set_attn_implementation("eager")
    renewed = attach(model)
    assert renewed is not attached
    assert renewed.kernels == {"eager"}
    pattern = run_with_cache(model, TOKENS, names="*.pattern")[1]["pattern", 0]
    torch.testing.assert_close(pattern, twin(TOKENS, output_attentions=True).attentions[0])
    renewed.remove()
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(TOKENS).logits, twin(TOKENS).logits)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
def test_an_adapter_after_attach_renews_the_points():
    peft = pytest.importorskip("peft", reason="needs peft")
    model = made("llama", dtype=torch.float32)
    attached = attach(model)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, r=2)
    torch.manual_seed(0)
    peft.inject_adapter_in_model(config, model)
    model.eval()
    renewed = attach(model)
    assert renewed is not attached
    with torch.no_grad():
        cached = run_with_cache(model, TOKENS, names="*.mlp_out")[1]["mlp_out", 1]
        added = []
        down = model.model.layers[1].mlp.down_proj
        handle = down.register_forward_hook(lambda module, args, output: added.append(output))
        model(TOKENS)
        handle.remove()
    torch.testing.assert_close(cached, added[0])
    attached.remove()
    assert not hasattr(model, "blocks")


def test_a_model_whose_size_changed_is_attached_again():
    model = made("llama")
    assert attach(model).config.vocab_size == 23
    model.resize_token_embeddings(29)
    assert attach(model).config.vocab_size == 29


def test_the_hook_of_gradient_checkpointing_may_stay():
    model = made("llama")
    plain = from_hf(model)(TOKENS)
    model.enable_input_require_grads()
    torch.testing.assert_close(from_hf(model)(TOKENS), plain)
    with attach(model):
        assert Graph(model).runner()
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(ValueError, match=r"must have no hooks.*embed_tokens"):
        from_hf(model)


def test_a_lazy_cache_names_the_ways_around_an_unknown_argument():
    with pytest.raises(HookError, match=r"got a Linear: .*without lazy=True.*use_cache=False"):
        past_of(nn.Linear(2, 3), 0)


MAMBA = dict(num_attention_heads=3, num_key_value_heads=3, mamba_d_state=8, mamba_d_conv=4)
# Models with a recurrent state in addition to keys, and models whose attention needs a mask for
# each text.
UNUSUAL = {
    "FalconH1ForCausalLM": MAMBA
    | dict(head_dim=4, mamba_d_ssm=12, mamba_n_heads=3, mamba_d_head=4, mamba_chunk_size=4),
    "Zamba2ForCausalLM": MAMBA
    | dict(
        num_hidden_layers=4,
        mamba_expand=2,
        n_mamba_heads=3,
        chunk_size=4,
        hybrid_layer_ids=[1, 3],
        num_mem_blocks=1,
        layers_block_type=["mamba", "hybrid"] * 2,
        use_mem_rope=True,
        adapter_rank=5,
    ),
    "XGLMForCausalLM": dict(ffn_dim=17),
    "TrOCRForCausalLM": {},
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", UNUSUAL)
def test_patches_of_unusual_architectures_match_hooks(name, rows):
    model, metric = tiny.model(name, **UNUSUAL[name]), log_prob(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.mean() + 0.3 * torch.randn(weight.shape))
    clean = torch.randint(3, 23, (rows, 11))
    corrupted = clean.clone()
    corrupted[:, 4] = (corrupted[:, 4] + 1) % 23
    with attach(model), torch.no_grad():
        effects = activation_patching(model, Pairs(clean, corrupted, metric=metric), "resid_pre")
        values = run_with_cache(model, clean, names="*.resid_pre")[1]
        base = metric(model(corrupted).logits)
        for layer, pos in ((0, 4), (1, 4), (1, 8), (len(values) - 1, 10)):
            point = f"blocks.{layer}.resid_pre"
            with HookedRunner(model).hooks({point: edits.replace(values, pos=pos)}):
                alone = metric(model(corrupted).logits) - base
            assert effects.values[layer, pos].tolist() == pytest.approx(alone.tolist(), abs=1e-4)


@torch.no_grad()
def test_a_model_that_reads_images_too():
    """The forward of the model passes keywords to a part, and this part passes them to the model of
    the text.
    """
    config = transformers.LlavaConfig(
        vision_config=tiny.config("CLIPVisionConfig", hidden_size=10, image_size=8, patch_size=4),
        text_config=tiny.config("LlamaConfig", vocab_size=29),
        image_token_index=28,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    given = dict(
        input_ids=torch.tensor([[3, 28, 28, 28, 28, 5]]), pixel_values=torch.randn(1, 3, 8, 8)
    )
    plain = model(**given, output_hidden_states=True)
    words = torch.tensor([[3, 5, 7, 2]])
    pairs = Pairs(words, words + 1, metric=log_prob(3))
    with attach(model):
        runner = HookedRunner(model)
        output, cache = runner.run_with_cache(**given, use_cache=False)
        torch.testing.assert_close(output.logits, plain.logits)
        assert torch.equal(model(**given).logits, plain.logits)
        for layer in range(2):
            torch.testing.assert_close(cache["resid_pre", layer], plain.hidden_states[layer])
        with pytest.raises(TypeError, match="takes no argument use_cach="):
            runner.run_with_cache(**given, use_cach=False)
        assert logit_lens(model, cache).tokens.shape[:3] == (len(model.blocks) + 1, 1, 6)
        parts = decompose(model, cache)
        assert parts["input"][0].any(-1).tolist() == [False, True, True, True, True, False]
        assert parts["embed"][0].any(-1).tolist() == [True, False, False, False, False, True]
        shares = direct_logit_attribution(model, cache, right=7, pos=2)
        torch.testing.assert_close(shares.values.sum(), output.logits[0, 2, 7])
        assert edge_attribution(model, pairs).values.isfinite().all()


class Packed(torch.Tensor):
    """A tensor class of another package, like the weights of a library for quantization."""


class PackedMap(nn.Module):
    """A linear map whose weights are a buffer of integers, like the maps of GPTQ and AWQ.

    With `packs=False`, the same weights are a parameter. With `rounds=True`, the map rounds its
    input, like the maps of bitsandbytes with 8 bits.
    """

    def __init__(self, linear, packs, rounds):
        super().__init__()
        integers = (20 * linear.weight).round().to(torch.int8)
        self.rounds = rounds
        if packs:
            self.register_buffer("integers", integers)
        else:
            self.weight = nn.Parameter(integers / 20)

    def forward(self, x):
        x = (20 * x).round() / 20 if self.rounds else x
        return x @ (self.integers / 20 if hasattr(self, "integers") else self.weight).T


@pytest.mark.parametrize("rounds", [False, True])
@torch.no_grad()
def test_weights_in_buffers_of_integers(rounds):
    tokens = attachable.TOKENS
    pairs = Pairs(tokens, tokens.flip(1), metric=log_prob(3))
    found = []
    for packs in (True, False):
        # `from_hf` does not support this family, so heads are found from the modules.
        model = attachable.made("smollm3")
        for name, module in [*model.named_modules()]:
            if isinstance(module, nn.Linear) and ".layers." in name:
                owner, _, last = name.rpartition(".")
                changed = PackedMap(module, packs, rounds=rounds).eval()
                setattr(model.get_submodule(owner), last, changed)
        attach(model)
        hidden = run_with_cache(model, tokens, names=["*.mlp.pre", "*.mlp.post"])[1]
        mask = torch.full(Graph(model).allowed.shape, 0.5)
        found.append((dict(hidden), run_circuit(model, pairs, mask)))
    (hidden, logits), (expected, wanted) = found
    assert hidden.keys() == expected.keys()
    for name in hidden:
        torch.testing.assert_close(hidden[name], expected[name])
    torch.testing.assert_close(logits, wanted)


def test_weights_of_another_library_are_named():
    model = made("llama")
    projection = model.model.layers[1].mlp.up_proj
    projection.weight = nn.Parameter(projection.weight.detach().as_subclass(Packed))
    message = r"got Packed of tests\..* as model.layers.1.mlp.up_proj.weight .*without quantization"
    with pytest.raises(ValueError, match=message):
        from_hf(model)


def test_a_model_without_a_head_has_no_logits():
    model = tiny.model("LlamaModel")
    with attach(model):
        _, cache = run_with_cache(model, TOKENS)
        with pytest.raises(TypeError, match="unembed"):
            logit_lens(model, cache)


def test_positions_if_the_first_layer_has_no_keys():
    model = tiny.model(
        "MiniMaxForCausalLM",
        num_hidden_layers=2,
        intermediate_size=20,  # the kernel of the experts needs a multiple of 16 bytes
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=2,
        block_size=4,
    )
    starts = []
    with attach(model), torch.no_grad():
        seen = {
            "blocks.1.resid_post": lambda value, point: starts.append(start_of_piece()) or value
        }
        with HookedRunner(model).hooks(seen):
            model.generate(TOKENS, max_new_tokens=4, do_sample=False)
    assert starts == [0, 5, 6, 7]


def test_shared_keys_are_edited_for_all_with_and_without_a_cache():
    model = tiny.model(
        "Gemma4ForCausalLM",
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=3,
        vocab_size_per_layer_input=23,
        global_head_dim=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    for name in ("k", "v"):
        with attach(model), torch.no_grad():
            twice = {f"blocks.1.attn.{name}": edits.scale(3.0)}
            with HookedRunner(model).hooks(twice):
                cached, uncached = (model(TOKENS, use_cache=use).logits for use in (True, False))
            assert not torch.allclose(cached, model(TOKENS).logits)
        torch.testing.assert_close(cached, uncached)


# The library peft reads this attribute.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
def test_an_adapter_before_attach_generates_as_a_whole_text():
    peft = pytest.importorskip("peft", reason="needs peft")
    model = made("llama", dtype=torch.float32)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, r=2)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, config).eval()
    with attach(model), torch.no_grad():
        starts = []
        seen = {
            "blocks.1.resid_post": lambda value, point: starts.append(start_of_piece()) or value
        }
        with HookedRunner(model).hooks(seen):
            model.generate(input_ids=TOKENS, max_new_tokens=3, do_sample=False)
    assert starts == [0, 5, 6]


def test_a_module_replaced_after_attach_is_named():
    model = made("llama")
    with attach(model), torch.no_grad():
        down = model.model.layers[1].mlp.down_proj
        model.model.layers[1].mlp.down_proj = nn.Sequential(down)
        with pytest.raises(HookError, match="down_proj"):
            model(TOKENS)
        model.model.layers[1].mlp.down_proj = down
        model(TOKENS)


def test_changes_of_the_config_stay():
    model = made("llama")
    with attach(model):
        model.resize_token_embeddings(29)
    assert model.config.vocab_size == 29 == model.get_input_embeddings().num_embeddings
    assert model.config._attn_implementation == "sdpa"
    assert model.model.config.vocab_size == 29


def test_a_list_of_heads_longer_than_the_blocks():
    class Headed(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.heads = nn.ModuleList(nn.Linear(12, 12) for _ in range(7))

        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs, output_hidden_states=True)
            hidden = output.hidden_states[-1]
            for head in self.heads:
                hidden = head(hidden)
            output.logits = output.logits + hidden.sum()
            return output

    model = Headed(tiny.config("LlamaConfig", num_hidden_layers=3)).eval()
    with attach(model):
        assert len(of(model).blocks) == 3


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_list_of_other_modules_is_not_taken_for_blocks(n):
    """Gemma 3n has n residual vectors for each token, and n - 1 maps that project them."""
    layers = dict(num_hidden_layers=3, layer_types=["sliding_attention"] * 2 + ["full_attention"])
    sizes = attachable.SIZES | layers | dict(num_kv_shared_layers=0, laurel_rank=5)
    sizes |= dict(vocab_size_per_layer_input=29, hidden_size_per_layer_input=7)
    sizes |= dict(altup_num_inputs=n, sliding_window=3, activation_sparsity_pattern=[0.0] * 3)
    model = transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**sizes)).eval()
    with attach(model):
        assert [*of(model).blocks] == [*model.model.layers]


def test_a_copy_that_would_compute_something_else_is_an_error():
    class Doubled(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 2
            return output

    with pytest.raises(ValueError, match="forward"):
        from_hf(Doubled(tiny.config("LlamaConfig")))
    model = made("llama")
    model.model.layers[1].register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(ValueError, match="layers.1"):
        from_hf(model)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_quantised_activations_run_alone():
    model = made("gpt2", dtype=torch.float32)
    model = torch.ao.quantization.quantize_dynamic(from_hf(model), {nn.Linear}, dtype=torch.qint8)
    metric, jobs = log_prob(3), [{"blocks.1.resid_pre": edits.zero(pos=n)} for n in range(5)]
    runner = HookedRunner(model)
    with torch.no_grad():
        base = metric(model(TOKENS))
        alone = [metric(runner.run_with_hooks(TOKENS, hooks=job)) - base for job in jobs]
    torch.testing.assert_close(sweep(model, TOKENS, jobs, metric).values, torch.stack(alone))


def test_all_tokens_are_drawn_from_at_top_p_of_one():
    logits = torch.tensor([[20.0, 0.0, -3.0]])
    assert Sampling(temperature=1.0, top_p=1.0).cut(logits).isfinite().all()


@contextlib.contextmanager
def replaced(module, at=None, put=None):
    """Register a hook that stores the output of a module in each run.

    If `at` is given, the hook also replaces the output at this position by the values `put`.
    """
    kept = []

    def hook(module, args, output):
        kept.append(output.clone())
        if at is not None:
            output[:, at] = put[:, at]
        return output

    handle = module.register_forward_hook(hook)
    yield kept
    handle.remove()


def test_pairs_carry_other_arguments_of_the_run():
    """`position_ids` in the pairs are used in every run of an analysis. PyTorch's own hooks are the
    reference.
    """
    model, right = made("gpt2"), torch.tensor([4, 8, 15])
    corrupted, positions = TOKENS.roll(1, 0), torch.tensor([[4, 3, 2, 1, 0]]).expand(3, -1).clone()
    positions[1] += 6
    pairs = Pairs({"input_ids": TOKENS, "position_ids": positions}, corrupted, right)

    def value(tokens, at=None, put=None):
        with torch.no_grad(), replaced(model.transformer.h[1], at, put) as kept:
            logits = model(tokens, position_ids=positions).logits[:, -1].log_softmax(-1)
        return logits.gather(1, right[:, None])[:, 0], kept[0]

    base, _ = value(corrupted)
    _, clean = value(TOKENS)
    wanted = torch.stack([value(corrupted, at, clean)[0] - base for at in range(5)])
    with attach(model):
        effects = activation_patching(model, pairs, site="resid_post", layers=1)
        some = activation_patching(model, pairs[1:], site="resid_post", layers=1)
        swept = sweep(model, pairs, [{"blocks.1.resid_post": edits.zero()}])
    torch.testing.assert_close(effects.base, base)
    torch.testing.assert_close(effects.values[0], wanted)
    torch.testing.assert_close(some.values[0], wanted[:, 1:])
    torch.testing.assert_close(swept.base, value(TOKENS)[0])
    with pytest.raises(ValueError, match="attention_mask"):
        Pairs({"input_ids": TOKENS, "attention_mask": PADDED}, attention_mask=PADDED)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize("batch", [2, 3])
def test_positions_of_several_sections_go_with_their_texts(kind, batch):
    """Position ids with sections have the shape [section, batch, pos].

    The reference runs one text at a time, without points. With three texts, there are as many texts
    as sections, so the shape does not tell the two axes apart.
    """
    if not seeing.is_there("qwen3_vl"):
        pytest.skip("needs a later transformers")
    rope = dict(rope_type="default", mrope_section=[1, 1, 1], rope_theta=10000.0)
    sizes = tiny.SIZES | dict(hidden_size=24, num_attention_heads=4, rope_parameters=rope)
    if kind == "qwen2_vl":
        config = transformers.Qwen2VLConfig(text_config=sizes)
        maker = transformers.Qwen2VLForConditionalGeneration
    else:
        config = transformers.Qwen3VLConfig(text_config=sizes)
        maker = transformers.Qwen3VLForConditionalGeneration
    tower = dict(depth=1, num_heads=2, patch_size=4, hidden_size=16, intermediate_size=14)
    for name, value in (tower | dict(embed_dim=16, out_hidden_size=24)).items():
        setattr(config.vision_config, name, value)
    torch.manual_seed(0)
    model = maker(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape))
    draws = torch.Generator().manual_seed(2)
    clean, corrupted = torch.randint(3, 23, (2, batch, 5), generator=draws)
    positions = torch.randint(0, 9, (3, batch, 5), generator=draws)
    right = torch.randint(3, 23, (batch,), generator=draws)
    twin = copy.deepcopy(model)

    def value(texts, row, at=None, put=None):
        layer = twin.model.language_model.layers[1]
        with torch.no_grad(), replaced(layer, at, put) as kept:
            logits = twin(texts[row][None], position_ids=positions[:, row][:, None]).logits
        return logits[0, -1].log_softmax(-1)[right[row]], kept[0]

    wanted = torch.empty(5, batch)
    for row in range(batch):
        base, _ = value(corrupted, row)
        _, put = value(clean, row)
        for at in range(5):
            wanted[at, row] = value(corrupted, row, at, put)[0] - base
    assert wanted.abs().min(0).values.max() > 0
    pairs = Pairs({"input_ids": clean, "position_ids": positions}, corrupted, right)
    listed = [positions[:, row : row + 1] for row in range(batch)]
    options = dict(site="resid_post", layers=1)
    heads = {"blocks.1.attn.z": lambda value, point: value * 2}
    with attach(model):
        whole = activation_patching(model, pairs, **options)
        some = activation_patching(model, pairs[1:], **options)
        in_lists = Pairs({"input_ids": clean, "position_ids": listed}, corrupted, right)
        by_list = activation_patching(model, in_lists[[1, 0]], **options)
        # An edit that is a function of the user cannot resume in the middle of a run.
        metric = log_prob(right)
        alone = sweep(model, pairs[[1]], [heads] * 2, log_prob(right[1:2])).values
        swept = sweep(model, pairs, [heads] * 2, metric).values
    torch.testing.assert_close(whole.values[0], wanted, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(some.values[0], wanted[:, 1:], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(by_list.values[0], wanted[:, [1, 0]], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(swept[:, [1]], alone, atol=1e-5, rtol=1e-4)


GENERATIONS = {
    "plain": {},
    "static": dict(cache_implementation="static", disable_compile=True),
    "chunks": dict(prefill_chunk_size=2),
    "sampled": dict(do_sample=True, top_k=3),
}


@pytest.mark.sampled(8)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("how", GENERATIONS)
def test_a_generation_in_one_cache_is_the_whole_text(kind, how):
    model, options = made(kind), dict(do_sample=False, max_new_tokens=7) | GENERATIONS[how]
    names = ["blocks.*.attn.k", "blocks.*.attn.v", "blocks.*.resid_post", "blocks.*.attn.pattern"]
    with attach(model), torch.no_grad():
        torch.manual_seed(0)
        run = lambda: model.generate(TOKENS, **options)  # noqa: E731
        rows, cache = HookedRunner(model).run_with_cache(run=run, names=names)
        _, whole = run_with_cache(model, rows[:, :-1], use_cache=False, names=names)
    for name in whole:
        torch.testing.assert_close(
            cache[name], whole[name], msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "options",
    [dict(num_beams=3), dict(use_cache=False), dict(prompt_lookup_num_tokens=2, eos_token_id=22)],
    ids=str,
)
def test_a_generation_whose_pieces_do_not_follow_is_refused(options):
    model = made("llama")
    repeated = TOKENS[:1, :2].repeat(1, 3)
    with attach(model), torch.no_grad():
        run = lambda: model.generate(repeated, max_new_tokens=6, do_sample=False, **options)  # noqa: E731
        with pytest.raises(HookError, match="follow"):
            HookedRunner(model).run_with_cache(run=run, names="blocks.*.resid_post")
        for pos in (slice(None), slice(4, None), -1):
            with HookedRunner(model).hooks({"blocks.1.mlp_out": edits.zero(pos=pos)}):
                if pos == -1 and "prompt_lookup_num_tokens" in options:
                    # A run also reads candidates after the last token.
                    with pytest.raises(SelectionError, match="prompt_lookup_num_tokens="):
                        run()
                else:
                    # Edits work, because they do not join the values of several runs.
                    run()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("pos", [slice(None), slice(4, None), 5, all_but(0)], ids=str)
@torch.no_grad()
def test_edits_of_assisted_decoding_count_from_the_start(pos):
    """Assisted greedy decoding has the tokens of greedy decoding."""
    model, draft = made("llama"), made("llama")
    repeated = TOKENS[:1, :2].repeat(1, 3)
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    ways = [dict(prompt_lookup_num_tokens=2), dict(assistant_model=draft)]
    attach(model)
    runner = HookedRunner(model)
    with runner.hooks({"blocks.0.resid_post": edits.scale(0.3, pos=pos)}):
        greedy = model.generate(repeated, **options)
        for way in ways:
            assert torch.equal(model.generate(repeated, **options, **way), greedy)
    with runner.hooks({"blocks.0.resid_post": edits.scale(0.3, pos=[-2, -1])}):
        for way in ways:
            (name,) = way
            with pytest.raises(SelectionError, match=f"from the start.*leave out {name}="):
                model.generate(repeated, **options, **way)


def test_embeddings_may_be_given_instead_of_tokens():
    model = made("llama")
    with attach(model), torch.no_grad():
        embeddings, zero = model.get_input_embeddings()(TOKENS), {"embed": edits.zero(pos=2)}
        runner = HookedRunner(model)
        _, wanted = runner.run_with_cache(TOKENS, mode="full")
        _, cache = runner.run_with_cache(inputs_embeds=embeddings, mode="full")
        assert {*cache} == {*wanted}
        torch.testing.assert_close(cache["embed"], wanted["embed"])
        by_tokens = runner.run_with_hooks(TOKENS, hooks=zero).logits
        by_embeddings = runner.run_with_hooks(inputs_embeds=embeddings, hooks=zero).logits
    torch.testing.assert_close(by_embeddings, by_tokens)


def on_meta():
    with torch.device("meta"):
        return tiny.model("LlamaForCausalLM")


REFUSED = {
    "compiled": (lambda: torch.compile(made("llama")), "before torch.compile"),
    "meta": (on_meta, "must have weights"),
    "images": (
        lambda: tiny.model("ViTForImageClassification", image_size=8, patch_size=4),
        "example=",
    ),
    "choices": (lambda: tiny.model("BertForMultipleChoice"), "MultipleChoice raised"),
    "prompts before": (
        lambda: tiny.model("CpmAntForCausalLM", dim_head=6, dim_ff=17),
        "a position for each of 7 tokens",
    ),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # the compiler imports it
@pytest.mark.parametrize("what", REFUSED)
def test_parts_that_cannot_be_attached_are_named(what):
    make, message = REFUSED[what]
    with pytest.raises((TypeError, ValueError), match=message):
        attach(make())


def test_other_libraries_have_generation_of_their_own():
    with pytest.raises(TypeError, match="generate"):
        generate(made("gpt2"), TOKENS, max_new_tokens=2)


SETTINGS = {
    "kind": ["gpt2", "llama", "gemma3", "qwen3", "olmo2", "neox", "mistral"],
    "dtype": [torch.float32, torch.float64, torch.bfloat16],
    "attention": ["eager", "sdpa"],
    "padding": ["none", "left", "right"],
    "positions": ["counted", "given"],
    "cache": ["none", "dynamic", "static"],
    "form": ["itself", "copied", "saved", "subclass", "adapter"],
    "input": ["tokens", "embeddings"],
}
DECODERS = {
    **KINDS,
    "qwen3": ("Qwen3ForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "neox": ("GPTNeoXForCausalLM", {}),
    "mistral": ("MistralForCausalLM", dict(sliding_window=3)),
}


def pairwise(settings, seed=0):
    """Yield random combinations of settings, one value for each setting.

    They end when every two values of different settings have occurred in the same combination.
    """
    draw = random.Random(seed)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(settings, 2)
        for x in settings[a]
        for y in settings[b]
    }
    while missing:
        drawn = [{n: draw.choice(v) for n, v in settings.items()} for _ in range(40)]
        met = [missing & {*itertools.combinations(combination.items(), 2)} for combination in drawn]
        best = max(range(40), key=lambda at: len(met[at]))
        missing -= met[best]
        if met[best]:
            yield drawn[best]


@pytest.mark.parametrize("form", ["copied", "saved"])
def test_a_copy_of_an_attached_model_is_detached(form):
    model = made("llama")
    with attach(model):
        copied = in_form(model, form)
    detach(copied)
    with torch.no_grad():
        assert torch.equal(copied(TOKENS).logits, model(TOKENS).logits)
    assert copied.config._attn_implementation == "sdpa"
    assert not any(isinstance(part, HookPoint) for part in copied.modules())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in copied.modules())
    with attach(copied):
        assert len(HookedRunner(copied).points) > 30


def assert_same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def blocks_in(model):
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=lambda part: sum(weight.numel() for weight in part.parameters()))


@pytest.mark.filterwarnings("ignore:a hook function at .* changed only padding")
@pytest.mark.sampled(16)
@pytest.mark.filterwarnings("ignore:.is_gradient", "ignore:fan_in_fan_out")  # peft causes them
@pytest.mark.parametrize(
    "chosen", [*pairwise(SETTINGS)], ids=lambda chosen: "-".join(map(str, chosen.values()))
)
def test_settings_in_drawn_pairs(chosen):
    """Logits, values and an edit are bitwise those of PyTorch's own hooks on a plain copy."""
    name, sizes = DECODERS[chosen["kind"]]
    whole = tiny.model(name, **sizes, attn_implementation=chosen["attention"])
    config = whole.config
    plain = in_form(whole.to(chosen["dtype"]), chosen["form"])
    model = copy.deepcopy(plain)
    inputs = {"tokens": dict(input_ids=TOKENS), "embeddings": {}}[chosen["input"]]
    if not inputs:
        inputs = dict(inputs_embeds=plain.get_input_embeddings()(TOKENS).detach())
    if chosen["padding"] != "none":
        inputs["attention_mask"] = PADDED if chosen["padding"] == "left" else PADDED.flip(1)
    if chosen["positions"] == "given":
        inputs["position_ids"] = torch.arange(5)[None].repeat(3, 1) + 2
    real = inputs.get("attention_mask", torch.ones_like(TOKENS)).bool()
    # Attached models count positions without padding. Give the copy the same positions.
    counted = dict(position_ids=(real.cumsum(1) - 1).clamp(min=0)) if not real[:, 0].all() else {}

    def cache():
        kind = chosen["cache"]
        if kind == "none":
            return dict(use_cache=False)
        made = transformers.StaticCache(config, 9) if kind == "static" else None
        return {CACHE: made or transformers.DynamicCache(config=config)}

    def raw(edit=None):
        kept, blocks = [], blocks_in(plain)
        first = lambda output: output if isinstance(output, torch.Tensor) else output[0]  # noqa: E731
        handles = [blocks[2].register_forward_hook(lambda m, a, out: kept.append(first(out)))]
        if edit:
            handles.append(blocks[0].register_forward_hook(lambda m, a, out: edit(first(out))))
        logits = plain(**counted | inputs, **cache()).logits
        for handle in handles:
            handle.remove()
        return logits, kept[0]

    def zero(stream):
        stream[:, 3] = 0

    with torch.no_grad():
        logits, value = raw()
        edited, _ = raw(zero)
        with attach(model):
            runner, zeroed = HookedRunner(model), {"blocks.0.resid_post": lambda s, point: zero(s)}
            assert_same(model(**counted | inputs, **cache()).logits, logits)
            is_counted = (chosen["input"], chosen["positions"]) == ("tokens", "counted")
            if is_counted and chosen["padding"] == "left" and logits[real].isnan().any():
                # In float64, the eager kernel returns NaN for padded rows, and later layers read
                # them at real tokens. The model itself is wrong here.
                with pytest.raises(ValueError, match="padded on the right"):
                    runner.run_with_cache(**inputs, **cache())
                return
            output, kept = runner.run_with_cache(**inputs, **cache(), names="blocks.2.resid_post")
            assert_same(output.logits, logits)
            assert_same(kept["resid_post", 2], value)
            ours = runner.run_with_hooks(**inputs, **cache(), hooks=zeroed).logits
            assert_same(ours, edited)
            assert not torch.equal(ours[real], logits[real])
            every = runner.run_with_cache(**inputs, **cache())[0].logits[real]
            # In float64, the eager kernels of `transformers` compute the softmax in float32. With
            # hooks at the pattern, it is computed in float64.
            eps = max(torch.finfo(dtype).eps for dtype in (chosen["dtype"], torch.float32))
            allowed = 16 * eps * float(logits[real].abs().max())
            # These kernels return NaN for padded rows in float64.
            if logits.isfinite().all():
                torch.testing.assert_close(every, logits[real], rtol=0, atol=allowed)
        assert_same(model(**counted | inputs, **cache()).logits, logits)
