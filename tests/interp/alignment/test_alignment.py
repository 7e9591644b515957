"""Alignments in models whose variables are in known subspaces.

They are compared with arithmetic without hooks, and with closed forms.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from hooks import HookedRunner, HookPoint, UnknownNameError
from interp import Pairs, edits, load_sae, load_transcoders, logit_diff
from interp.alignment import (
    align,
    counterfactual,
    neurons,
    null_spaces,
    of_dictionary,
    pca,
    subspace,
)
from tests.reference import variant
from tests.shipped import pydoc

N = 5


class Sum(nn.Module):
    """A model that computes (a + b) mod 5 of two tokens.

    Its hidden vector contains the one-hot vectors of a and b side by side, and is then rotated.
    """

    def __init__(self, rotation):
        super().__init__()
        self.rotation = nn.Parameter(rotation)
        self.h = HookPoint("batch pos d_model")

    def values(self, tokens):
        return nn.functional.one_hot(tokens, N).to(self.rotation).flatten(1) @ self.rotation.mT

    def tail(self, h):
        a, b = (h @ self.rotation).split(N, -1)
        sums = [sum(a[..., n] * b[..., (total - n) % N] for n in range(N)) for total in range(N)]
        return 10 * torch.stack(sums, -1)

    def forward(self, tokens):
        return self.tail(self.h(self.values(tokens)[:, None].expand(-1, 2, -1)))


def rotated(seed=0):
    torch.manual_seed(seed)
    return Sum(torch.linalg.qr(torch.randn(2 * N, 2 * N)).Q).eval()


def add(a, b, first=None):
    first = a if first is None else first
    return {"first": first, "answer": (first + b) % N}


def sums():
    """Return all pairs of inputs that differ in the first number, in two parts.

    The right answer is the sum of the clean first number and the corrupted second number.
    """
    rows = [
        (a, b, c, d)
        for a in range(N)
        for b in range(N)
        for c in range(N)
        for d in range(N)
        if a != c
    ]
    order = np.random.default_rng(3).permutation(len(rows))
    table = torch.tensor(rows)[order]
    answers = [
        counterfactual(add, {"a": a, "b": b}, {"a": c, "b": d}, "first")["answer"]
        for a, b, c, d in table.tolist()
    ]
    pairs = Pairs(table[:, 2:], table[:, :2], torch.tensor(answers))
    return pairs[:350], pairs[350:]


def test_a_planted_variable_is_found_and_controls_fail():
    model, (train, test) = rotated(), sums()
    before = copy.deepcopy(model.state_dict())
    found = align(model, train, "h", N, test=test, epochs=35)
    accuracy = dict(
        zip(found.accuracy.labels["control"], found.accuracy.mean().flatten().tolist(), strict=True)
    )
    assert accuracy["aligned"] == 1
    assert accuracy["random"] < 0.6
    assert accuracy["shuffled answers"] < 0.6
    assert accuracy["shuffled weights"] < 0.6
    # The whole value also carries the second number. So the answer is right only if the second
    # number is the same in both texts.
    same = (test.clean[:, 1] == test.corrupted[:, 1]).float().mean()
    assert accuracy["whole"] == pytest.approx(float(same))
    # The differences of the one-hot vectors of the first number are inside the learned subspace.
    basis = found.featurizers["h", -1].encode(torch.eye(2 * N)).detach()
    truth = model.rotation.detach()[:, :N]
    apart = truth - truth.mean(1, keepdim=True)
    assert (apart - basis @ basis.mT @ apart).norm() < 0.2 * apart.norm()
    torch.testing.assert_close(basis.mT @ basis, torch.eye(N), atol=1e-5, rtol=0)
    losses = found.losses["h", -1]
    assert losses[-1] < losses[0] / 10
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.rotation.grad is None
    # If all n answers are right, Wilson's interval is from n / (n + z²) to 1.
    low, n = float(found.accuracy.interval().low[0, 0, 0]), len(test)
    assert low == pytest.approx(n / (n + 1.959964**2), rel=1e-5)
    assert f"aligned           1.000 [{low:.3f}, 1.000]" in repr(found)
    assert "<iframe" in found._repr_html_()


def test_pairs_with_the_same_texts_share_a_drawn_answer_and_count_once(monkeypatch):
    stats = pytest.importorskip("scipy.stats", reason="an independent interval of Wilson")
    model, (train, test) = rotated(), sums()
    rows = np.random.default_rng(0).permutation(np.tile(np.arange(30), 4))
    tested = np.random.default_rng(1).permutation(np.tile(np.arange(17), 3))
    drawn = []
    with_answers_of = Pairs.with_answers_of

    def recorded(pairs, numbers):
        drawn.append(with_answers_of(pairs, numbers))
        return drawn[-1]

    monkeypatch.setattr(Pairs, "with_answers_of", recorded)
    found = align(model, train[rows], "h", 2, test=test[tested], epochs=1, seed=3)
    # Copies of a text have one number, in the order of their first occurrence. Each number gets the
    # answer of another text, which is drawn at random.
    order = torch.randperm(30, generator=torch.Generator().manual_seed(3))
    first = [*dict.fromkeys(rows.tolist())]
    expected = [train.answers[first[order[first.index(row)]]] for row in rows.tolist()]
    assert drawn[0].answers.tolist() == torch.stack(expected).tolist()
    assert drawn[0].answers.tolist() != train.answers[rows].tolist()
    once = [*dict.fromkeys(tested.tolist())]
    assert found.accuracy.groups == found.metric.groups
    assert [once[group] for group in found.accuracy.groups] == tested.tolist()
    # Wilson's interval counts 17 texts, although there are more rows, because some are copies.
    right = found.accuracy.select(control="whole").values.flatten()
    expected = stats.binomtest(round(float(right.sum()) / 3), 17).proportion_ci(method="wilson")
    ends = [float(end[4, 0, 0]) for end in found.accuracy.interval()]
    assert ends == pytest.approx([*expected], abs=1e-6)
    with pytest.raises(ValueError, match="1 pairs in both"):
        align(model, train[rows], "h", 2, test=train[[0, 100]])


def test_a_fit_is_the_loop_written_out():
    """`align` equals a loop with Adam on an orthogonal map, without hooks and runners.

    The source of each value is computed by hand.
    """
    model, (train, test) = rotated(1).double(), sums()
    found = align(model, train, "h", 3, test=test, epochs=2, rate=0.02, batch=48, seed=7)
    torch.manual_seed(7)
    columns = nn.utils.parametrizations.orthogonal(nn.Linear(3, 2 * N, bias=False)).double()
    optimizer, draw, losses = (
        torch.optim.Adam(columns.parameters(), lr=0.02),
        torch.Generator().manual_seed(7),
        [],
    )
    base, source = model.values(train.corrupted).detach(), model.values(train.clean).detach()

    def changed(base, source):
        return base + (source - base) @ columns.weight @ columns.weight.mT

    for _ in range(2):
        total = 0.0
        for rows in torch.randperm(len(train), generator=draw).split(48):
            loss = nn.functional.cross_entropy(
                model.tail(changed(base[rows], source[rows])), train.answers[rows]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(rows)
        losses.append(total / len(train))
    assert found.losses["h", -1] == pytest.approx(losses, rel=1e-9)
    logits = model.tail(changed(model.values(test.corrupted), model.values(test.clean))).detach()
    right = (logits.argmax(-1) == test.answers).double()
    assert torch.equal(found.accuracy.select(control="aligned").values.flatten(), right)
    chosen = logits.log_softmax(-1).gather(1, test.answers[:, None])[:, 0]
    plain = model(test.corrupted)[:, -1].log_softmax(-1).gather(1, test.answers[:, None])[:, 0]
    effects = found.metric.select(control="aligned").values.flatten()
    torch.testing.assert_close(effects, (chosen - plain).detach())


def test_a_fit_of_a_mask_is_the_loop_written_out():
    """`align` with features equals a loop that learns a mask.

    The mask is the sigmoid of a number for each feature, divided by a temperature that falls from 1
    to 0.01. The cost of features is minimised too, but the reported loss does not contain it.
    """
    model, (train, test) = Sum(torch.eye(2 * N)).eval().double(), sums()
    found = align(
        model,
        train,
        "h",
        features=neurons(2 * N),
        sparsity=0.7,
        test=test,
        epochs=2,
        batch=48,
        seed=5,
    )
    boundary = torch.zeros(2 * N, dtype=torch.float64, requires_grad=True)
    optimizer, draw, losses = (
        torch.optim.Adam([boundary], lr=0.01),
        torch.Generator().manual_seed(5),
        [],
    )
    base, source = model.values(train.corrupted).detach(), model.values(train.clean).detach()
    # There are 2 epochs, and 350 pairs make 8 batches.
    temperatures = iter(np.geomspace(1, 0.01, 2 * 8))
    for _ in range(2):
        total = 0.0
        for rows in torch.randperm(len(train), generator=draw).split(48):
            mask = (boundary / next(temperatures)).sigmoid()
            logits = model.tail(base[rows] + mask * (source[rows] - base[rows]))
            loss = nn.functional.cross_entropy(logits, train.answers[rows])
            optimizer.zero_grad()
            (loss + 0.7 * mask.mean()).backward()
            optimizer.step()
            total += float(loss.detach()) * len(rows)
        losses.append(total / len(train))
    assert found.losses["h", -1] == pytest.approx(losses, rel=1e-9)
    assert torch.equal(found.featurizers["h", -1].mask, (boundary > 0).double())


def test_a_mask_finds_the_neurons_of_a_variable():
    model, (train, test) = Sum(torch.eye(2 * N)).eval(), sums()
    found = align(
        model, train, "h", features=neurons(2 * N), sparsity=0.05, test=test, epochs=20, rate=0.1
    )
    part = found.featurizers["h", -1]
    assert part.mask.tolist() == [1.0] * N + [0.0] * N
    assert float(found.accuracy.select(control="aligned").mean()) == 1
    assert repr(part) == "neurons, 5 of 10 features"


@pytest.mark.parametrize("kind", ["padded", "spans", "heads", "noising"])
def test_runs_match_edits(kind):
    """The scores of `align` equal runs with `edits.interchange` and the same part of the
    activation.

    Texts may have several lengths.
    """
    model = variant("pre", n_layers=2, n_heads=3).double()
    draw = torch.Generator().manual_seed(2)
    clean, corrupted, more, others = torch.randint(0, 23, (4, 9, 7), generator=draw)
    mask = torch.ones(9, 7, dtype=torch.bool)
    if kind == "padded":
        mask[::2, 5:] = False
    spans = {"name": [[1, 2]] * 9} if kind == "spans" else None
    answers = torch.randint(0, 23, (9, 2), generator=draw)
    answers[:, 1] = (answers[:, 0] + 1) % 23
    train, test = (
        Pairs(*texts, answers, attention_mask=None if mask.all() else mask, spans=spans)
        for texts in ((clean, corrupted), (more, others))
    )
    head = 1 if kind == "heads" else None
    name = "blocks.0.attn.z" if kind == "heads" else "blocks.1.resid_pre"
    pos = "name" if kind == "spans" else -2
    direction = "noising" if kind == "noising" else "denoising"
    found = align(
        model, train, name, 2, test=test, pos=pos, head=head, direction=direction, epochs=1
    )
    part = found.featurizers[name, pos]
    base, source = (more, others) if kind == "noising" else (others, more)
    arguments = {} if mask.all() else {"attention_mask": mask}
    runner = HookedRunner(model)
    cache = runner.run_with_cache(source, **arguments)[1]
    where = {"pos": [1, 2] if kind == "spans" else pos} | ({} if head is None else {"head": head})
    edit = edits.interchange(cache, part, **where)
    logits = runner.run_with_hooks(base, hooks={name: edit}, **arguments)
    last = mask.sum(1) - 1
    values = logits[torch.arange(9), last].detach()
    right, wrong = values.gather(1, answers).unbind(1)
    assert torch.equal(
        found.accuracy.select(control="aligned").values.flatten(), (right > wrong).double()
    )
    plain = model(base, **arguments)[torch.arange(9), last].gather(1, answers)
    expected = (right - wrong) - (plain[:, 0] - plain[:, 1]).detach()
    torch.testing.assert_close(found.metric.select(control="aligned").values.flatten(), expected)
    with_tensor = edits.interchange(
        cache, part.encode(torch.eye(cache[name].shape[-1]).double()), **where
    )
    again = runner.run_with_hooks(base, hooks={name: with_tensor}, **arguments)
    torch.testing.assert_close(again, logits, atol=1e-6, rtol=1e-6)


def test_attached_models_are_aligned_as_plain_ones():
    """An attached model and its plain copy give the same alignment, up to rounding.

    Both models stay as they were, without hooks.
    """
    pytest.importorskip("transformers", reason="needs the extra hf")
    from models import attach, from_hf
    from tests.attachable import made

    theirs = made("llama")
    ours, draw = from_hf(theirs), torch.Generator().manual_seed(4)
    clean, corrupted = torch.randint(3, 29, (2, 30, 6), generator=draw)
    pairs = Pairs(clean, corrupted, clean[:, 2])
    before = copy.deepcopy(theirs.state_dict())
    plain = align(ours, pairs[:20], "resid_pre", 3, test=pairs[20:], layers=1, pos=2, epochs=1)
    with attach(theirs):
        found = align(
            theirs, pairs[:20], "resid_pre", 3, test=pairs[20:], layers=1, pos=2, epochs=1
        )
    for control in ("aligned", "random", "whole"):
        values = [each.metric.select(control=control).values for each in (found, plain)]
        torch.testing.assert_close(*values, atol=1e-3, rtol=1e-3)
    assert all(torch.equal(value, before[name]) for name, value in theirs.state_dict().items())
    assert not any(module._forward_hooks for module in theirs.modules())


def test_layers_and_positions_are_axes():
    model = pydoc()
    texts = [f"part {a}{b} and {a}" for a in "KVXQ" for b in "123456"]
    clean, corrupted = texts, [text.replace(text[5], "Z") for text in texts]
    pairs = Pairs(clean, corrupted, [text[6] for text in texts]).read_by(model)
    found = align(
        model, pairs[:16], "resid_pre", 4, test=pairs[16:], layers=[1, 2], pos=[-1, 5], epochs=1
    )
    assert found.accuracy.axes == ("control", "point", "pos", "example")
    assert found.accuracy.labels["point"] == ("blocks.1.resid_pre", "blocks.2.resid_pre")
    assert found.accuracy.labels["pos"] == (-1, 5)
    assert found.accuracy.values.shape == (5, 2, 2, 8)
    with pytest.raises(ValueError, match="8 pairs in both"):
        align(model, pairs, "resid_pre", 4, test=pairs[16:])
    with pytest.raises(ValueError, match="k .*1 to 128"):
        align(model, pairs[:16], "resid_pre", 129, test=pairs[16:])
    with pytest.raises(ValueError, match="must have answers"):
        align(model, Pairs(clean[:2], corrupted[:2]), "resid_pre", 4, test=pairs[16:])
    with pytest.raises(ValueError, match="head= is needed if the point has heads"):
        align(model, pairs[:16], "z", 4, test=pairs[16:])
    with pytest.raises(ValueError, match="head= is needed if the point has heads"):
        align(model, pairs[:16], "resid_pre", 4, test=pairs[16:], head=1)
    with pytest.raises(UnknownNameError, match="span of the pairs"):
        align(model, pairs[:16], "resid_pre", 4, test=pairs[16:], pos="name")
    with pytest.raises(TypeError, match="align .*epoch=.*matches: epochs"):
        align(model, pairs[:16], "resid_pre", 4, test=pairs[16:], epoch=3)


def test_featurizers_follow_their_definitions():
    torch.manual_seed(0)
    x, y = torch.randn(2, 6, 128)
    torch.testing.assert_close(neurons(128).interchanged(x, y), y)
    values = torch.randn(40, 128) @ torch.diag(torch.linspace(1, 3, 128))
    parts = pca(values, 3)
    centred = (values - values.mean(0)).double().numpy()
    _, vectors = np.linalg.eigh(centred.T @ centred)
    basis = torch.tensor(vectors[:, -3:]).float()
    torch.testing.assert_close(
        parts.interchanged(x, y), x + (y - x) @ basis @ basis.mT, atol=1e-4, rtol=1e-4
    )
    with pytest.raises(ValueError, match="k .*1 to 40"):
        pca(values, 41)
    sae = load_sae("pydoc-4l/resid_post")
    of_sae = of_dictionary(sae)
    mask = torch.zeros(sae.n_features)
    mask[::3] = 1
    x, y = 8 * x, 8 * y
    taken = (sae.encode(y) - sae.encode(x)) * mask
    torch.testing.assert_close(
        of_sae.only(mask).interchanged(x, y), x + taken @ sae.W_dec, atol=1e-3, rtol=1e-3
    )
    assert (of_sae.interchanged(x, y) - x).abs().max() > 0.1
    assert of_sae.only(mask).place == "blocks.2.resid_post"
    spanned = subspace(torch.stack([e := torch.randn(128), e + 2 * torch.randn(128)], 1))
    once = spanned.interchanged(x, y)
    torch.testing.assert_close(spanned.interchanged(once, y), once, atol=1e-3, rtol=1e-3)
    with pytest.raises(ValueError, match="linearly independent"):
        subspace(torch.ones(128, 2))
    assert (
        subspace(torch.eye(128)[:, :2]).interchanged(x.bfloat16(), y.bfloat16()).dtype
        == torch.bfloat16
    )
    with pytest.raises(ValueError, match="must be an autoencoder"):
        of_dictionary(next(iter(load_transcoders("pydoc-4l/transcoders").values())))


class Neurons(nn.Module):
    """A model of five neurons, of which only the second varies between texts.

    Two readers, the columns of `READER`, compute the output from the neurons.
    """

    READER = torch.tensor([[0.3, -1.2], [1.1, 0.4], [-0.7, 0.9], [0.2, 1.3], [1.5, -0.1]])

    def __init__(self):
        super().__init__()
        self.h = HookPoint("batch pos neuron")

    def forward(self, tokens):
        h = self.h(tokens[..., None].float() * torch.eye(5)[1] + 0.5)
        return h @ self.READER


def test_a_neuron_that_is_used_is_not_an_illusion():
    model, neuron = Neurons().eval(), torch.eye(5)[1]
    pairs = Pairs(torch.tensor([[3], [5]]), torch.tensor([[1], [7]]), metric=logit_diff(1, 0))
    checked = null_spaces(model, pairs, "h", neuron, reader=model.READER)
    whole = torch.tensor([2.0, -2.0]) * (0.4 - 1.1)
    torch.testing.assert_close(checked.effects.select(through="whole").values, whole)
    # Let P be the projection on the directions that are read. The part of e that is read is P e.
    # The change along it, (P e · e) P e / |P e|², is P e again, so it has the same effect as e.
    torch.testing.assert_close(checked.effects.select(through="read").values, whole)
    assert checked.unread == pytest.approx(0, abs=1e-5)
    # This direction is mostly a direction that is not read, plus a small share of the neuron.
    unread = torch.linalg.svd(model.READER.mT).Vh[3]
    joined = neuron * 0.02 + unread
    projection = model.READER @ torch.linalg.pinv(model.READER)
    part = projection @ joined / (projection @ joined).norm()
    expected = 1 - part[1] * (part @ model.READER @ torch.tensor([-1.0, 1.0])) / (
        joined[1] * (joined @ model.READER @ torch.tensor([-1.0, 1.0])) / joined.square().sum()
    )
    checked = null_spaces(model, pairs, "h", joined, reader=model.READER)
    assert checked.unread == pytest.approx(float(expected), rel=1e-3)


class Line(nn.Module):
    """The example of Makelov et al. 2023: h = x (1, 0, 1), and the answer is (0, 2, 1) · h."""

    def __init__(self):
        super().__init__()
        self.h = HookPoint("batch pos d_model")

    def forward(self, tokens):
        h = self.h(tokens[..., None].float() * torch.tensor([1.0, 0.0, 1.0]))
        return torch.stack([torch.zeros(h.shape[:2]), h @ torch.tensor([0.0, 2.0, 1.0])], -1)


def test_an_illusion_is_distinguished_from_a_used_direction():
    model = Line().eval()
    pairs = Pairs(torch.tensor([[3], [5]]), torch.tensor([[1], [7]]), metric=logit_diff(1, 0))
    e1, e2, e3 = torch.eye(3)
    full = torch.tensor([2.0, -2.0])
    for direction, effect in (
        (e3, full),
        ((e1 + e2) / 2**0.5, full),
        (e1, 0 * full),
        (e2, 0 * full),
    ):
        effects = null_spaces(model, pairs, "h", direction).effects
        torch.testing.assert_close(effects.select(through="whole").values, effect)
    doubled = null_spaces(model, pairs, "h", 2 * e3).effects.values
    torch.testing.assert_close(doubled, null_spaces(model, pairs, "h", e3).effects.values)
    used, illusion = (
        null_spaces(model, pairs, "h", e3),
        null_spaces(model, pairs, "h", (e1 + e2) / 2**0.5),
    )
    assert (used.dormant, used.unread, used.is_suspect) == (0, 0, False)
    assert illusion.dormant == pytest.approx(1)
    assert illusion.unread == pytest.approx(1)
    assert illusion.is_suspect
    assert repr(illusion) == "NullSpaces: suspect, dormant 1.00, unread 1.00 of the effect"
    nothing = null_spaces(model, pairs, "h", e2)
    assert repr(nothing) == "NullSpaces: no verdict, because the subspace has no effect"
    assert not nothing.is_suspect
    # With the weights that read h, (0, 2, 1), the part of each direction that is read points along
    # these weights, and the whole answer depends on it.
    reader = torch.tensor([[0.0], [2.0], [1.0]])
    checked = null_spaces(model, pairs, "h", (e1 + e2) / 2**0.5, reader=reader)
    torch.testing.assert_close(checked.effects.select(through="read").values, full)
    assert checked.dormant == pytest.approx(1)
    with pytest.raises(ValueError, match="directions must have 3 rows at h; got 2"):
        null_spaces(model, pairs, "h", torch.ones(2))


@pytest.mark.parametrize("n_answers", [1, 2])
def test_equal_logits_are_no_right_answer(n_answers):
    tokens = torch.tensor([[a, b] for a in range(N) for b in range(3)])
    answers = torch.stack([tokens.sum(1) % N, (tokens.sum(1) + 1) % N], 1)
    pairs = Pairs(tokens, tokens.flip(0), answers if n_answers == 2 else answers[:, 0])
    model = Sum(torch.zeros(2 * N, 2 * N)).eval()
    result = align(model, pairs[:4], "h", k=1, test=pairs[4:9], epochs=1)
    assert torch.equal(result.accuracy.values, torch.zeros_like(result.accuracy.values))
