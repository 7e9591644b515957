"""The JSON form: one schema for all results, with the numbers of the objects."""

import copy
import functools
import inspect
import json
import math
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import interp
from hooks import HookedRunner
from interp import Pairs, Result, json_form
from interp.alignment import align, null_spaces
from interp.claims import Test, Verdict
from interp.claims.claim import Claim
from interp.diffing import compare_models
from interp.directions import difference_of_means, erasure, probe, sparse_probes, steering_curve
from interp.features import (
    Crosscoder,
    crosscoder_cards,
    evaluate_sae,
    feature_cards,
    latent_scaling,
    load_sae,
    load_transcoders,
    score_explanation,
)
from interp.graph import Graph, circuits
from interp.plots import Shown
from interp.spectral import svd
from interp.store import harvest, plan, statistics
from tests.interp.json_schema import require_schema
from tests.shipped import pydoc

TEXT, OTHER = "KV81; KV8", "KV84; KV8"
NUMBERS = [f"part AB{number}" for number in range(6)]
WORDS = [f"part {word}" for word in "one two ten six all new".split()]


@functools.cache
def shared():
    """Return what several results need: pairs, a cache, a graph with scores, and dictionaries."""
    model = pydoc()
    pairs = Pairs([TEXT, f"a{TEXT}"], [OTHER, f"a{OTHER}"], ("1", "4")).read_by(model)
    _, cache = HookedRunner(model).run_with_cache(TEXT, lazy=True)
    scores = interp.edge_attribution(model, pairs)
    graph = Graph(model)
    return SimpleNamespace(
        model=model,
        pairs=pairs,
        cache=cache,
        graph=graph,
        scores=scores,
        circuit=circuits.top(graph, scores, 10),
        sae=load_sae("pydoc-4l/resid_post"),
    )


def tiny_crosscoder():
    """Return a crosscoder of two members and two features. Member a lacks the second feature."""
    eye, one = torch.eye(2), torch.eye(2) * torch.tensor([1.0, 0.0])
    zeros = torch.zeros(2)
    coded = [torch.stack([0 * eye, eye]), torch.stack([one, eye]), zeros, torch.zeros(2, 2)]
    return Crosscoder(*coded, nn.ReLU(), names=["a", "b"])


def aligned(s):
    """Return an alignment of a few steps."""
    texts = ([f"KV{n}1; KV{n}" for n in range(4)], [f"KV{n}4; KV{n}" for n in range(4)])
    pairs = Pairs(*texts, ("1", "4")).read_by(s.model)
    return align(s.model, pairs[:2], k=2, test=pairs[2:], layers=2, epochs=1)


@functools.cache
def traced():
    """Return an attribution graph of a short text."""
    transcoders = load_transcoders("pydoc-4l/transcoders")
    return interp.attribution_graph(pydoc(), TEXT, transcoders, targets=2, max_features=12)


@functools.cache
def changed():
    """Return the differences between the model and a copy with one changed matrix."""
    tuned = copy.deepcopy(pydoc())
    with torch.no_grad():
        tuned.blocks[2].mlp.output.weight.mul_(1.3)
    return compare_models(tuned, pydoc(), [TEXT, OTHER])


def effect(result, name="effect"):
    """Return the tables of a result, computed by numpy."""
    values = result.values.detach().numpy()
    tables = {name: values, f"{name}.mean": values.mean(-1)}
    if result.base is not None:
        tables[f"{name}.base"] = result.base.numpy()
    return tables


# For each result: a function that makes it, and a function from it to some of its tables.
RESULTS = {
    "activation_patching": (
        lambda s: interp.activation_patching(s.model, s.pairs, "z"),
        effect,
    ),
    "normalized": (
        lambda s: interp.activation_patching(s.model, s.pairs, "z").normalized(),
        effect,
    ),
    "edge_attribution": (lambda s: s.scores, effect),
    "logit_lens": (
        lambda s: interp.logit_lens(s.model, s.cache),
        lambda r: {"tokens": r.tokens, "kl": r.kl, "probabilities": r.probabilities},
    ),
    "decompose": (
        lambda s: interp.decompose(s.model, s.cache),
        lambda r: {"norm": np.linalg.norm(r.values.numpy(), axis=-1)},
    ),
    "composition_scores": (lambda s: interp.composition_scores(s.model, "K", draws=2), effect),
    "max_activating": (
        lambda s: interp.max_activating(s.model, [TEXT], "blocks.1.mlp_out", k=3),
        lambda r: {"place.value": [place.value for place in r], "place.pos": [p.pos for p in r]},
    ),
    "tuned_lens": (
        lambda s: interp.tuned_lens(s.model, [TEXT, OTHER], steps=2),
        lambda r: {"losses": r.losses, "rows": r.rows},
    ),
    "jacobian_lens": (
        lambda s: interp.jacobian_lens(s.model, [TEXT[:2], OTHER[3:6]], skip=0),
        lambda r: {"error": r.error, "n_texts": 2},
    ),
    "compare_effects": (
        lambda s: interp.compare_effects(s.scores, s.scores),
        lambda r: {"exact": r.exact, "rank_correlation": 1.0},
    ),
    "circuit_curve": (
        lambda s: interp.circuit_curve(s.model, s.pairs, s.graph, s.scores, shares=[0.1, 0.5]),
        lambda r: {**effect(r.random, "random"), "cpr.value": r.cpr.value},
    ),
    "patch_top_k": (
        lambda s: interp.patch_top_k(
            s.model, s.pairs, estimate=interp.attribution_patching(s.model, s.pairs, "z"), k=2
        ),
        lambda r: {**effect(r.top, "top"), "n_outside": 14},
    ),
    "circuit": (
        lambda s: s.circuit,
        lambda r: {"edge.name": [*r], "edge.score": r.scores[r.kept], "n_edges": 479},
    ),
    "acdc": (
        lambda s: interp.acdc(s.model, s.pairs[:1], 2.0),
        lambda r: {"2.0.edge.name": [*r[2.0]]},
    ),
    "faithfulness": (lambda s: interp.faithfulness(s.model, s.pairs, s.circuit), effect),
    "pairs": (lambda s: s.pairs, lambda r: {"clean": r.text.listed()}),
    "align": (
        aligned,
        lambda r: {**effect(r.accuracy, "accuracy"), "losses": [*r.losses.values()]},
    ),
    "null_spaces": (
        lambda s: null_spaces(s.model, s.pairs, "blocks.2.resid_post", torch.eye(128)[0]),
        lambda r: {**effect(r.effects, "effects"), "dormant": r.dormant},
    ),
    "evaluate_circuit": (
        lambda s: interp.evaluate_circuit(s.model, s.pairs, s.circuit),
        lambda r: {
            **effect(r.faithfulness, "faithfulness"),
            **effect(r.completeness, "completeness"),
            **effect(r.minimality, "minimality"),
        },
    ),
    "evaluate_sae": (
        lambda s: evaluate_sae(s.model, s.sae, [TEXT, OTHER]),
        lambda r: {
            "losses": r.losses,
            "losses.mean": r.losses.mean(1),
            "kl": r.kl[None],
            "point.l0": [r.points["blocks.2.resid_post"].l0],
            "density.blocks.2.resid_post": r.points["blocks.2.resid_post"].density,
        },
    ),
    "feature_cards": (
        lambda s: feature_cards(s.model, s.sae, [TEXT], [5, 332], k=2),
        lambda r: {"feature.index": [5, 332], "feature.density": [card.density for card in r]},
    ),
    "crosscoder": (
        lambda s: tiny_crosscoder(),
        lambda r: {"decoder.norm": [[1, 0], [1, 1]]},
    ),
    "crosscoder_cards": (
        lambda s: crosscoder_cards(
            [s.model, s.model],
            Crosscoder(
                *[torch.stack([torch.eye(128)] * 2)] * 2,
                torch.zeros(128),
                torch.zeros(2, 128),
                nn.ReLU(),
            ),
            [TEXT],
            [3],
            0,
            point="blocks.2.resid_post",
        ),
        lambda r: {"feature.largest": [r[0].largest]},
    ),
    "latent_scaling": (
        lambda s: latent_scaling(tiny_crosscoder(), [[torch.eye(2), torch.eye(2)]], "b"),
        lambda r: {"betas": r.betas, "nu.error": r.betas[0, 1] / r.betas[0, 0]},
    ),
    "score_explanation": (
        lambda s: score_explanation(s.model, s.sae, 332, "x", [TEXT, OTHER], lambda p: "no", n=2),
        lambda r: {
            "score.value": [score.value for *_, score in r._rows()],
            "answer.reply": ["no"] * len(r.answers),
        },
    ),
    "dictionary": (
        lambda s: s.sae,
        lambda r: {"decoder.norm": np.linalg.norm(r.W_dec.numpy(), axis=1)},
    ),
    "attribution_graph": (
        lambda s: traced(),
        lambda r: {
            "node.id": [node.id for node in r.pruned().nodes],
            "link.weight": [link.weight for link in r.pruned().links],
            "replacement": r.replacement,
        },
    ),
    "intervene": (
        lambda s: traced().intervene({traced().nodes[0].id: 0.0}),
        lambda r: {"true": r.true, "correlation.mean": r.correlation},
    ),
    "claim": (
        lambda s: Claim.circuit(s.model, s.pairs, s.circuit, "x", faithful=0.7),
        lambda r: {"promised": [0.7, 0.8, 0.5], "n_pairs": 2},
    ),
    "verify": (
        lambda s: Verdict(
            "x", {"base": "3"}, (Test("a", "fails", measured=0.5), Test("b", "holds"))
        ),
        lambda r: {
            "status": "fails",
            "test.measured": [0.5, None],
            "test.status": ["fails", "holds"],
        },
    ),
    "compare_models": (
        lambda s: changed(),
        lambda r: {**effect(r.kl, "kl"), **effect(r.controls["kl"]["random"], "kl.random")},
    ),
    "weights of compare_models": (
        lambda s: changed().top(1),
        lambda r: {
            "weight.name": ["blocks.2.mlp.output.weight"],
            "weight.relative": [0.3],
            "layer.difference": [r.layers[0].difference],
        },
    ),
    "lens of compare_models": (
        lambda s: changed().lens(-1, draws=1),
        lambda r: {"size": np.linalg.norm(r.vectors.numpy(), axis=-1)},
    ),
    "difference_of_means": (
        lambda s: difference_of_means(s.model, (NUMBERS, WORDS)),
        lambda r: {"length": [v.norm() for v in r.vectors.values()]},
    ),
    "erasure": (lambda s: erasure(s.model, (NUMBERS, WORDS)), lambda r: {"rank": [1] * 4}),
    "steering_curve": (
        lambda s: steering_curve(
            s.model,
            difference_of_means(s.model, (NUMBERS, WORDS)),
            [TEXT],
            [0.0, 1.0],
            interp.log_prob("1"),
            others=["def f(", "import"],
        ),
        lambda r: {**effect(r.score, "score"), **effect(r.kl, "kl")},
    ),
    "svd_targets": (
        lambda s: interp.svd_targets(s.model, s.cache),
        lambda r: {"pattern.size": [1, 4, 4, 9, 9]},
    ),
    "svd": (
        lambda s: svd(torch.tensor([[[3.0, 0.0], [0.0, 2.0]]])),
        lambda r: {"s": [[3, 2]], "rank": [2]},
    ),
    "ov_circuit": (
        lambda s: interp.ov_circuit(s.model),
        lambda r: {"norm": np.linalg.norm(r.form().numpy(), axis=(-2, -1))},
    ),
    "singular_tokens": (
        lambda s: interp.singular_tokens(s.model, 0, 1, k=2, top=3),
        lambda r: {"read": r.read, "written_scores": r.written_scores},
    ),
    "steps": (
        lambda s: interp.Steps(s.model, "One. Two.", " Three."),
        lambda r: {"words": ["One.", " Two.", " Three."], "start": [0, 4, 9]},
    ),
    "resampled": (
        lambda s: interp.resampled(
            s.model,
            interp.Steps(s.model, "One.", " It is 3."),
            n=2,
            max_new_tokens=4,
            threshold=1.0,
        ),
        lambda r: {"same": r.same, "effects.low": r.low},
    ),
    "plan": (
        lambda s: plan(s.model, [TEXT], "blocks.1.mlp_out"),
        lambda r: {"tokens": 9, "bytes": 9 * (128 + 4) * 4},
    ),
    "statistics": (
        lambda s: statistics(s.model, [TEXT], "blocks.1.mlp_out"),
        lambda r: {
            "blocks.1.mlp_out.n": 9,
            "blocks.1.mlp_out.mean": s_mean(),
        },
    ),
    "circuit_auroc": (
        lambda s: interp.circuit_auroc(s.scores, s.circuit),
        lambda r: {"value": r},
    ),
    "a tensor": (
        lambda s: torch.tensor([[1.0, math.inf], [math.nan, 2.0]]),
        lambda r: {"value": [[1.0, None], [None, 2.0]]},
    ),
}
NEEDS_SKLEARN = {
    "probe": (
        lambda s: probe(s.model, (NUMBERS, WORDS), folds=3, draws=1),
        lambda r: {**effect(r.auroc, "auroc"), **effect(r.control, "control")},
    ),
    "sparse_probes": (
        lambda s: sparse_probes(s.model, s.sae, (NUMBERS, WORDS), (1, 2), folds=3, draws=1),
        lambda r: {**effect(r.auroc, "auroc"), "features": [*map(list, r.features.values())]},
    ),
}
if find_spec("sklearn"):
    RESULTS |= NEEDS_SKLEARN


def s_mean():
    """Return the mean of the point that `statistics` reads, from a run."""
    value = HookedRunner(pydoc()).capture(TEXT, names="blocks.1.mlp_out")["blocks.1.mlp_out"]
    return value[0].double().mean(0)


@pytest.mark.filterwarnings("ignore:the circuit was found on")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RESULTS)
def test_the_form_of_a_result_has_its_numbers(name):
    make, expected = RESULTS[name]
    result = make(shared())
    written = json.dumps(interp.as_json(result), allow_nan=False)
    form = json.loads(written)
    require_schema(form)
    assert form["kind"] == type(result).__name__
    wanted = expected(result)
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
        pytest.importorskip(module)
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
