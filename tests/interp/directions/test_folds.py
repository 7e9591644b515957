"""Folds of probes: texts of one group are in one fold, as in scikit-learn's GroupKFold."""

import dataclasses

import numpy as np
import pytest
import torch

from interp.directions import Contrast, probe, sparse_probes
from interp.features import Dictionary
from interp.store import HarvestConfig, harvest
from tests.interp.directions.lookup import embedded
from tests.shipped import pydoc

pytest.importorskip("sklearn", reason="needs the extra probes")

# Texts 0 to 6 are of kind yes, and texts 7 to 12 are of kind no. The groups have different sizes.
# Group "d" has no text of kind yes.
GROUPS = [*"abcabea", *"dcbeda"]


def tokens(first, stop):
    """Return texts of one token each."""
    return torch.arange(first, stop)[:, None]


def shifted(n, n_yes, seed, by=0.8):
    """Return random values in which the first `n_yes` rows are shifted."""
    torch.manual_seed(seed)
    return torch.randn(n, 3) + by * (torch.arange(n) < n_yes)[:, None]


def aurocs_by_hand(values, labels, folds):
    """Return the AUROC of each fold, a list of held-out rows, of scikit-learn's classifier."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x = values.double().numpy()
    scores = []
    for held_out in folds:
        is_held_out = np.isin(np.arange(len(x)), held_out)
        fit = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        fit.fit(x[~is_held_out], labels[~is_held_out])
        strength = fit.decision_function(x[is_held_out])
        scores.append(roc_auc_score(labels[is_held_out], strength))
    return scores


def test_pairs_in_one_fold_show_what_pairs_in_two_folds_hide():
    """The texts of a pair have nearly the same values, and a small part shows the kind.

    If one text of a pair is held out and the other is not, the fit learns the wrong label for the
    values that both share.
    """
    torch.manual_seed(0)
    shared = torch.randn(6, 40)
    shared[:, 0] = 0
    kind = 0.8 * torch.eye(40)[0]
    model = embedded(torch.cat([shared + kind, shared - kind]))
    yes, no = tokens(0, 6), tokens(6, 12)
    alone = probe(model, (yes, no), "1", folds=3)
    pairs = probe(model, Contrast(yes, no, groups="pairs"), "1", folds=3)
    assert float(alone.auroc.mean()) < 0.3
    assert float(pairs.auroc.mean()) == 1
    assert "groups='pairs'" in repr(alone)
    assert "groups='pairs'" in repr(alone.top(2)).splitlines()[-1]
    assert len(alone.top(2)) == len(repr(alone.top(2)).splitlines()) - 1
    assert "groups" not in repr(pairs)
    assert pairs.auroc.counts == alone.auroc.counts == (2, 2)
    assert 0.2 < float(pairs.control.mean()) < 0.8
    listed = probe(model, Contrast(yes, no, groups=[*range(6), *range(6)]), "1", folds=3)
    assert torch.equal(listed.auroc.values, pairs.auroc.values)
    assert torch.equal(listed.control.values, pairs.control.values)


def test_one_group_in_each_fold_matches_scikit_learn():
    """With as many folds as groups, there is only one split, up to the order of the folds."""
    from sklearn.model_selection import GroupKFold

    groups = np.array([*"abcdabcd", *"abccdab"])
    values, labels = shifted(15, 8, seed=1), np.arange(15) < 8
    contrast = Contrast(tokens(0, 8), tokens(8, 15), groups=groups)
    found = probe(embedded(values), contrast, "1", folds=4)
    splits = GroupKFold(4).split(values, labels, groups)
    expected = aurocs_by_hand(values, labels, [held_out for _, held_out in splits])
    np.testing.assert_allclose(np.sort(found.auroc.values[0]), np.sort(expected))
    assert found.auroc.counts == (1, 1)


@pytest.mark.parametrize("kind", ["logistic", "linear"])
@pytest.mark.parametrize("seed", range(5))
def test_texts_with_equal_values_are_ties(seed, kind):
    """Texts of both kinds have the same values, as at `embed` if they end with the same word.

    A product of the values may round equal rows differently. The reference is exact: it scores each
    different value once.
    """
    linear = pytest.importorskip("sklearn.linear_model", reason="needs the extra probes")
    from sklearn.metrics import roc_auc_score

    draw = torch.Generator().manual_seed(seed)
    words = torch.randn(3, 16, generator=draw)
    numbers = torch.randint(3, (40,), generator=draw).numpy()
    labels, groups = np.arange(40) < 20, np.array([n // 5 for n in range(20)] * 2)
    contrast = Contrast(tokens(0, 20), tokens(20, 40), groups=[*groups])
    options = dict(kind=kind, folds=4, draws=1)
    found = probe(embedded(words[torch.from_numpy(numbers)]), contrast, "1", **options)
    exact, expected = words.double().numpy(), []
    for group in range(4):
        out = groups == group
        x = exact[numbers]
        mean, spread = x[~out].mean(0), x[~out].std(0)
        if kind == "logistic":
            fit = linear.LogisticRegression(max_iter=1000).fit(
                (x - mean)[~out] / spread, labels[~out]
            )
        else:
            fit = linear.Ridge(1).fit((x - mean)[~out] / spread, 2 * labels[~out] - 1)
        of_word = np.round((exact - mean) / spread @ fit.coef_.ravel(), 9)
        expected.append(roc_auc_score(labels[out], of_word[numbers[out]]))
    np.testing.assert_allclose(np.sort(found.auroc.values[0]), np.sort(expected), atol=1e-6)


def test_folds_of_groups_are_drawn_from_the_seed():
    """The folds are made by hand: groups with both kinds first, then the others."""
    values, labels = shifted(13, 7, seed=2), np.arange(13) < 7
    contrast = Contrast(tokens(0, 7), tokens(7, 13), groups=GROUPS)
    found = probe(embedded(values), contrast, "1", folds=2, seed=5)
    draw = torch.Generator().manual_seed(5)
    # Groups are numbered in the order of their first texts. Only group d, number 4, has one kind.
    order = torch.randperm(4, generator=draw).tolist()
    fold_of = {"abce"[group]: n % 2 for n, group in enumerate(order)}
    torch.randperm(1, generator=draw)
    fold_of["d"] = 0
    folds = [[n for n, group in enumerate(GROUPS) if fold_of[group] == fold] for fold in (0, 1)]
    np.testing.assert_allclose(found.auroc.values[0], aurocs_by_hand(values, labels, folds))
    small = dataclasses.replace(contrast, batch=2)
    in_batches = probe(embedded(values), small, "1", folds=2, seed=5)
    assert torch.equal(in_batches.auroc.values, found.auroc.values)
    # Four groups have a text of kind yes, and five groups have a text of kind no.
    assert found.auroc.counts == (4 / 2, 5 / 2)


def test_each_text_is_a_group_by_default():
    model, yes, no = embedded(shifted(23, 12, seed=3)), tokens(0, 12), tokens(12, 23)
    alone = probe(model, (yes, no), "1")
    groups = torch.randperm(23)
    listed = probe(model, Contrast(yes, no, groups=groups), "1")
    assert torch.equal(listed.auroc.values, alone.auroc.values)
    assert torch.equal(listed.control.values, alone.control.values)
    assert listed.auroc.counts == alone.auroc.counts


def test_groups_that_share_copies_of_a_text_are_one_group():
    """Tokens 2 and 9 are in two groups each. So groups 0, 1 and 2 are one group."""
    yes, no = torch.tensor([[0], [2], [2], [3], [4]]), torch.tensor([[5], [9], [9], [7], [8]])
    groups = [0, 0, 1, 3, 4, 0, 1, 2, 3, 4]
    values = shifted(10, 5, seed=4)
    found = probe(embedded(values), Contrast(yes, no, groups=groups), "1", folds=3)
    assert found.auroc.counts == (1, 1)
    whole = probe(
        embedded(values), Contrast(yes, no, groups=[0, 0, 0, 3, 4, 0, 0, 0, 3, 4]), "1", folds=3
    )
    assert torch.equal(found.auroc.values, whole.auroc.values)
    with pytest.raises(ValueError, match=r"groups of texts, of each kind \(3 and 3\); got 4"):
        probe(embedded(values), Contrast(yes, no, groups=groups), "1", folds=4)


def test_groups_of_stores_match_groups_of_lists(tmp_path):
    """A text without a row in the store has a group, too."""
    model, name = pydoc(), "blocks.1.resid_post"
    draw = np.random.default_rng(0)
    yes, no = (["".join(draw.choice([*"abcdefgh"], 6)) for _ in range(9)] for _ in range(2))
    # The stores have no row of these two texts.
    yes[1], no[4] = "x", "y"
    groups = [*"abcdeabcd", *"fgchfadeb"]
    config = HarvestConfig(pos=slice(1, None), per_file=4)
    stores = [harvest(model, texts, name, tmp_path / texts[0], config) for texts in (yes, no)]
    order = draw.permutation(18).tolist()
    texts, labels = [(yes + no)[n] for n in order], [n < 9 for n in order]
    store = harvest(model, texts, name, tmp_path / "both", config)

    def aurocs(*kinds, **settings):
        return probe(model, Contrast(*kinds, **settings), name, folds=3, draws=1).auroc

    two = aurocs(*stores, groups=groups)
    of_kept = groups[:1] + groups[2:13] + groups[14:]
    expected = aurocs(yes[:1] + yes[2:], no[:4] + no[5:], groups=of_kept)
    torch.testing.assert_close(two.values, expected.values)
    assert two.counts == expected.counts == (5 / 3, 8 / 3)
    # The store with both kinds has the kept texts of a kind in another order, and so other folds.
    of_store = [groups[n] for n in order]
    one = aurocs(store, labels=labels, groups=of_store)
    by_kind = [[n for n in order if (n < 9) == label] for label in (True, False)]
    lists = [[(yes + no)[n] for n in kind if n not in (1, 13)] for kind in by_kind]
    of_lists = [groups[n] for kind in by_kind for n in kind if n not in (1, 13)]
    torch.testing.assert_close(one.values, aurocs(*lists, groups=of_lists).values)
    # Text n of one store belongs to text n of the other. Texts without a row count.
    pairs = aurocs(*stores, groups="pairs")
    assert torch.equal(pairs.values, aurocs(*stores, groups=[*range(9)] * 2).values)
    assert pairs.counts == (8 / 3, 8 / 3)


def test_sparse_probes_keep_groups_in_one_fold():
    torch.manual_seed(0)
    shared = torch.rand(6, 7)
    shared[:, 3] = 0.0
    kind = 0.5 * torch.eye(7)[3]
    values = torch.cat([shared + kind, shared])
    dictionary = Dictionary(
        torch.eye(7),
        torch.eye(7),
        torch.zeros(7),
        torch.zeros(7),
        torch.nn.ReLU(),
        reads="1",
        writes="1",
    )
    contrast = Contrast(tokens(0, 6), tokens(6, 12), groups="pairs")
    found = sparse_probes(embedded(values), dictionary, contrast, k=(1, 7), folds=3)
    assert found.auroc.mean().tolist() == [1, 1]
    assert found.features[1][0][0] == 3


def test_groups_that_do_not_fit_are_refused():
    model, yes, no = embedded(shifted(10, 5, seed=0)), tokens(0, 5), tokens(5, 10)
    wrong = {
        r"\(2 and 2\); got 3": ([0, 0, 0, 1, 1] * 2, no),
        "one for each of 10 texts .5 of yes and 5 of no.; got 9": ([0] * 9, no),
        "equally many texts with groups='pairs'; got 5 and 4": ("pairs", no[:4]),
    }
    for match, (groups, others) in wrong.items():
        with pytest.raises(ValueError, match=match):
            probe(model, Contrast(yes, others, groups=groups), "1", folds=3)
    for groups in ("pair", 3):
        with pytest.raises(TypeError, match=f"groups must .*'pairs'; got .*{groups}"):
            Contrast(yes, no, groups=groups)
