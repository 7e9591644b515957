"""Sets of transcoders of several layers: a set is a module and a mapping."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hooks import HookedRunner, UnknownNameError
from interp.attribution_graphs import attribution_graph
from interp.features import (
    CrossLayerTranscoder,
    Dictionary,
    Transcoders,
    TranscoderSet,
    evaluate_sae,
    feature_cards,
    load_sae,
    load_transcoders,
    splice,
)
from tests.interp.features.fixtures import FIXTURES
from tests.shipped import pydoc

D_IN, D_OUT, FEATURES, ROWS = 5, 7, 11, 3


def transcoder(layer, seed, reads="ln2.normalized", skip=True):
    """Return a ReLU transcoder of one layer, and its weights as arrays."""
    draw = np.random.default_rng(seed)
    sizes = {
        "W_enc": (D_IN, FEATURES),
        "W_dec": (FEATURES, D_OUT),
        "b_enc": (FEATURES,),
        "b_dec": (D_OUT,),
        "W_skip": (D_IN, D_OUT),
    }
    weights = {name: draw.normal(size=size) for name, size in sizes.items()}
    tensors = {name: torch.from_numpy(weight) for name, weight in weights.items()}
    if not skip:
        del tensors["W_skip"]
    place = {"reads": f"blocks.{layer}.{reads}", "writes": f"blocks.{layer}.mlp_out"}
    return Dictionary(**tensors, activation=nn.ReLU(), **place), weights


def test_a_set_computes_each_layer():
    parts = {layer: transcoder(layer, seed=layer) for layer in (4, 2)}
    made = TranscoderSet({f"blocks.{n}.mlp_out": coder for n, (coder, _) in parts.items()})
    assert made.layers == [2, 4]
    x = {layer: np.random.default_rng(9 + layer).normal(size=(ROWS, D_IN)) for layer in parts}
    streams = [torch.from_numpy(x[layer]) for layer in (2, 4)]
    features = made.encode(streams)
    for values, output, layer in zip(features, made.decode(features, streams), (2, 4), strict=True):
        w = parts[layer][1]
        wanted = np.maximum(x[layer] @ w["W_enc"] + w["b_enc"], 0)
        np.testing.assert_allclose(values.numpy(), wanted)
        wanted = wanted @ w["W_dec"] + w["b_dec"] + x[layer] @ w["W_skip"]
        np.testing.assert_allclose(output.numpy(), wanted)
    with pytest.raises(ValueError, match="skip"):
        made.decode(features)


def test_a_set_is_a_mapping_and_a_module():
    first, second = (transcoder(layer, seed=layer, skip=False)[0] for layer in (0, 1))
    made = TranscoderSet({"blocks.0.mlp_out": first, "blocks.1.mlp_out": second})
    assert [*made] == [*made.keys()] == ["blocks.0.mlp_out", "blocks.1.mlp_out"]
    assert made["blocks.1.mlp_out"] is made.dictionary(1) is second
    assert dict(made) == {"blocks.0.mlp_out": first, "blocks.1.mlp_out": second}
    assert (len(made), made.get("blocks.7.mlp_out"), "blocks.0.mlp_out" in made) == (2, None, True)
    assert (made.reads, made.writes) == ("ln2.normalized", "mlp_out")
    # Transcoders are a mapping and a module. Unlike other mappings, they equal only themselves, so
    # they can be the key of a dict.
    assert made != copy.copy(made)
    assert {made: 3}[made] == 3
    assert made.to(torch.float32) is made
    assert {part.W_enc.dtype for part in made.values()} == {torch.float32}
    assert nn.ModuleList([made]).double()[0]["blocks.0.mlp_out"].W_dec.dtype == torch.float64
    with pytest.raises(UnknownNameError, match=r"blocks\.1\.mlp_out"):
        made["blocks.1.mlp_ot"]
    with pytest.raises(UnknownNameError, match="'3'"):
        made.dictionary(3)
    other = transcoder(1, seed=5, reads="resid_mid")[0]
    assert TranscoderSet({"blocks.0.mlp_out": first, "blocks.1.mlp_out": other}).reads is None


WRONG = {
    "none": ({}, ValueError, "at least one"),
    "no layer": ({"embed": transcoder(0, seed=0)[0]}, ValueError, "'embed'"),
    "one layer twice": (
        {name: transcoder(3, seed=0)[0] for name in ("blocks.3.mlp_out", "blocks.3.attn_out")},
        ValueError,
        r"blocks\.3\.attn_out",
    ),
    "no dictionary": ({"blocks.0.mlp_out": nn.Linear(3, 2)}, TypeError, "Linear.*load_sae"),
}


@pytest.mark.parametrize("case", WRONG)
def test_transcoders_that_are_not_a_set_are_errors(case):
    dictionaries, error, words = WRONG[case]
    with pytest.raises(error, match=words):
        TranscoderSet(dictionaries)


def test_each_loader_returns_one_kind_and_names_the_other():
    folders = {"circuit_tracer_topk": TranscoderSet, "cross_layer_relu": CrossLayerTranscoder}
    for name, kind in folders.items():
        folder = FIXTURES / name
        made = load_transcoders(folder)
        assert isinstance(made, kind)
        assert isinstance(made, Transcoders)
        assert made.layers == [*range(len(made.layers))]
        assert isinstance(made.dictionary(0), Dictionary)
        call = re.escape(f"load_transcoders({str(folder)!r})")
        with pytest.raises(ValueError, match=call):
            load_sae(folder)
    folder = FIXTURES / "sae_lens_standard"
    for path in (folder, Path(folder, "cfg.json")):
        with pytest.raises(ValueError, match=re.escape(f"load_sae({str(path)!r})")):
            load_transcoders(path)


def test_a_loaded_set_is_accepted_like_a_dictionary_of_dictionaries():
    model, made = pydoc(), load_transcoders("pydoc-4l/transcoders")
    text = "def f(x): return x"
    with splice(model, made) as runner:
        cache = runner.capture(text, names="*.features")
    assert [*cache] == [f"blocks.{n}.mlp_out.features" for n in range(4)]
    read = HookedRunner(model).capture(text, names="blocks.2.ln2.normalized")
    encoded = made.dictionary(2).encode(read["ln2.normalized", 2])
    torch.testing.assert_close(cache["mlp_out.features", 2], encoded)
    plain = dict(made)
    torch.testing.assert_close(
        evaluate_sae(model, made, [text]).losses, evaluate_sae(model, plain, [text]).losses
    )
    graphs = [attribution_graph(model, text, each, max_features=7) for each in (made, plain)]
    torch.testing.assert_close(graphs[0].rows, graphs[1].rows)
    with pytest.raises(ValueError, match=r"single dictionary; got 4;.*blocks\.0\.mlp_out"):
        feature_cards(model, made, [text], [3])
