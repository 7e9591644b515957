"""One model with an adapter as two models, compared with a copy that `attach` has never seen."""

import copy

import pytest
import torch

from hooks import HookedRunner
from interp import compare_models
from interp.runs.adapters import adapter_off
from models import attach
from tests.attachable import TOKENS, config_of, made

peft = pytest.importorskip("peft", reason="needs peft")
# peft reads an attribute that transformers has deprecated, and warns about GPT-2's weights.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient", "ignore:fan_in_fan_out")

TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "mlp.c_proj"]}
PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0]])


def adapted(name, **options):
    """Return a model with a random adapter."""
    torch.manual_seed(5)
    config = peft.LoraConfig(
        **dict(r=2, lora_alpha=6, target_modules=TARGETS[name], init_lora_weights=False) | options
    )
    return peft.get_peft_model(made(name), config).eval()


def run(model, tokens):
    """Return log-probabilities and the outputs of all blocks of one text, by PyTorch's hooks."""
    inner = model.base_model.model
    blocks = inner.model.layers if hasattr(inner, "model") else inner.transformer.h
    outputs = []

    def keep(module, args, output):
        outputs.append(output if isinstance(output, torch.Tensor) else output[0])

    handles = [block.register_forward_hook(keep) for block in blocks]
    with torch.no_grad():
        logits = model(tokens).logits
    for handle in handles:
        handle.remove()
    return logits.log_softmax(-1)[0], torch.stack(outputs)[:, 0]


@pytest.mark.parametrize("name", TARGETS)
def test_predictions_streams_and_weights_equal_the_forward_of_transformers(name):
    model = adapted(name)
    twin = copy.deepcopy(model).double()
    attach(model)
    change = compare_models(model, None, dict(input_ids=TOKENS, attention_mask=PADDED))
    for n, length in enumerate((7, 5, 3)):
        row = TOKENS[n : n + 1, :length]
        log_p, ours = run(twin, row)
        with twin.disable_adapter():
            log_q, theirs = run(twin, row)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        torch.testing.assert_close(change.kl.values[:length, n].double(), kl, atol=1e-5, rtol=1e-4)
        sizes = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        torch.testing.assert_close(
            change.stream.values[:, :length, n].double(), sizes, atol=1e-5, rtol=1e-4
        )
        assert change.kl.values[length:, n].isnan().all()
    layers = {n: m for n, m in twin.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    assert len(change.weights.changed) == len(layers) == 4
    # The adapter adds no names.
    of_base = [key for key, _ in made(name).named_parameters()]
    assert sorted(weight.name for weight in change.weights.changes) == sorted(of_base)
    for name_of_layer, layer in layers.items():
        found = change.weights[f"{name_of_layer.removeprefix('base_model.model.')}.weight"]
        added = 3 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        s = torch.linalg.svdvals(added)[:2].detach()
        torch.testing.assert_close(found.s, s, rtol=1e-5, atol=1e-6)
        relative = added.norm() / layer.base_layer.weight.norm()
        assert found.relative == pytest.approx(relative.item(), rel=1e-5)
        shares = s / s.sum()
        rank = torch.exp(-(shares * shares.log()).sum()).item()
        assert found.effective_rank == pytest.approx(rank, rel=1e-4)
        assert 1.5 < found.random_rank <= 2


def test_two_models_and_one_model_with_an_adapter_are_compared_alike():
    model = adapted("llama")
    merged = copy.deepcopy(model).merge_and_unload()
    base = made("llama")
    for each in (model, merged, base):
        attach(each)
    one = compare_models(model, texts=TOKENS)
    for tuned in (merged, model):
        two = compare_models(tuned, base, TOKENS)
        torch.testing.assert_close(two.kl.values, one.kl.values, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(two.stream.values, one.stream.values, atol=1e-5, rtol=1e-4)
        assert sorted(two.weights.changed) == sorted(one.weights.changed)
        for change in one.weights.changes[:4]:
            other = two.weights[change.name]
            assert other.relative == pytest.approx(change.relative, rel=1e-4)
            torch.testing.assert_close(other.s[:2], change.s, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            two.lens(1).vectors[0], one.lens(1).vectors[0], atol=1e-5, rtol=1e-4
        )


def test_modules_that_are_trained_whole_are_compared_with_the_original():
    model = adapted("llama", modules_to_save=["lm_head"])
    with torch.no_grad():
        head = model.base_model.model.lm_head
        head.modules_to_save["default"].weight.mul_(1.5)
    attach(model)
    change = compare_models(model, None, TOKENS)
    assert change.weights["lm_head.weight"].relative == pytest.approx(0.5, rel=1e-5)
    assert len(change.weights.changed) == 5
    log_p = model(TOKENS).logits.log_softmax(-1)
    with torch.no_grad(), model.disable_adapter():
        log_q = model(TOKENS).logits.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).detach()
    torch.testing.assert_close(change.kl.values.mT, kl, atol=1e-5, rtol=1e-4)


def tied_llama(**options):
    """Return a model with a tied unembedding and an adapter."""
    config = config_of("llama")
    config.tie_word_embeddings = True
    return peft.get_peft_model(made("llama", config=config), peft.LoraConfig(**options)).eval()


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings")
def test_a_tied_module_that_is_trained_whole_is_compared_with_the_original():
    model = tied_llama(target_modules=["q_proj"], modules_to_save=["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.5)
    attach(model)
    change = compare_models(model, None, TOKENS)
    assert change.outside_layers == ("lm_head.weight",)
    assert change.weights.changed == ["lm_head.weight"]
    assert change.weights["lm_head.weight"].relative == pytest.approx(0.5, rel=1e-5)


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings")
def test_an_adapter_of_a_tied_unembedding_leaves_the_embedding():
    model = tied_llama(r=2, lora_alpha=2, target_modules=["lm_head"], init_lora_weights=False)
    head = model.base_model.model.lm_head
    added = (head.lora_B["default"].weight @ head.lora_A["default"].weight).norm()
    expected = (added / model.base_model.model.model.embed_tokens.weight.norm()).item()
    attach(model)
    change = compare_models(model, None, TOKENS)
    assert change.outside_layers == ("lm_head.weight",)
    assert change.weights.changed == ["lm_head.weight"]
    assert change.weights["lm_head.weight"].relative == pytest.approx(expected, rel=1e-5)


def test_the_adapter_is_in_its_old_state_after_a_comparison_and_after_an_error():
    model = adapted("llama")
    model.requires_grad_(False)
    attach(model)
    before = model(TOKENS).logits
    compare_models(model, None, TOKENS).weights  # noqa: B018  # computed at the access
    assert not any(weight.requires_grad for weight in model.parameters())
    assert torch.equal(model(TOKENS).logits, before)
    with adapter_off(model):
        assert not torch.allclose(model(TOKENS).logits, before)
    with pytest.raises(ZeroDivisionError), adapter_off(model):
        raise ZeroDivisionError
    assert torch.equal(model(TOKENS).logits, before)
    # An adapter that the user has switched off stays off.
    for layer in model.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.enable_adapters(False)
    off = model(TOKENS).logits
    change = compare_models(model, None, TOKENS)
    assert change.kl.values.abs().max() == 0
    assert torch.equal(model(TOKENS).logits, off)


def test_no_second_copy_of_the_weights_is_made():
    model = adapted("llama")
    attach(model)
    storages = {weight.data_ptr() for weight in model.parameters()}
    change = compare_models(model, None, TOKENS)
    with adapter_off(model):
        assert {weight.data_ptr() for weight in model.parameters()} == storages
    assert HookedRunner(model).model is change._models.base


def test_adapters_that_cannot_be_switched_off_are_named():
    merged = adapted("llama")
    merged.merge_adapter()
    attach(merged)
    with pytest.raises(ValueError, match="unmerge_adapter"):
        compare_models(merged, None, TOKENS)
    biased = adapted("llama", bias="all")
    attach(biased)
    with pytest.raises(ValueError, match="bias='all'"):
        compare_models(biased, None, TOKENS)


def test_an_adapter_in_half_precision_adds_a_matrix():
    model = adapted("llama").bfloat16()
    attach(model)
    change = compare_models(model, None, dict(input_ids=TOKENS))
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    added = 3 * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    found = change.weights["model.layers.0.mlp.down_proj.weight"].s[0]
    torch.testing.assert_close(found.double(), torch.linalg.svdvals(added)[0], rtol=0.01, atol=0)


def test_an_adapter_that_adds_no_matrix_is_named():
    model = adapted("llama", use_dora=True)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "magnitude" in name:
                weight.mul_(1.2)
    attach(model)
    change = compare_models(model, None, TOKENS)
    assert change.kl.values.max() > 0
    with pytest.raises(ValueError, match="must add a matrix"):
        change.weights  # noqa: B018  # computed at the access


def test_an_adapter_that_multiplies_the_output_adds_no_matrix():
    config = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=[])
    model = peft.get_peft_model(made("llama"), config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "ia3" in name:
                weight.mul_(1.5)
    attach(model)
    change = compare_models(model, None, TOKENS)
    assert change.kl.values.max() > 0
    with pytest.raises(ValueError, match=r"ia3.*k_proj, which does not: merge a copy"):
        change.weights  # noqa: B018  # computed at the access
