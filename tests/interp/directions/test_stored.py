"""Directions from stores, compared with the same texts without a store, numpy and scikit-learn."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from hooks import CacheError, HookedRunner, SelectionError, UnknownNameError
from interp.directions import Contrast, difference_of_means, erasure, probe
from interp.store import HarvestConfig, harvest
from tests.shipped import pydoc

NAMES = ["blocks.1.resid_post", "blocks.3.resid_post", "blocks.2.attn.z"]


@pytest.fixture(scope="module")
def model():
    return copy.deepcopy(pydoc()).double()


def letters(count, seed, first=5):
    """Return texts of random letters with 5 to 11 letters, or with other lengths from `first`
    on.
    """
    draw = np.random.default_rng(seed)
    lengths = first + np.arange(count) % 7
    return ["".join(draw.choice([*"abcdefgh"], length)) for length in lengths]


YES, NO = letters(13, 0), letters(11, 1)
OWN = [[-1], [0, 2], [4], [1, -2], [3]]
POSITIONS = {
    "last": -1,
    "all": None,
    "listed": [2, 0, -1],
    "slice": slice(1, -1),
    "of each": [OWN[n % 5] for n in range(len(YES) + len(NO))],
}


def stored(model, texts, folder, **options):
    return harvest(
        model, texts, NAMES, folder, HarvestConfig(batch=3, **{"per_file": 5, **options})
    )


def mixed(seed=2):
    """Return the texts of both kinds in a random order, and their labels."""
    order = np.random.default_rng(seed).permutation(len(YES) + len(NO))
    return [(YES + NO)[n] for n in order], [bool(n < len(YES)) for n in order]


def by_kind(texts, labels):
    pairs = [*zip(texts, labels, strict=True)]
    return [t for t, label in pairs if label], [t for t, label in pairs if not label]


@pytest.mark.parametrize("pos", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("how", ["two", "labels"])
def test_stores_give_the_results_of_their_texts(model, tmp_path, how, pos):
    pytest.importorskip("sklearn", reason="needs the extra probes")
    if how == "two":
        kinds, wheres = (YES, NO), pos
        stores = [stored(model, t, tmp_path / name) for t, name in ((YES, "a"), (NO, "b"))]
        given = Contrast(*stores, pos=pos, batch=2)
    else:
        texts, labels = mixed()
        kinds = by_kind(texts, labels)
        store, wheres = stored(model, texts, tmp_path), pos
        given = Contrast(store, labels=labels, pos=pos, batch=2)
        if pos is POSITIONS["of each"]:
            wheres = [
                part
                for flag in (True, False)
                for part, label in zip(pos, labels, strict=True)
                if label == flag
            ]
    sites = ["resid_post", "blocks.2.attn.z"]
    names = [NAMES[0], NAMES[1], NAMES[2]]
    v = difference_of_means(model, given, site=sites)
    expected = difference_of_means(model, Contrast(*kinds, pos=wheres), names)
    assert (v.about["rows"], v.about["yes"]) == (expected.about["rows"], expected.about["yes"])
    assert [*v.vectors] == names
    erased = erasure(model, dataclasses.replace(given, batch=4), site=sites).erasers
    others = erasure(model, Contrast(*kinds, pos=wheres), names).erasers
    for name in names:
        torch.testing.assert_close(v[name], expected[name])
        value = torch.randn(3, 128, dtype=torch.float64)
        torch.testing.assert_close(erased[name](value), others[name](value), atol=1e-5, rtol=1e-4)
    more = {"kind": "logistic" if pos == -1 else "linear", "folds": 3, "draws": 1}
    found = probe(model, given, site=sites[1:], **more)
    wanted = probe(model, Contrast(*kinds, pos=wheres), names[2], **more)
    # Rounding may change the order of two examples, and with it the AUROC a little.
    for one, other in ((found.auroc, wanted.auroc), (found.control, wanted.control)):
        torch.testing.assert_close(one.values, other.values, atol=0.02, rtol=0)
    assert found.auroc.counts == wanted.auroc.counts
    torch.testing.assert_close(
        found.direction[names[2]], wanted.direction[names[2]], atol=1e-4, rtol=1e-3
    )


def test_a_probe_of_a_store_is_fitted_as_by_scikit_learn(model, tmp_path):
    linear = pytest.importorskip("sklearn.linear_model", reason="needs the extra probes")
    texts, labels = mixed()
    store = stored(model, texts, tmp_path)
    truth = torch.tensor(labels)
    found = probe(model, Contrast(store, labels=truth), site=NAMES[0], folds=2, draws=1)
    runner = HookedRunner(model)
    rows = [runner.run_with_cache(text)[1][NAMES[0]][0, -1].numpy() for text in texts]
    scaled = (np.stack(rows) - np.mean(rows, 0)) / np.std(rows, 0)
    made = linear.LogisticRegression(max_iter=1000).fit(scaled, truth.numpy())
    by_hand = made.coef_[0] / np.std(rows, 0)
    np.testing.assert_allclose(
        found.direction[NAMES[0]], by_hand, atol=0.02 * float(abs(by_hand).max())
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pos": -1},
        {"pos": -1, "dtype": torch.float16},
        {"pos": slice(1, None)},
        {"pool": "mean"},
        {"pack": True, "context": 512},
    ],
    ids=str,
)
def test_copies_in_a_store_share_a_fold(model, tmp_path, options):
    """Random letters carry no information, for any number of copies of each text."""
    pytest.importorskip("sklearn", reason="needs the extra probes")
    yes, no = letters(12, 3), letters(12, 4)
    # All texts end with the same token, so the last token carries no information.
    yes, no = ([f"{text}." for text in texts] for texts in (yes, no))
    copies = [*yes, *reversed(yes), *yes, *no, *reversed(no), *no]
    labels = [n < 36 for n in range(72)]
    store = stored(model, copies, tmp_path, per_file=11, **options)
    found = probe(model, Contrast(store, labels=labels), site=NAMES[1], folds=4)
    assert found.auroc.counts == (3, 3)
    assert found.auroc.values.mean() < 0.85
    assert found.direction.about["rows"] == 72


def test_places_are_places_of_the_text(model, tmp_path):
    """If a store does not contain the first tokens, the positions still count from the start of the
    text.
    """
    kept = [stored(model, t, tmp_path / n, pos=slice(2, None)) for t, n in ((YES, "a"), (NO, "b"))]
    for pos in (2, 3, -1, [-3, 4]):
        v = difference_of_means(model, Contrast(*kept, pos=pos), NAMES[0])
        expected = difference_of_means(model, Contrast(YES, NO, pos=pos), NAMES[0])
        torch.testing.assert_close(v[NAMES[0]], expected[NAMES[0]])
    every = difference_of_means(model, Contrast(*kept, pos=None), NAMES[0])
    expected = difference_of_means(model, Contrast(YES, NO, pos=slice(2, None)), NAMES[0])
    torch.testing.assert_close(every[NAMES[0]], expected[NAMES[0]])
    with pytest.raises(SelectionError, match="got place 1, which has no row"):
        difference_of_means(model, Contrast(*kept, pos=[1, -1]), NAMES[0])
    with pytest.raises(SelectionError, match="got place 0, which has no row"):
        difference_of_means(model, Contrast(*kept, pos=slice(0, 2)), NAMES[0])


def test_texts_without_a_row_are_left_out(model, tmp_path):
    short = ["ab", "c", "de"]
    texts = [YES[0], short[0], *YES[1:], short[1], *NO, short[2]]
    labels = np.array([1, 0, *[1] * 12, 1, *[0] * 11, 1])
    store = stored(model, texts, tmp_path, pos=slice(2, None))
    v = difference_of_means(model, Contrast(store, labels=labels), site=NAMES[0])
    expected = difference_of_means(model, (YES, NO), NAMES[0])
    torch.testing.assert_close(v[NAMES[0]], expected[NAMES[0]])
    pytest.importorskip("sklearn", reason="needs the extra probes")
    assert probe(model, Contrast(store, labels=labels), site=NAMES[0], folds=3).auroc.counts == (
        13 / 3,
        11 / 3,
    )
    with pytest.raises(ValueError, match="yes must have a text with a row"):
        difference_of_means(
            model, Contrast(store, labels=[text in short for text in texts]), site=NAMES[0]
        )


def test_a_pooled_store_has_one_example_of_a_text(model, tmp_path):
    stores = [stored(model, t, tmp_path / n, pool="mean") for t, n in ((YES, "a"), (NO, "b"))]
    v = difference_of_means(model, stores, NAMES[0])
    runner = HookedRunner(model)
    means = [
        np.mean([runner.run_with_cache(t)[1][NAMES[0]][0].numpy().mean(0) for t in texts], 0)
        for texts in (YES, NO)
    ]
    np.testing.assert_allclose(v[NAMES[0]], means[0] - means[1], rtol=1e-4, atol=1e-5)


def test_stores_that_do_not_fit_are_refused(model, tmp_path):
    texts, labels = mixed()
    store = stored(model, texts, tmp_path)
    wrong = {
        "labels must be one for each of 24": {"labels": labels[:-1]},
        "got 2": {"labels": [2, *labels[1:]]},
        "two kinds": {"labels": [True] * 24},
        "no= must be omitted": {"labels": labels, "no": store},
        "no= .* or, for one store, labels= must be given": {},
        "two stores or two lists of texts": {"no": NO},
    }
    for match, options in wrong.items():
        for method in (difference_of_means, erasure, probe):
            with pytest.raises(ValueError, match=match):
                method(model, Contrast(store, **options), site=NAMES[0])
    with pytest.raises(TypeError, match=r"got an Activations.*Contrast\(store, labels=labels\)"):
        probe(model, store, NAMES[0])
    with pytest.raises(ValueError, match="must be a store"):
        probe(model, Contrast(YES, labels=labels), site=NAMES[0])
    with pytest.raises(UnknownNameError, match="mlp_out"):
        difference_of_means(model, Contrast(store, labels=labels), site="mlp_out")
    with pytest.raises(SelectionError, match="'user'"):
        difference_of_means(model, Contrast(store, labels=labels, pos="user"), site=NAMES[0])
    with pytest.raises(SelectionError, match="got 5"):
        difference_of_means(model, Contrast(store, labels=labels, pos=OWN), site=NAMES[0])
    other = copy.deepcopy(model)
    next(other.parameters()).data[0] += 1
    with pytest.raises(CacheError, match="weights"):
        difference_of_means(other, Contrast(store, labels=labels), site=NAMES[0])
