"""The JSON form: one schema for all results, with the numbers of the objects."""

import importlib
import inspect
import json

import numpy as np
import pytest
import torch
from torch import nn

import interp
from hooks import HookedRunner
from interp import Pairs, Result, json_form
from interp.plots import Shown
from interp.store import harvest
from tests.interp.json_schema import require_schema
from tests.interp.made import MADE, OTHER, TEXT, shared
from tests.shipped import pydoc


def effect(result, name="effect"):
    """Return the tables of a result, computed by numpy."""
    values = result.values.detach().numpy()
    tables = {name: values, f"{name}.mean": values.mean(-1)}
    if result.base is not None:
        tables[f"{name}.base"] = result.base.numpy()
    return tables


# For each result, a function from it to some of its tables.
EXPECTED = {
    "activation_patching": effect,
    "normalized": effect,
    "edge_attribution": effect,
    "logit_lens": lambda r: {"tokens": r.tokens, "kl": r.kl, "probabilities": r.probabilities},
    "decompose": lambda r: {"norm": np.linalg.norm(r.values.numpy(), axis=-1)},
    "composition_scores": effect,
    "max_activating": lambda r: {
        "place.value": [place.value for place in r],
        "place.pos": [p.pos for p in r],
    },
    "tuned_lens": lambda r: {"losses": r.losses, "rows": r.rows},
    "jacobian_lens": lambda r: {"error": r.error, "n_texts": 2},
    "compare_effects": lambda r: {"exact": r.exact, "rank_correlation": 1.0},
    "circuit_curve": lambda r: {**effect(r.random, "random"), "cpr.value": r.cpr.value},
    "patch_top_k": lambda r: {**effect(r.top, "top"), "n_outside": 14},
    "circuit": lambda r: {"edge.name": [*r], "edge.score": r.scores[r.kept], "n_edges": 479},
    "acdc": lambda r: {"2.0.edge.name": [*r[2.0]]},
    "faithfulness": lambda r: {**effect(r.circuit, "circuit"), **effect(r.random, "random")},
    "pairs": lambda r: {"clean": r.text.listed()},
    "align": lambda r: {**effect(r.accuracy, "accuracy"), "losses": [*r.losses.values()]},
    "null_spaces": lambda r: {**effect(r.effects, "effects"), "dormant": r.dormant},
    "evaluate_circuit": lambda r: {
        **effect(r.faithfulness, "faithfulness"),
        **effect(r.completeness, "completeness"),
        **effect(r.minimality, "minimality"),
    },
    "evaluate_sae": lambda r: {
        "losses": r.losses,
        "losses.mean": r.losses.mean(1),
        "kl": r.kl[None],
        "point.l0": [r.points["blocks.2.resid_post"].l0],
        "density.blocks.2.resid_post": r.points["blocks.2.resid_post"].density,
    },
    "feature_cards": lambda r: {
        "feature.index": [5, 332],
        "feature.density": [card.density for card in r],
    },
    "crosscoder": lambda r: {"decoder.norm": [[1, 0], [1, 1]]},
    "crosscoder_cards": lambda r: {"feature.largest": [r[0].largest]},
    "latent_scaling": lambda r: {"betas": r.betas, "nu.error": r.betas[0, 1] / r.betas[0, 0]},
    "score_explanation": lambda r: {
        "score.value": [score.value for *_, score in r._rows()],
        "answer.reply": ["no"] * len(r.answers),
    },
    "dictionary": lambda r: {"decoder.norm": np.linalg.norm(r.W_dec.numpy(), axis=1)},
    "attribution_graph": lambda r: {
        "node.id": [node.id for node in r.pruned().nodes],
        "link.weight": [link.weight for link in r.pruned().links],
        "replacement": r.replacement,
    },
    "intervene": lambda r: {"true": r.true, "correlation.mean": r.correlation},
    "claim": lambda r: {"promised": [0.7, 0.8, 0.5], "n_pairs": 2},
    "verify": lambda r: {
        "status": "fails",
        "test.measured": [0.5, None],
        "test.status": ["fails", "holds"],
    },
    "compare_models": lambda r: {
        **effect(r.kl, "kl"),
        **effect(r.controls["kl"]["random"], "kl.random"),
    },
    "weights of compare_models": lambda r: {
        "weight.name": ["blocks.2.mlp.output.weight"],
        "weight.relative": [0.3],
        "layer.difference": [r.layers[0].difference],
    },
    "lens of compare_models": lambda r: {"size": np.linalg.norm(r.vectors.numpy(), axis=-1)},
    "difference_of_means": lambda r: {"length": [v.norm() for v in r.vectors.values()]},
    "erasure": lambda r: {"rank": [1] * 4},
    "steering_curve": lambda r: {**effect(r.score, "score"), **effect(r.kl, "kl")},
    "svd_targets": lambda r: {"pattern.size": [1, 4, 4, 9, 9]},
    "svd": lambda r: {"s": [[3, 2]], "rank": [2]},
    "ov_circuit": lambda r: {"norm": np.linalg.norm(r.form().numpy(), axis=(-2, -1))},
    "singular_tokens": lambda r: {"read": r.read, "written_scores": r.written_scores},
    "steps": lambda r: {"words": ["One.", " Two.", " Three."], "start": [0, 4, 9]},
    "resampled": lambda r: {"same": r.same, "effects.low": r.low},
    "plan": lambda r: {"tokens": 9, "bytes": 9 * (128 + 4) * 4},
    "statistics": lambda r: {
        "blocks.1.mlp_out.n": 9,
        "blocks.1.mlp_out.mean": s_mean(),
    },
    "circuit_auroc": lambda r: {"value": r},
    "a tensor": lambda r: {"value": [[1.0, None], [None, 2.0]]},
    "probe": lambda r: {**effect(r.auroc, "auroc"), **effect(r.control, "control")},
    "sparse_probes": lambda r: {
        **effect(r.auroc, "auroc"),
        "features": [*map(list, r.features.values())],
    },
}


def s_mean():
    """Return the mean of the point that `statistics` reads, from a run."""
    value = HookedRunner(pydoc()).capture(TEXT, names="blocks.1.mlp_out")["blocks.1.mlp_out"]
    return value[0].double().mean(0)


@pytest.mark.filterwarnings("ignore:the circuit was found on")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MADE)
def test_the_form_of_a_result_has_its_numbers(name):
    result = MADE[name](shared())
    written = json.dumps(interp.as_json(result), allow_nan=False)
    form = json.loads(written)
    require_schema(form)
    assert form["kind"] == type(result).__name__
    wanted = EXPECTED[name](result)
    assert wanted
    for table, values in wanted.items():
        same(form["tables"][table]["values"], values, table)
    assert len(repr(result).splitlines()) < 40 or isinstance(result, dict)


def same(values, expected, name):
    """Compare numbers or texts of JSON with others. Null is a number that is not finite."""
    if isinstance(expected, torch.Tensor):
        expected = expected.detach().numpy()
    try:
        found, wanted = np.array(values, dtype=float), np.array(expected, dtype=float)
    except (TypeError, ValueError):
        assert values == json.loads(json.dumps(expected)), name
    else:
        wanted[~np.isfinite(wanted)] = np.nan
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7, err_msg=name)


def test_the_store_of_a_harvest_has_the_form(tmp_path):
    store = harvest(pydoc(), [TEXT], "blocks.1.mlp_out", tmp_path)
    form = json.loads(json.dumps(store.as_json(), allow_nan=False))
    require_schema(form)
    assert form["tables"]["n_rows"]["values"] == 9


# Functions whose results are no tables: they load or change a model, or return a function, an edit,
# a picture, or an iterator.
NO_TABLES = {
    *("accuracy", "cross_entropy", "kl_divergence", "log_prob", "logit_diff", "rank"),
    *("run_with_cache", "splice", "without_adapter", "over_examples", "as_json"),
    *("for_saebench", "member_values", "leace", "neurons", "of_dictionary", "pca", "subspace"),
    *("load_transcoders", "counterfactual"),
}
VERBS = ("interp", "interp.features", "interp.directions", "interp.alignment", "interp.spectral")
VERBS += ("interp.store", "interp.diffing", "interp.attribution_graphs")
# Tensors, numbers and collections have the form of `interp.as_json`.
PLAIN = (float, int, str, dict, tuple)


def test_every_verb_returns_something_with_the_form():
    seen = 0
    for module in map(pytest.importorskip, VERBS):
        for name in module.__all__:
            verb = getattr(module, name)
            if not inspect.isfunction(verb) or name in NO_TABLES:
                continue
            returned = inspect.signature(verb).return_annotation
            kind = getattr(returned, "__origin__", returned)
            is_tensor = getattr(returned, "array_type", None) is torch.Tensor
            is_plain = isinstance(kind, type) and issubclass(kind, PLAIN)
            assert is_tensor or is_plain or hasattr(kind, "as_json") or is_mapping(kind), name
            seen += 1
    assert seen > 60


def is_mapping(kind):
    """Return True for an annotation such as `Mapping[str, SVD]`."""
    return "Mapping" in str(kind)


def subclasses(kind):
    """Yield all subclasses of a class."""
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def test_everything_with_a_picture_has_the_form(tmp_path):
    for module in VERBS:
        importlib.import_module(module)
    kinds = {kind for kind in subclasses(Shown) if kind.__module__.startswith("interp")}
    assert len(kinds) > 20
    for kind in kinds:
        assert kind.as_json is not Shown.as_json, kind
    path = tmp_path / "circuit.json"
    shared().circuit.save(path)
    assert json.loads(path.read_text()) == shared().circuit.as_json()


def test_intervals_without_an_end_and_unknown_numbers_are_null():
    result = Result(torch.tensor([[1.0, 2.0]]), ("layer", "example"), labels={"layer": [7]})
    tables = result.as_json()["tables"]
    assert tables["effect.low"]["values"] == [None]  # two examples have no interval
    assert tables["effect.mean"] == {
        "axes": ["layer"],
        "labels": {"layer": [7]},
        "unit": "",
        "values": [1.5],
    }


def test_wrong_tables_are_named():
    with pytest.raises(ValueError, match=r"table 'x' of A: values must have the axes \['head'\]"):
        json_form.form("A", {"x": json_form.Table(torch.zeros(2, 3), "head")})
    with pytest.raises(ValueError, match=r"axis 'head' must have 2 labels; got 3"):
        json_form.form("A", {"x": json_form.Table([1, 2], "head", labels={"head": "abc"})})
    with pytest.raises(TypeError, match="got a Linear"):
        interp.as_json(nn.Linear(2, 3))
    with pytest.raises(ValueError, match="read_by"):
        Pairs(TEXT, OTHER, ("1", "4")).as_json()
