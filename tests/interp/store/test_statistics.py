"""Statistics equal numpy over all rows, for any parts in any order. Other functions accept them."""

import numpy as np
import pytest
import torch

from hooks import CacheError, HookedRunner
from interp import edits, head_scores, max_activating, tuned_lens
from interp.directions import leace
from interp.numbers.moments import Moments
from interp.store import HarvestConfig, Statistics, StatisticsByPoint, harvest, statistics
from tests.reference import variant
from tests.shipped import pydoc

NAME = "blocks.1.mlp.post"


def model_and_texts(count=23):
    draw = np.random.default_rng(0)
    # Each text begins with another token, so no two rows are equal.
    texts = [[n, *draw.integers(0, 23, draw.integers(0, 8)).tolist()] for n in range(count)]
    return variant("pre", n_layers=2, n_heads=3).double(), texts


def rows_of(model, texts, name=NAME):
    """Return all rows from a run of each text, with the text and the position of each row."""
    caches = [HookedRunner(model).run_with_cache(torch.tensor([text]))[1] for text in texts]
    places = [(n, pos) for n, text in enumerate(texts) for pos in range(len(text))]
    return np.concatenate([cache[name][0].numpy() for cache in caches]), np.array(places)


def test_a_column_with_nan_has_no_density():
    """NumPy's mean of the comparison would count NaN as a value that is not above 0."""
    rows = np.array([[1.0, -1.0], [np.nan, 2.0], [3.0, 4.0]])
    places = torch.arange(3)
    parts = [
        Statistics.of(torch.tensor(rows[part]), text=places[part], pos=places[part])
        for part in (slice(0, 1), slice(1, 3))
    ]
    for one in (parts[0] + parts[1], parts[1] + parts[0]):
        np.testing.assert_array_equal(one.density, [np.nan, 2 / 3])
        np.testing.assert_array_equal(one.density.isnan(), np.isnan(rows.mean(0)))


def test_statistics_match_numpy(tmp_path):
    model, texts = model_and_texts()
    rows, places = rows_of(model, texts)
    store = harvest(
        model, texts, ["*.mlp.post", "*.attn.z"], tmp_path, config=HarvestConfig(per_file=4)
    )
    streamed = statistics(model, iter(texts), "*.mlp.post", covariance=True, top=3, batch=5)
    stored = store.statistics([NAME], covariance=True, top=3)
    # One point needs no list.
    of_one = store.statistics(NAME, covariance=True, top=3)
    for one in (streamed[NAME], stored[NAME], of_one[NAME]):
        assert one.n == len(rows)
        close = dict(atol=1e-12, rtol=1e-9)
        np.testing.assert_allclose(one.mean, rows.mean(0), **close)
        np.testing.assert_allclose(one.variance, rows.var(0), **close)
        np.testing.assert_allclose(one.covariance, np.cov(rows.T, bias=True), **close)
        np.testing.assert_allclose(one.low, rows.min(0), **close)
        np.testing.assert_allclose(one.high, rows.max(0), **close)
        np.testing.assert_allclose(one.density, (rows > 0).mean(0), **close)
        np.testing.assert_allclose(one.error, rows.std(0, ddof=1) / len(rows) ** 0.5, **close)
        np.testing.assert_allclose(one.top_values, -np.sort(-rows, axis=0)[:3], **close)
        order = np.argsort(-rows, axis=0, kind="stable")[:3]
        assert one.top_places.tolist() == places[order].tolist()
        # The sample contains all values, so quantiles are exact.
        assert one.rank_error == 0
        shares = [0.0, 0.3, 0.5, 1.0]
        np.testing.assert_allclose(
            one.quantiles(shares), np.quantile(rows, shares, axis=0), **close
        )
        np.testing.assert_allclose(one.quantiles(0.3), np.quantile(rows, 0.3, axis=0), **close)
    assert repr(stored[NAME]) == f"Statistics of {len(rows)} rows [{rows.shape[1]}]"
    z = store.statistics()["blocks.0.attn.z"]
    expected = rows_of(model, texts, "blocks.0.attn.z")[0]
    np.testing.assert_allclose(z.mean, expected.mean(0), atol=1e-12)
    np.testing.assert_allclose(z.variance, expected.reshape(len(rows), -1).var(0), atol=1e-12)


@pytest.mark.parametrize("part", [(1, 1), (3, 3), (-1, 2), (0, 0)])
def test_readers_are_counted_from_zero(tmp_path, part):
    model, texts = model_and_texts()
    store = harvest(model, texts, NAME, tmp_path, config=HarvestConfig(per_file=2))
    for read in (store.statistics, lambda part: next(store.batches(7, part=part))):
        with pytest.raises(ValueError, match=r"part must be .* 0 <= reader < readers"):
            read(part=part)
    n = len(store.files)
    with pytest.raises(ValueError, match=rf"reader {n} has none of {n} files"):
        store.statistics(part=(n, n + 1))


def test_parts_are_put_together_in_any_order(tmp_path):
    model, texts = model_and_texts()
    store = harvest(model, texts, NAME, tmp_path, config=HarvestConfig(per_file=2))
    for covariance in (False, True):
        options = {"covariance": covariance, "top": 4, "sample": 20, "seed": 3}
        whole = store.statistics(**options)
        parts = [store.statistics(part=(n, 3), **options) for n in range(3)]
        parts[1].save(tmp_path / "part")
        parts[1] = StatisticsByPoint.load(tmp_path / "part")
        for together in (parts[0] + parts[1] + parts[2], parts[2] + (parts[1] + parts[0])):
            one, other = whole[NAME], together[NAME]
            assert one.n == other.n
            for name in ("mean", "products"):
                torch.testing.assert_close(getattr(one, name), getattr(other, name))
            for name in ("low", "high", "positive", "top_values", "top_places", "sample", "keys"):
                assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_the_sample_is_uniform():
    """With many seeds, all rows are drawn equally often, and quantiles have the error that is
    stated.
    """
    n, room = 400, 50
    values, text = torch.arange(n)[:, None].double(), torch.arange(n) // 7
    pos = torch.arange(n) % 7
    counts, medians = torch.zeros(n), []
    for seed in range(400):
        half = [slice(0, 150), slice(150, n)]
        a, b = (Statistics.of(values[s], text[s], pos[s], sample=room, seed=seed) for s in half)
        one = b + a
        counts[one.sample[:, 0].long()] += 1
        medians.append(one.quantiles(0.5)[0] / n)
    expected = 400 * room / n
    assert (counts - expected).abs().max() < 5 * expected**0.5
    assert abs(float(np.mean(medians)) - 0.5) < 0.01
    assert 0.8 < np.std(medians) / one.rank_error < 1.2


def test_arguments_that_do_not_fit_are_errors(tmp_path):
    model, texts = model_and_texts(5)
    found = statistics(model, texts, NAME)
    with pytest.raises(ValueError, match="same columns and options"):
        found[NAME] + statistics(model, texts, NAME, top=3)[NAME]
    with pytest.raises(ValueError, match="same points"):
        found + statistics(model, texts, "blocks.0.mlp.post")
    with pytest.raises(ValueError, match="covariance=True"):
        _ = found[NAME].covariance
    with pytest.raises(ValueError, match="at least one row"):
        Statistics.of(torch.zeros(0, 3), torch.zeros(0).int(), torch.zeros(0).int())
    with pytest.raises(ValueError, match=r"must begin with \[batch pos\]"):
        statistics(model, texts, "*.pattern")
    store = harvest(model, texts, NAME, tmp_path, config=HarvestConfig(without=[*range(23)]))
    for read in (store.statistics, lambda: store.moments(NAME)):
        with pytest.raises(ValueError, match="at least one row"):
            read()
    with pytest.raises(ValueError, match=r"\.safetensors, .*got .*whole\.csv"):
        found.save(tmp_path / "whole.csv")
    found.save(tmp_path / "whole")
    (tmp_path / "torn").write_bytes((tmp_path / "whole").read_bytes()[:-4])
    with pytest.raises(CacheError):
        StatisticsByPoint.load(tmp_path / "torn")


def test_scores_of_heads_over_a_corpus():
    model = variant("pre", n_layers=2, n_heads=3).double()
    draw = np.random.default_rng(1)
    texts = [draw.integers(0, 5, draw.integers(4, 12)).tolist() for _ in range(13)]
    alone = []
    for text in texts:
        _, cache = HookedRunner(model).run_with_cache(torch.tensor([text]))
        alone.append(head_scores(model, cache, "previous_token").values[..., 0])

    def scores(model, cache):
        return head_scores(model, cache, "previous_token")

    parts = [
        statistics(model, some, "*.pattern", reading=scores, batch=3)
        for some in (texts[:6], texts[6:])
    ]
    one = (parts[0] + parts[1])["reading"]
    each = torch.stack(alone).flatten(1)
    assert one.n == 13
    torch.testing.assert_close(one.mean, torch.stack(alone).mean(0))
    torch.testing.assert_close(one.variance, each.var(0, correction=0))
    torch.testing.assert_close(one.error, each.std(0) / 13**0.5)


@pytest.mark.parametrize("name", ["blocks.1.mlp_out", "blocks.0.attn.z"])
def test_mean_ablation_accepts_statistics(name):
    model, texts = model_and_texts()
    mean = torch.from_numpy(rows_of(model, texts, name)[0].mean(0))
    found, tokens = statistics(model, texts, name), torch.tensor([[3, 1, 4], [1, 5, 9]])
    runner = HookedRunner(model)
    for where in ({}, {"pos": 1}, {"pos": slice(1, None)}):
        changed = runner.run_with_hooks(tokens, hooks={name: edits.mean(found, **where)})

        def by_hand(value, point, where=where):
            value = value.clone()
            value[:, where.get("pos", slice(None))] = mean
            return value

        torch.testing.assert_close(changed, runner.run_with_hooks(tokens, hooks={name: by_hand}))
    if "z" in name:
        changed = runner.run_with_hooks(tokens, hooks={name: edits.mean(found, head=2)})

        def one_head(value, point):
            value = value.clone()
            value[:, :, 2] = mean[2]
            return value

        torch.testing.assert_close(changed, runner.run_with_hooks(tokens, hooks={name: one_head}))


def test_the_largest_values_match_max_activating(tmp_path):
    model, texts = model_and_texts()
    store = harvest(model, texts, NAME, tmp_path, config=HarvestConfig(per_file=7))
    found = store.statistics(top=4)
    for neuron in (0, 5):
        expected = max_activating(model, texts, NAME, neuron=neuron, k=4)
        places = store.top(found, NAME, neuron, model)
        assert [(place.text, place.pos, place.tokens) for place in places] == [
            (place.text, place.pos, place.tokens) for place in expected
        ]
        np.testing.assert_allclose([p.value for p in places], [p.value for p in expected])
        assert repr(places) == repr(expected)
    part = harvest(
        model, texts, NAME, tmp_path / "part", config=HarvestConfig(per_file=7, pos=slice(1, None))
    )
    best = part.top(part.statistics(), NAME, 5)[0]
    assert best.tokens == tuple(texts[best.text][1:])
    value = rows_of(model, texts)[0][sum(map(len, texts[: best.text])) + best.pos + 1, 5]
    assert best.value == pytest.approx(value)


def test_of_equal_values_the_earliest_are_kept():
    values = torch.tensor([[1.0], [2.0], [1.0], [2.0], [2.0], [0.0]])
    text, pos = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 0, 1, 0, 1])
    parts = [Statistics.of(values[s], text[s], pos[s], top=2) for s in (slice(0, 4), slice(4, 6))]
    for one in (Statistics.of(values, text, pos, top=2), parts[0] + parts[1], parts[1] + parts[0]):
        assert one.top_values[:, 0].tolist() == [2.0, 2.0]
        assert one.top_places[:, 0].tolist() == [[0, 1], [1, 1]]
    four = Statistics.of(values, text, pos, top=4)
    assert four.top_places[:, 0].tolist() == [[0, 1], [1, 1], [2, 0], [0, 0]]


def test_erasers_come_from_a_store(tmp_path):
    model, texts = model_and_texts()
    rows, _ = rows_of(model, texts)
    store = harvest(model, texts, NAME, tmp_path, config=HarvestConfig(per_file=7))
    labels = np.array([[token % 2, token % 3 == 0] for text in texts for token in text]).astype(
        float
    )
    moments = store.moments(
        NAME, lambda held: torch.stack([held["tokens"] % 2, held["tokens"] % 3 == 0], 1)
    )
    expected = Moments.of(torch.from_numpy(rows), torch.from_numpy(labels))
    torch.testing.assert_close(moments.products, expected.products)
    erased = leace(moments)(torch.from_numpy(rows)).numpy()
    products = (erased - erased.mean(0)).T @ (labels - labels.mean(0))
    assert abs(products).max() < 1e-9


def test_a_tuned_lens_is_fitted_to_a_store(tmp_path):
    """The fit is that of PyTorch's Adam on the same rows, without a run of the model."""
    model, texts = model_and_texts()
    names = ["blocks.0.resid_pre", "blocks.1.resid_pre", "blocks.1.resid_post"]
    store = harvest(model, texts, names, tmp_path, config=HarvestConfig(per_file=7))
    lens = tuned_lens(model, store, steps=5, batch=40, learning_rate=0.01, seed=3)
    linears = [
        torch.nn.Linear(model.config.d_model, model.config.d_model).double() for _ in names[1:]
    ]
    for linear in linears:
        torch.nn.init.eye_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
    adam = torch.optim.Adam([w for linear in linears for w in linear.parameters()], lr=0.01)
    rows = store.batches(40, 3, names, epochs=None)
    for step in range(5):
        *streams, final = next(rows)
        wanted = model.unembed(final[None]).detach().log_softmax(-1)
        losses = [
            torch.nn.functional.kl_div(
                model.unembed(linear(x)[None]).log_softmax(-1),
                wanted,
                log_target=True,
                reduction="sum",
            )
            / len(x)
            for linear, x in zip(linears, streams, strict=True)
        ]
        torch.testing.assert_close(lens.losses[step], torch.stack(losses).detach())
        adam.zero_grad()
        sum(losses).backward()
        adam.param_groups[0]["lr"] = 0.01 * (1 - step / 5)
        adam.step()
    for n, linear in enumerate(linears):
        torch.testing.assert_close(lens.weight[n], linear.weight.detach())
        torch.testing.assert_close(lens.bias[n], linear.bias.detach())
    other, _ = model_and_texts()
    with torch.no_grad():
        other.blocks[1].attn.W_K[1, 2, 3] += 1e-6
    with pytest.raises(CacheError, match="from this model; its weights is"):
        tuned_lens(other, store, steps=1)


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"pos": -1}, "pos=.*harvest"),
        ({"context": 3}, "context=.*harvest"),
        ({"topp": 3}, "topp=.*top"),
        ({"values": 3}, "values="),
    ],
)
def test_options_that_statistics_do_not_take_are_named(option, match, tmp_path):
    model = pydoc()
    with pytest.raises(TypeError, match=match):
        statistics(model, ["def f"], "*.mlp_out", **option)
    store = harvest(model, ["def f"], "blocks.0.mlp_out", tmp_path)
    with pytest.raises(TypeError, match=f"{next(iter(option))}="):
        store.statistics(**option)
