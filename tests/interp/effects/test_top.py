"""The largest effects, compared with a table of all effects, and directions, compared with exact
interchanges.
"""

import itertools

import pytest
import torch

from hooks import HookedRunner, UnknownNameError
from interp import Pairs, edits, sweep, top_attributions
from tests.interp.effects.by_hand import (
    BASE,
    LEFT,
    METRIC,
    PAIRS,
    TARGET,
    changed,
    close,
    paired,
    values_and_gradients,
)
from tests.reference import BATCH, POS, some_tokens, variant


@pytest.mark.parametrize(("k", "mask"), [(1, None), (17, LEFT), (1000, None)])
def test_the_largest_neurons_of_a_whole_table(k, mask):
    model = variant("grouped", n_layers=3)
    names = [f"blocks.{layer}.mlp.post" for layer in range(3)]
    base = values_and_gradients(model, names, BASE, mask)
    target = values_and_gradients(model, names, TARGET, mask)
    table = {
        f"layer {layer}, pos {pos}, neuron {neuron}": (
            (target[name][0] - base[name][0]) * base[name][1]
        )[:, pos, neuron]
        for layer, name in enumerate(names)
        for pos, neuron in itertools.product(range(POS), range(13))
    }
    found = top_attributions(model, paired(mask), k=k)
    real = torch.ones(BATCH, POS, dtype=torch.bool) if mask is None else mask.bool()
    exists = {label: real[:, int(label.split()[3].strip(","))] for label in table}
    # The mean of a position is over the texts that have it.
    means = {label: effects[exists[label]].mean() for label, effects in table.items()}
    sizes = sorted((mean.abs().item() for mean in means.values()), reverse=True)
    assert found.mean().abs().tolist() == pytest.approx(sizes[:k])
    assert found.values.shape == (min(k, len(table)), BATCH)
    labels = found.labels["place"]
    assert len(set(labels)) == len(labels)
    close(found.values, torch.stack([table[label] for label in labels]))
    close(found.mean(), torch.stack([means[label] for label in labels]))
    expected = torch.stack([exists[label] for label in labels])
    assert torch.equal(found.exists if mask is not None else expected, expected)


@torch.no_grad()
@pytest.mark.parametrize("direction", ["noising", "denoising"])
def test_directions_estimate_interchanges(direction):
    model = variant("attention only", norm="none", n_kv_heads=3)
    draw = torch.Generator().manual_seed(0)
    points = {"blocks.1.resid_post": 10, "blocks.1.attn.v": 8}
    given = {name: torch.randn(d, 2, generator=draw).double() for name, d in points.items()}
    found = top_attributions(model, PAIRS, given, k=5, direction=direction)
    texts = [BASE, TARGET] if direction == "denoising" else [TARGET, BASE]
    _, cache = HookedRunner(model).run_with_cache(texts[1])
    entries, labels = [], []
    for name, heads in (("blocks.1.resid_post", [None]), ("blocks.1.attn.v", range(3))):
        for pos, head, n in itertools.product(range(POS), heads, range(2)):
            where = {"pos": pos} | ({} if head is None else {"kv_head": head})
            entries.append({name: edits.interchange(cache, given[name][:, n], **where)})
            at = "".join(f", {axis} {index}" for axis, index in where.items())
            labels.append(f"{name}{at}, direction {n}")
    exact = sweep(model, texts[0], entries, METRIC)
    truth = dict(zip(labels, exact.values, strict=True))
    largest = exact.mean().abs().sort(descending=True).values[:5]
    close(found.mean().abs(), largest)
    close(found.values, torch.stack([truth[label] for label in found.labels["place"]]))
    close(found.base, exact.base)
    assert found.about["direction"] == direction


def test_a_point_that_the_metric_does_not_read_is_said():
    model, stream = variant("pre"), {}
    keep = changed(model, {"blocks.0.mlp_out": lambda out: stream.update(x=out)})
    with keep, pytest.warns(UserWarning, match=r"blocks\.1\.mlp\.post"):
        found = top_attributions(model, paired(metric=lambda logits: stream["x"].sum((1, 2))), k=3)
    assert all(label.startswith("layer 0") for label in found.labels["place"])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "k.*0", {"k": 0}),
        (ValueError, "10 numbers", {"directions": {"embed": torch.ones(9, 2)}}),
        (ValueError, "10 numbers", {"directions": {"embed": torch.ones(10)}}),
        (ValueError, "not all 0", {"directions": {"embed": torch.zeros(10, 2)}}),
        (ValueError, "named axes", {"directions": {"unembedding": torch.ones(23, 2)}}),
        (UnknownNameError, "embed", {"directions": {"embde": torch.ones(10, 2)}}),
        (ValueError, "NaN", {"metric": lambda logits: (logits[:, -1, 0] * 0).sqrt()}),
    ],
)
def test_bad_input_is_refused(error, match, options):
    pairs = paired(metric=options.pop("metric", METRIC))
    with pytest.raises(error, match=match):
        top_attributions(variant("pre"), pairs, **options)


def test_texts_whose_columns_do_not_correspond_are_refused():
    at = {"spans": {"a": [[1]] * BATCH}, "corrupted_spans": {"a": [[2]] * BATCH}}
    pairs = Pairs(BASE, some_tokens(2, (BATCH, POS + 2)), metric=METRIC, **at)
    with pytest.raises(ValueError, match="same columns"):
        top_attributions(variant("pre"), pairs)
