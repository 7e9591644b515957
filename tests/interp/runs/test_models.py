"""Tests of `source=`: analyses that put values of another model into runs of a model.

Each analysis must equal a computation with PyTorch's own hooks on the two models.
"""

import copy

import pytest
import torch

from hooks import EditError
from interp import (
    Pairs,
    activation_patching,
    attribution_patching,
    edge_attribution,
    edge_patching,
    edits,
    integrated_gradients,
    log_prob,
    path_patching,
    run_with_cache,
    sweep,
)
from interp.measuring import name_of
from interp.runs.runs import Runs
from models import CharTokenizer, attach
from tests import tiny
from tests.interp.effects.by_hand import changed, close
from tests.reference import BATCH, HEADS, LAYERS, POS, some_tokens, variant
from tests.shipped import pydoc

TOKENS = some_tokens(1)
ANSWERS = torch.tensor([3, 0, 7, 22, 5])
MASK = torch.ones(BATCH, POS, dtype=torch.bool)
MASK[1, :2] = False
MASK[3, :1] = False
TEXT = {"input_ids": TOKENS, "attention_mask": MASK}


def tuned_and_base(form="pre"):
    """Return two models of one form, with different weights."""
    tuned, base = variant(form), variant(form)
    with torch.no_grad():
        for seed, parameter in enumerate(base.parameters()):
            generator = torch.Generator().manual_seed(seed)
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator).double()
    return tuned, base


def values_of(model, name):
    """Return the output of a module in a run of the texts."""
    values = []
    with changed(model, {name: lambda output: values.append(output)}), torch.no_grad():
        model(TOKENS, attention_mask=MASK)
    return values[0]


def metric_of(model, changes=()):
    """Return the log-probabilities of the answers. All texts end at the last column."""
    with changed(model, dict(changes)), torch.no_grad():
        logits = model(TOKENS, attention_mask=MASK)[:, -1]
    return logits.log_softmax(1)[torch.arange(BATCH), ANSWERS]


PAIRS = Pairs(TEXT, answers=ANSWERS)


def test_values_of_another_model_are_patched_into_each_head():
    tuned, base = tuned_and_base()
    result = activation_patching(tuned, PAIRS, "z", source=base)
    close(result.base, metric_of(tuned))
    close(result.target, metric_of(base))
    for layer in range(LAYERS):
        name = f"blocks.{layer}.attn.z"
        source = values_of(base, name)
        for head in range(HEADS):

            def put(output, source=source, head=head):
                new = output.clone()
                new[:, :, head] = source[:, :, head]
                return new

            close(result.values[layer, head], metric_of(tuned, {name: put}) - metric_of(tuned))
    assert result.about["source"] == "another Transformer"


def test_a_sweep_reads_values_of_another_model_from_its_cache():
    """Some edits read part of a value, at positions that count from the end of each text."""
    tuned, base = tuned_and_base()
    _, cache = run_with_cache(base, TEXT)
    entries, expected = [], []
    for layer in range(LAYERS):
        name = f"blocks.{layer}.attn.z"
        source = values_of(base, name)
        for head in range(HEADS):

            def put(output, source=source, head=head):
                new = output.clone()
                new[:, -2:, head] = source[:, -2:, head]
                return new

            entries.append({name: edits.replace(cache, head=head, pos=[-2, -1])})
            expected.append(metric_of(tuned, {name: put}) - metric_of(tuned))
    last = f"blocks.{LAYERS - 1}.resid_post"
    entries.append({last: edits.replace(cache)})
    stream = values_of(base, last)
    expected.append(metric_of(tuned, {last: lambda output: stream}) - metric_of(tuned))
    result = sweep(tuned, PAIRS, entries)
    close(result.values, torch.stack(expected))
    assert result.values[:-1].abs().max(1).values.min() > 1e-4


def test_attributions_are_gradients_of_the_edited_model():
    tuned, base = tuned_and_base()
    result = attribution_patching(tuned, PAIRS, "mlp_out", source=base)
    for layer in range(LAYERS):
        name = f"blocks.{layer}.mlp_out"
        nodes = []

        def watch(output, nodes=nodes):
            nodes.append(output.detach().requires_grad_())
            return nodes[0]

        with changed(tuned, {name: watch}):
            logits = tuned(TOKENS, attention_mask=MASK)[:, -1]
        logits.log_softmax(1)[torch.arange(BATCH), ANSWERS].sum().backward()
        products = (values_of(base, name) - nodes[0].detach()) * nodes[0].grad
        close(result.values[layer], products.sum(2).T)


@pytest.mark.filterwarnings("ignore:.*should add up:UserWarning")
def test_integrated_gradients_go_to_the_values_of_the_other_model():
    tuned, base = tuned_and_base()
    result = integrated_gradients(tuned, PAIRS, "resid_post", ["layer"], source=base, steps=64)
    name = f"blocks.{LAYERS - 1}.resid_post"
    source = values_of(base, name)
    exact = metric_of(tuned, {name: lambda output: source}) - metric_of(tuned)
    close(result.values[-1], exact, 1e-3)


def written(model, name):
    """Return what a sublayer adds to the residual stream."""
    return values_of(model, name)


def test_an_edge_carries_the_output_of_the_writer_of_the_other_model():
    tuned, base = tuned_and_base()
    names = ["m0->logits", "m0->m1"]
    result = edge_patching(tuned, PAIRS, names, source=base)
    moved = written(base, "blocks.0.mlp_out") - written(tuned, "blocks.0.mlp_out")
    last = f"blocks.{LAYERS - 1}.resid_post"
    effect = metric_of(tuned, {last: lambda output: output + moved}) - metric_of(tuned)
    close(result.values[0], effect)
    # The MLP of block 1 alone reads the change.
    with torch.no_grad():
        block = tuned.blocks[1]
        stream = values_of(tuned, "blocks.1.resid_mid")
        out = block.mlp(block.ln2(stream + moved))
    effect = metric_of(tuned, {"blocks.1.mlp_out": lambda output: out}) - metric_of(tuned)
    close(result.values[1], effect)
    paths = path_patching(tuned, PAIRS, "logits", ["m0"], mlps="frozen", source=base)
    close(paths.values[0], result.values[0])


def test_scores_of_edges_are_gradients_times_changes_between_the_models():
    tuned, base = tuned_and_base()
    result = edge_attribution(tuned, PAIRS, source=base)
    moved = written(base, "blocks.0.mlp_out") - written(tuned, "blocks.0.mlp_out")
    last = f"blocks.{LAYERS - 1}.resid_post"
    share = torch.zeros((), dtype=torch.float64, requires_grad=True)
    with changed(tuned, {last: lambda output: output + share * moved}):
        logits = tuned(TOKENS, attention_mask=MASK)[:, -1]
    metrics = logits.log_softmax(1)[torch.arange(BATCH), ANSWERS]
    expected = [torch.autograd.grad(metric, share, retain_graph=True)[0] for metric in metrics]
    close(result.select(edge="m0->logits").values, torch.stack(expected), 1e-9)
    # What a head of the other model writes is computed with the output weights of that model.
    z = values_of(base, "blocks.0.attn.z")[:, :, 2] @ base.blocks[0].attn.W_O[2]
    z = z - values_of(tuned, "blocks.0.attn.z")[:, :, 2] @ tuned.blocks[0].attn.W_O[2]
    with changed(tuned, {last: lambda output: output + share * z}):
        logits = tuned(TOKENS, attention_mask=MASK)[:, -1]
    metrics = logits.log_softmax(1)[torch.arange(BATCH), ANSWERS]
    expected = [torch.autograd.grad(metric, share, retain_graph=True)[0] for metric in metrics]
    close(result.select(edge="a0.h2->logits").values, torch.stack(expected), 1e-9)


@pytest.mark.parametrize("name", ["GraniteForCausalLM", "CohereForCausalLM", "Phi3ForCausalLM"])
def test_an_attached_model_is_the_source_of_edges(name):
    """These attached models have other points than the parts that their graphs run."""
    tuned = tiny.redraw(tiny.model(name), 0.3)
    base = tiny.redraw(tiny.model(name, seed=1), 0.3)
    tokens = TOKENS % tuned.config.vocab_size
    written = []
    for model in (tuned, base):
        hooked = copy.deepcopy(model)
        mlp = hooked.model.layers[-1].mlp
        mlp.register_forward_hook(lambda module, args, out: written.append(out.detach()))
        hooked(tokens)
    moved = getattr(tuned.config, "residual_multiplier", 1.0) * (written[1] - written[0])
    hooked = copy.deepcopy(tuned)

    def metric(share):
        """Return the metric if the last norm also reads a share of the change."""
        read = hooked.model.norm.register_forward_pre_hook(lambda _, args: args[0] + share * moved)
        with read:
            return hooked(tokens).logits[:, -1].log_softmax(-1)[:, 3]

    effect = (metric(1.0) - metric(0.0)).detach()
    share = torch.zeros(len(tokens), 1, 1, requires_grad=True)
    (slope,) = torch.autograd.grad(metric(share).sum(), share)
    attach(tuned)
    attach(base)
    pairs = Pairs(tokens, metric=log_prob(3))
    writer = f"m{len(tuned.model.layers) - 1}"
    edge = f"{writer}->logits"
    for found, expected in (
        (edge_patching(tuned, pairs, [edge], source=base).values[0], effect),
        (path_patching(tuned, pairs, "logits", [writer], source=base).values[0], effect),
        (edge_attribution(tuned, pairs, source=base).select(edge=edge).values, slope.flatten()),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_changed_mlp_is_undone_from_its_layer_on():
    """In a copy, the MLP weights of block 2 are multiplied by 1.3.

    Values of the original model remove the whole KL divergence at and after that block.
    """
    base = copy.deepcopy(pydoc()).double()
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        for weight in tuned.blocks[2].mlp.parameters():
            weight *= 1.3
    texts = ["Return the list of", "def __init__(self, name):", "part KV8 and part K"]
    result = activation_patching(tuned, texts, "resid_post", ["layer"], source=base)
    divergences = []
    for text in texts:
        tokens = base.to_tokens(text).tokens
        ours, theirs = (model(tokens)[0].detach().log_softmax(1) for model in (tuned, base))
        divergences.append((theirs.exp() * (theirs - ours)).sum(1).mean())
    close(result.base, torch.stack(divergences), 1e-9)
    close(result.target, torch.zeros(3).double(), 1e-9)
    close(result.values[2:], -torch.stack(divergences).expand(2, 3), 1e-9)
    assert result.values[:2].abs().max() < 1e-9


def test_a_source_gives_pairs_a_metric_and_no_other_rows():
    """Analyses compare rows and pairs to know whether answers have several tokens."""
    tuned, base = tuned_and_base()
    runs = Runs(tuned, Pairs(TEXT), source=base)
    runs.source(["blocks.0.mlp_out"])
    assert name_of(runs.metric) == "kl_divergence(reference, pos=None)"
    assert runs.rows is runs.pairs
    runs.cache(["blocks.0.mlp_out"])
    with torch.no_grad():
        ours, theirs = (
            model(TOKENS, attention_mask=MASK).log_softmax(2) for model in (tuned, base)
        )
    divergences = (theirs.exp() * (theirs - ours)).sum(2)
    expected = [values[is_real].mean() for values, is_real in zip(divergences, MASK, strict=True)]
    close(runs.base, torch.stack(expected), 1e-9)
    close(runs.target, torch.zeros(BATCH).double(), 1e-9)


def test_attached_models_may_be_sources():
    tuned, base = (tiny.model("LlamaForCausalLM", seed).double() for seed in (1, 2))
    attach(tuned)
    attach(base)
    result = activation_patching(tuned, PAIRS, "resid_post", ["layer"], source=base)
    with torch.no_grad():
        logits = base(TOKENS, attention_mask=MASK).logits[:, -1]
    close(result.target, logits.log_softmax(1)[torch.arange(BATCH), ANSWERS])


def test_models_that_do_not_fit_are_refused():
    tuned, base = tuned_and_base()
    with pytest.raises(ValueError, match="without pos_embed"):
        activation_patching(tuned, PAIRS, source=variant("like llama"))
    wider = variant("pre", d_model=12)
    with pytest.raises(EditError, match=r"blocks.0.resid_pre.*size 10 along d_model; got 12"):
        activation_patching(tuned, PAIRS, source=wider)
    with pytest.raises(ValueError, match="direction must be left out.*noising"):
        activation_patching(tuned, PAIRS, source=base, direction="noising")
    with pytest.raises(ValueError, match="edit and source"):
        activation_patching(tuned, PAIRS, source=base, edit=edits.zero())
    shipped, other = pydoc(), copy.deepcopy(pydoc())
    other.tokenizer = CharTokenizer("eh nrutR")
    pairs = Pairs("Return the", metric=log_prob(3))
    with pytest.raises(ValueError, match="same tokens.*text 0"):
        activation_patching(shipped, pairs, source=other)
