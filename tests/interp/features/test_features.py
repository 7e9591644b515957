"""Scores, cards and controls of dictionaries, compared with sums that are computed here."""

import dataclasses
import itertools
import json
import math
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from hooks import HookedRunner
from interp import repeated_tokens
from interp.features import (
    Dictionary,
    TopK,
    evaluate_sae,
    feature_cards,
    load_sae,
    load_transcoders,
    purity,
    splice,
    stability,
)
from interp.features.cards import FeatureCard, FeatureCards, FeatureExample
from interp.features.scores import LEAST_FOR_DEAD, PointScores
from models import Transformer, TransformerConfig, generate, next_token_loss
from tests.shipped import pydoc

D, FEATURES = 12, 29
TEXTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8], [9, 7, 9, 3], [2, 3, 8, 4, 6, 2]]
PLACE = "blocks.1.resid_post"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=11, n_ctx=16, n_layers=2, n_heads=3, d_model=D)
    made = Transformer(config).double().eval()
    for parameter in made.parameters():
        parameter.data.normal_(std=0.4)
    made.unembedding.weight.data *= 20  # the model then predicts its own texts with certainty
    return made


@pytest.fixture(scope="module")
def texts(model):
    """Texts that the model generated. Their loss is small, and large if values are removed."""
    return [
        generate(model, torch.tensor([[n, 10 - n]]), max_new_tokens=2 + n % 5, temperature=0.0)[0]
        for n in range(11)
    ]


def exact(size=D):
    """Return a dictionary that reconstructs everything: each direction and its opposite is a
    feature.
    """
    both = torch.cat([torch.eye(size), -torch.eye(size)]).double()
    zero = torch.zeros(2 * size, dtype=torch.float64)
    return Dictionary(both.T, both, zero, zero[:size], nn.ReLU())


def random(seed=0, k=5):
    draw = torch.Generator().manual_seed(seed)
    enc, dec = (torch.randn(D, FEATURES, generator=draw, dtype=torch.float64) for _ in range(2))
    zero = torch.zeros(FEATURES, dtype=torch.float64)
    return Dictionary(enc, dec.T / 9, zero, zero[:D], TopK(k))


def test_identity_recovers_all_and_zero_nothing(model, texts):
    scores = evaluate_sae(model, {PLACE: exact()}, texts, batch=3)
    assert_close(scores.recovered().mean(), torch.ones(1, dtype=torch.float64))
    assert_close(scores.recovered("mean").mean(), torch.ones(1, dtype=torch.float64))
    assert_close(scores.kl, torch.zeros(11, dtype=torch.float64))
    assert math.isclose(scores.points[PLACE].explained_variance, 1)
    assert math.isclose(scores.points[PLACE].l0, D)
    nothing = Dictionary(
        torch.zeros(D, 3).double(),
        torch.zeros(3, D).double(),
        torch.zeros(3).double(),
        torch.zeros(D).double(),
        nn.ReLU(),
    )
    scores = evaluate_sae(model, {PLACE: nothing}, texts)
    assert_close(scores.recovered().mean(), torch.zeros(1, dtype=torch.float64))
    point = scores.points[PLACE]
    assert (point.density.max(), point.dense) == (0, 0)
    assert math.isnan(point.dead)
    assert point.n_tokens == sum(map(len, texts))
    assert f"{PLACE}: {point.n_tokens} tokens, " in repr(scores)
    assert "need 1,000,000 tokens" in repr(scores)
    assert "% dead" not in repr(scores)


def test_features_are_dead_only_on_many_tokens():
    """On a million tokens, a feature that is active at 3 in a million tokens is missed with a
    probability of at most one in twenty.
    """
    density = torch.tensor([0, 2e-6, 0, 0.5, 0.25])
    for n_tokens, dead in ((1_000_000, 0.4), (3_000_001, 0.4), (999_999, None), (44, None)):
        point = PointScores(0.5, 0.75, density, n_tokens)
        assert (
            math.isnan(point.dead) if dead is None else math.isclose(point.dead, dead, rel_tol=1e-6)
        )
        assert ("40.0% dead" in str(point)) == (dead is not None)
        assert f"{n_tokens:,} tokens" in str(point)
    assert math.isnan(PointScores(0.5, 0.75, density).dead)
    assert (1 - 3e-6) ** LEAST_FOR_DEAD < 0.05


@torch.no_grad()
def test_scores_match_each_text_alone(model, texts):
    d = random()
    scores = evaluate_sae(model, {PLACE: d}, texts, batch=3)
    values, active, losses, divergences = [], [], [], []
    runner = HookedRunner(model)
    for text in texts:
        tokens = torch.tensor([text])
        value = runner.capture(tokens, names=PLACE)[PLACE][0]
        pre = value @ d.W_enc
        features = torch.where(pre >= pre.sort().values[:, -5:-4], pre, 0).clamp(min=0)
        values.append(value)
        active.append(features)
        logits = [
            model(tokens),
            runner.run_with_hooks(
                tokens, hooks={PLACE: lambda x, point, f=features: (f @ d.W_dec)[None]}
            ),
        ]
        logits.append(runner.run_with_hooks(tokens, hooks={PLACE: lambda x, point: x * 0}))
        losses.append([next_token_loss(each, tokens).mean() for each in logits])
        log_p, log_q = (each.log_softmax(-1) for each in logits[:2])
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    mean = torch.cat(values).mean(0)
    for text, loss in zip(texts, losses, strict=True):
        tokens = torch.tensor([text])
        put = {PLACE: lambda x, point: mean.expand_as(x).clone()}
        loss.append(next_token_loss(runner.run_with_hooks(tokens, hooks=put), tokens).mean())
    losses = torch.tensor(losses).T
    # The losses are means over positions in float32.
    assert_close(scores.losses, losses.double(), atol=1e-6, rtol=1e-6)
    assert_close(scores.kl, torch.stack(divergences))
    features, value = torch.cat(active), torch.cat(values)
    error = (value - features @ d.W_dec).square().sum() / (value - mean).square().sum()
    point = scores.points[PLACE]
    assert math.isclose(point.explained_variance, 1 - error.item(), rel_tol=1e-9)
    assert_close(point.density, (features != 0).double().mean(0).float())
    assert math.isclose(point.l0, (features != 0).sum(1).double().mean().item())
    gap = losses[2] - losses[0]
    assert_close(scores.recovered().mean(), ((losses[2] - losses[1]).mean() / gap.mean())[None])
    assert "explained variance" in repr(scores)


def test_no_ratio_if_the_ablation_has_almost_no_effect(model, texts):
    quiet = Transformer(model.config).double().eval()
    quiet.load_state_dict(model.state_dict())
    for parameter in quiet.blocks[1].mlp.parameters():
        parameter.data *= 1e-6
    scores = evaluate_sae(quiet, {"blocks.1.mlp_out": exact()}, texts)
    with pytest.raises(ValueError, match="must raise the loss"):
        scores.recovered()
    assert "must raise the loss" in repr(scores)


@pytest.mark.parametrize("batch", [3, 16])
def test_copies_of_a_text_count_once_in_the_scores(model, texts, batch):
    d = random(3, 9)
    once, often = (evaluate_sae(model, {PLACE: d}, texts * n, batch=batch) for n in (1, 4))
    assert once.groups is None
    assert often.groups == (*range(11),) * 4
    for ablation in ("zero", "mean"):
        expected, found = once.recovered(ablation), often.recovered(ablation)
        assert_close(found.mean(), expected.mean())
        for end, same in zip(found.interval(), expected.interval(), strict=True):
            assert_close(end, same, rtol=1e-6, atol=1e-9)
    # The mean of this gap is above two standard errors if there are 44 texts, but not if the 44
    # texts are copies of 11.
    gap = torch.tensor([0.0] * 8 + [1.0] * 3).double()
    of_texts = torch.stack([0 * gap, 0.5 * gap, gap, gap])
    scores = dataclasses.replace(often, losses=of_texts.repeat(1, 4))
    assert 2 * gap.std() / 44**0.5 < gap.mean() < 2 * gap.std() / 11**0.5
    with pytest.raises(ValueError, match="standard error"):
        scores.recovered()
    dataclasses.replace(scores, groups=None).recovered()


def test_transcoders_are_scored_at_the_points_that_they_write(model):
    mlp = model.blocks[0].mlp
    zero = torch.zeros(D, dtype=torch.float64)
    linear = Dictionary(
        torch.zeros(D, 3).double(),
        torch.zeros(3, D).double(),
        torch.zeros(3).double(),
        zero,
        nn.ReLU(),
        W_skip=torch.eye(D).double(),
        reads="blocks.0.ln2.normalized",
        writes="blocks.0.mlp_out",
    )
    scores = evaluate_sae(model, linear, TEXTS[:1])
    tokens = torch.tensor(TEXTS[:1])
    cache = HookedRunner(model).capture(
        tokens, names=["blocks.0.ln2.normalized", "blocks.0.mlp_out"]
    )
    read, written = cache["ln2.normalized", 0][0], cache["mlp_out", 0][0]
    assert_close(written, mlp(read[None])[0])
    error = (written - read).square().sum() / (written - written.mean(0)).square().sum()
    got = scores.points["blocks.0.mlp_out"].explained_variance
    assert math.isclose(got, 1 - error.item(), rel_tol=1e-9)


def test_constant_values_have_no_explained_variance(model):
    with HookedRunner(model).hooks({PLACE: lambda value, point: torch.full_like(value, 0.1)}):
        scores = evaluate_sae(model, {PLACE: random()}, TEXTS)
    assert math.isnan(scores.points[PLACE].explained_variance)
    assert scores.points[PLACE].l0 > 0


def test_cards_show_the_texts_and_the_logits_of_features(model, tmp_path):
    d = random(k=3)
    chosen = [28, 4]
    cards = feature_cards(model, {PLACE: d}, TEXTS, chosen, k=2, batch=3)
    values = {}
    for n, text in enumerate(TEXTS):
        with splice(model, {PLACE: d}) as runner:
            values[n] = runner.capture(torch.tensor([text]), names="*.features")["features", 1][0]
    whole = torch.cat([*values.values()])
    for card in cards:
        column = whole[:, card.index]
        assert math.isclose(card.density, (column != 0).double().mean().item(), rel_tol=1e-6)
        assert math.isclose(card.largest, column.max().item(), rel_tol=1e-6)
        best = sorted(values, key=lambda n: -values[n][:, card.index].max())[:2]
        for example, n in zip(card.examples, best, strict=False):
            at = int(values[n][:, card.index].argmax())
            assert [*example.tokens] == [str(token) for token in TEXTS[n]]
            assert example.pos == at
            assert_close(torch.tensor(example.activations), values[n][:, card.index].float())
        logits = d.W_dec[card.index] - d.W_dec[card.index].mean()
        logits = (logits * model.ln_final.weight) @ model.unembedding.weight.T
        logits = logits - logits.mean()
        assert [int(token) for token, _ in card.top] == logits.topk(2).indices.tolist()
        assert [int(token) for token, _ in card.bottom] == (-logits).topk(2).indices.tolist()
        assert_close(
            torch.tensor([score for _, score in card.top]).double(),
            logits.topk(2).values,
            rtol=1e-5,
            atol=1e-5,
        )
        cosines = nn.functional.cosine_similarity(d.W_dec, d.W_dec[card.index], dim=-1)
        cosines[card.index] = -2
        assert [n for n, _ in card.nearest] == cosines.topk(2).indices.tolist()
        assert sum(card.histogram) == (column > 0).sum()
    cards.save(tmp_path / "out")
    data = json.loads((tmp_path / "out" / "28.json").read_text())
    assert data["index"] == 28
    assert data["top_logits"] == [token for token, _ in cards[0].top]
    for name in ("out.json", "out.PNG"):
        with pytest.raises(ValueError, match=rf"a folder or end in \.html; got .*{name}"):
            cards.save(tmp_path / name)
    cards.save(tmp_path / "of.layer.2")
    cards.save(tmp_path / "x.HTML")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "of.layer.2", "x.HTML"}
    again = FeatureCards.load(tmp_path / "out")
    assert [card.index for card in again] == [4, 28]
    assert again[1] == cards[0]
    assert again[1].top[0][1] > again[1].top[1][1]
    # Other tools write the tokens without numbers.
    del data["hookscope"]
    bare = FeatureCard.from_neuronpedia(data)
    assert [token for token, _ in bare.bottom] == data["bottom_logits"]
    assert all(math.isnan(value) for _, value in (*bare.top, *bare.bottom))
    assert (bare.nearest, bare.n_tokens) == ([], None)
    with pytest.raises(ValueError, match=r"in \[0, 29\)"):
        feature_cards(model, {PLACE: d}, TEXTS, [29])
    with pytest.raises(FileNotFoundError):
        FeatureCards.load(tmp_path)


def test_numbers_that_are_not_known_are_null_in_the_files_of_cards(tmp_path):
    example = FeatureExample(["a", "b"], [1.5, math.nan], 0)
    FeatureCards([FeatureCard(7, math.nan, [example], largest=math.inf)]).save(tmp_path / "out")
    text = (tmp_path / "out" / "7.json").read_text()
    data = json.loads(text, parse_constant=pytest.fail)
    assert data["activation_frequency"] is data["act_max"] is None
    assert data["examples_quantiles"][0]["examples"][0]["tokens_acts_list"] == [1.5, None]
    (tmp_path / "old").mkdir()
    # Older versions wrote NaN into the file, and no field of this library.
    del data["hookscope"]
    (tmp_path / "old" / "7.json").write_text(json.dumps(data).replace("null", "NaN"))
    for folder in ("out", "old"):
        (card,) = FeatureCards.load(tmp_path / folder)
        assert math.isnan(card.density)
        assert math.isnan(card.largest)
        assert card.examples[0].activations[0] == 1.5
        assert math.isnan(card.examples[0].activations[1])


def test_scores_of_some_positions(model, texts):
    """Values at the first position are not replaced and do not count. A text of one token is left
    out, because it has no loss.
    """
    d = random()
    with pytest.warns(UserWarning, match="1 of 12 texts are left out"):
        scores = evaluate_sae(model, {PLACE: d}, [[3], *texts], pos=slice(1, None), batch=4)
    runner, values, losses = HookedRunner(model), [], []
    for text in texts:
        tokens = torch.tensor([text])
        values.append(runner.capture(tokens, names=PLACE)[PLACE][0, 1:])
    mean = torch.cat(values).mean(0)
    ways = [lambda x: d(x), lambda x: 0 * x, lambda x: mean.expand_as(x)]
    for text in texts:
        tokens = torch.tensor([text])
        each = [next_token_loss(model(tokens), tokens).mean()]
        for way in ways:
            put = {PLACE: lambda x, point, way=way: torch.cat([x[:, :1], way(x[:, 1:])], 1)}
            logits = runner.run_with_hooks(tokens, hooks=put)
            each.append(next_token_loss(logits, tokens).mean())
        losses.append(torch.stack(each))
    assert_close(scores.losses, torch.stack(losses, 1).double(), atol=1e-6, rtol=1e-6)
    value, reconstructed = torch.cat(values), d(torch.cat(values))
    error = (value - reconstructed).square().sum() / (value - mean).square().sum()
    point = scores.points[PLACE]
    assert math.isclose(point.explained_variance, 1 - error.item(), rel_tol=1e-9)
    with pytest.raises(ValueError, match="at least two tokens"):
        evaluate_sae(model, {PLACE: d}, [[3], [4]])
    with pytest.raises(ValueError, match="the same in each text"):
        evaluate_sae(model, {PLACE: d}, texts, pos=[[1], [0]])


def test_a_position_that_rules_the_variance_is_said(model, texts):
    def first_is_large(value, point):
        value = value.clone()
        value[:, 0] = 1000
        return value

    with HookedRunner(model).hooks({PLACE: first_is_large}):
        with pytest.warns(UserWarning, match=r"position 0 has \d+% .*blocks.1.resid"):
            evaluate_sae(model, {PLACE: random()}, texts)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            evaluate_sae(model, {PLACE: random()}, texts, pos=slice(1, None))


def test_cards_of_some_positions_and_of_norms_in_the_stream(model):
    d = random(k=3)
    with splice(model, {PLACE: d}) as runner:
        caches = [runner.capture(torch.tensor([text]), names="*.features") for text in TEXTS]
    values = torch.cat([cache["features", 1][0, 2:] for cache in caches])
    feature = int((values != 0).sum(0).argmax())
    kept = values[:, feature]
    assert 0 < (kept != 0).sum() < len(kept)
    (card,) = feature_cards(model, {PLACE: d}, TEXTS, [feature], pos=slice(2, None), k=2)
    assert math.isclose(card.density, (kept != 0).double().mean().item(), rel_tol=1e-6)
    assert math.isclose(card.largest, kept.max().item(), rel_tol=1e-6)
    assert card.n_tokens == len(kept)
    assert f"% of {len(kept)} positions" in repr(card)
    printed = repr(FeatureCards([card] * 7)).splitlines()
    assert "multiplies its decoder row" in printed[0]
    assert printed[1:] == [*repr(card).splitlines() * 5, "and 2 more"]
    assert card.examples
    assert all(set(example.activations[:2]) == {0.0} for example in card.examples)
    with pytest.raises(ValueError, match="pos must select a token"):
        feature_cards(model, {PLACE: d}, TEXTS, [feature], pos=[99])
    post = Transformer(dataclasses.replace(model.config, norm_place="post")).double().eval()
    (card,) = feature_cards(post, {PLACE: d}, TEXTS, [4], k=2)
    logits = post.unembedding.weight @ d.W_dec[4]
    assert [int(token) for token, _ in card.top] == logits.topk(2).indices.tolist()


def test_no_text_is_an_example_twice(model):
    chosen, pads = [0, 7, 28], [[3, 1, 4, 1, 5, 9, 2], [2, 3, 8, 4, 6, 2]]
    d = random()
    for batch in (1, 3, 16):
        cards = feature_cards(model, {PLACE: d}, TEXTS, chosen, k=4, batch=batch)
        often = feature_cards(model, {PLACE: d}, [*TEXTS, *pads, *TEXTS], chosen, k=4, batch=batch)
        for card, same in zip(cards, often, strict=True):
            shown = [(each.tokens, each.pos) for each in same.examples]
            assert shown == [(each.tokens, each.pos) for each in card.examples]
            assert len({tuple(tokens) for tokens, _ in shown}) == len(shown)
        assert max(len(card.examples) for card in often) > 1


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_purity_counts_copies_of_a_text_once(model, batch):
    neurons, texts = "blocks.1.mlp.post", [TEXTS[2], *TEXTS, *TEXTS[1:]]
    shares = purity(model, texts, neurons, k=3, batch=batch)
    assert_close(
        shares, purity(model, [TEXTS[2], *TEXTS[:2], TEXTS[3]], neurons, k=3), equal_nan=True
    )
    # Twenty copies of a text of two tokens count as one text, so there are fewer than three
    # positions.
    assert purity(model, [[3, 1]] * 20, neurons, k=3, batch=batch).isnan().all()


def test_purity_of_some_positions(model):
    neurons = "blocks.1.mlp.post"
    shares = purity(model, TEXTS, neurons, k=2, pos=-1)
    values = torch.stack(
        [
            HookedRunner(model).capture(torch.tensor([text]), names=neurons)[neurons][0, -1]
            for text in TEXTS
        ]
    )
    last = torch.tensor([text[-1] for text in TEXTS])
    for n in range(4 * D):
        best = values[:, n].topk(2)
        expected = 1.0 if len({*last[best.indices].tolist()}) == 1 else 0.5
        assert shares[n].isnan() if best.values[-1] <= 0 else shares[n] == expected


def test_purity_of_features_and_neurons(model):
    d = random(k=4)
    with splice(model, {PLACE: d}) as runner:
        shares = purity(model, TEXTS, f"{PLACE}.features", k=2, batch=3)
        rows = [
            runner.capture(torch.tensor([t]), names="*.features")["features", 1][0] for t in TEXTS
        ]
    tokens, values = torch.tensor([*itertools.chain(*TEXTS)]), torch.cat(rows)
    for n in range(FEATURES):
        best = values[:, n].topk(2)
        expected = 1.0 if len({*tokens[best.indices].tolist()}) == 1 else 0.5
        if best.values[-1] <= 0:
            assert shares[n].isnan()
        else:
            assert shares[n] == expected
    assert shares.isfinite().any()
    neurons = purity(model, TEXTS, "blocks.1.mlp.post", k=2)
    assert neurons.shape == (4 * D,)


def test_features_are_decoded_without_the_input_if_it_is_not_needed():
    torch.manual_seed(1)
    W_enc, W_dec, features = torch.randn(5, 7), torch.randn(7, 3), torch.rand(2, 4, 7)
    b_enc, b_dec = torch.randn(7), torch.randn(3)
    plain = Dictionary(W_enc, W_dec, b_enc, b_dec, nn.ReLU(), transcodes=True)
    assert_close(plain.decode(features), features @ W_dec + b_dec)
    skip = Dictionary(
        W_enc, W_dec, b_enc, b_dec, nn.ReLU(), W_skip=torch.randn(5, 3), transcodes=True
    )
    normed = Dictionary(
        torch.randn(5, 7), torch.randn(7, 5), b_enc, torch.randn(5), nn.ReLU(), norm="layer_norm"
    )
    for each in (skip, normed):
        with pytest.raises(ValueError, match="needs x"):
            each.decode(features)


def test_stability_is_the_best_cosine():
    one, other = random(), random(seed=1)
    expected = [
        max(nn.functional.cosine_similarity(row, each, dim=0).item() for each in other.W_dec)
        for row in one.W_dec
    ]
    assert_close(stability(one, other), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert_close(stability(one, one), torch.ones(FEATURES))


@pytest.mark.parametrize(
    ("name", "prose", "copied"), [("resid_post", 0.96, 0.93), ("transcoders", 0.9, 0.9)]
)
def test_the_bundled_dictionaries_keep_what_the_model_knows(name, prose, copied):
    """The texts are the last tenth of the documentation, which was not used in the training, and
    repeated random characters.
    """
    from pydoc_data.topics import topics

    load = load_transcoders if name == "transcoders" else load_sae
    bundled, dictionaries = pydoc(), load(f"pydoc-4l/{name}")
    text = "\n".join(topics.values())
    held_out = text[len(text) * 9 // 10 :]
    rows = [held_out[start : start + 200] for start in range(0, 4000, 400)]
    assert evaluate_sae(bundled, dictionaries, rows).recovered().mean() > prose
    tokens = repeated_tokens(bundled.config.vocab_size, period=30, batch=10, copies=6)
    scores = evaluate_sae(bundled, dictionaries, tokens)
    assert scores.recovered().mean() > copied
    assert all(point.l0 <= 32 for point in scores.points.values())
