"""Probes of few columns, compared with scikit-learn, and of features of a dictionary."""

import numpy as np
import pytest
import torch
from torch import nn

from interp.directions import probe, sparse_probes
from interp.features import Dictionary
from tests.interp.directions.lookup import embedded
from tests.shipped import pydoc

metrics = pytest.importorskip("sklearn.metrics", reason="needs the extra probes")
linear = pytest.importorskip("sklearn.linear_model")

YES, NO = torch.arange(20)[:, None], torch.arange(20, 40)[:, None]


def values_of_tokens(seed=0):
    """Return a vector for each token. Columns 3 and 1 tell the two kinds apart, 3 better."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(40, 7, generator=draw)
    values[:20, 3] += 2.5
    values[:20, 1] -= 1.5
    return values


@pytest.mark.parametrize("k", [1, 2, 5])
def test_columns_are_chosen_from_the_other_folds(k):
    values = values_of_tokens()
    found = probe(embedded(values), (YES, NO), "1", k=k, folds=4, seed=3)
    # The folds are drawn from the seed as `probe` documents: first the texts of `no`.
    draw, fold = torch.Generator().manual_seed(3), np.zeros(40, int)
    for texts in (np.arange(20, 40), np.arange(20)):
        fold[texts[torch.randperm(20, generator=draw)]] = np.arange(20) % 4
    x, labels = values.double().numpy(), np.arange(40) < 20

    def columns(is_used):
        gaps = abs(x[is_used & labels].mean(0) - x[is_used & ~labels].mean(0))
        return np.argsort(-gaps)[:k]

    for n in range(4):
        train = fold != n
        inside = columns(train)
        mean, spread = x[train][:, inside].mean(0), x[train][:, inside].std(0)
        scaled = (x[:, inside] - mean) / spread
        fit = linear.LogisticRegression(max_iter=1000).fit(scaled[train], labels[train])
        expected = metrics.roc_auc_score(labels[~train], fit.decision_function(scaled[~train]))
        assert found.auroc.values[0, n].item() == pytest.approx(expected)
    used = found.direction["1"].nonzero()[:, 0]
    assert {*used.tolist()} == {*columns(np.ones(40, bool)).tolist()}


def test_a_planted_feature_is_found_among_the_features():
    """The dictionary rotates the values. One of its features is the planted difference."""
    values = values_of_tokens(1)
    draw = torch.Generator().manual_seed(5)
    rotation = torch.linalg.qr(torch.randn(7, 7, generator=draw))[0]
    both = torch.cat([rotation, -rotation], 1)
    zeros = torch.zeros(14), torch.zeros(7)
    dictionary = Dictionary(both, both.mT, *zeros, nn.ReLU(), reads="1", writes="1")
    model = embedded(values @ rotation.mT)
    found = sparse_probes(model, dictionary, (YES, NO), k=(1, 4), folds=4)
    assert [index for index, _ in found.features[1]] == [3]
    assert found.features[1][0][1] > 0
    assert {3, 8} <= {index for index, _ in found.features[4]}
    assert found.auroc.labels["k"] == (1, 4)
    assert found.auroc.mean()[0] > 0.9
    alone = probe(embedded(values[:, 3:4].relu()), (YES, NO), "1", folds=4)
    torch.testing.assert_close(found.auroc.values[0], alone.auroc.values[0])
    whole = probe(model, (YES, NO), "1", folds=4)
    torch.testing.assert_close(found.raw.auroc.values, whole.auroc.values)
    lines = repr(found).splitlines()
    assert lines[1].strip().startswith("k=1")
    assert lines[3].strip().startswith("all values")


def test_wrong_numbers_of_features_are_refused():
    dictionary = Dictionary(
        torch.eye(7), torch.eye(7), torch.zeros(7), torch.zeros(7), nn.ReLU(), reads="1", writes="1"
    )
    model = embedded(values_of_tokens())
    for k in ((), (0,), (2, 1.5)):
        with pytest.raises((ValueError, TypeError), match="k must"):
            sparse_probes(model, dictionary, (YES, NO), k=k)
    with pytest.raises(ValueError, match="k must"):
        probe(pydoc(), (["a b", "c d"], ["e f", "g h"]), k=0, folds=2)
