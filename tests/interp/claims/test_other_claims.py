"""Claims about heads, features, directions and variables: their numbers and their verdicts."""

import json

import pytest
import torch

from hooks import CacheError, HookedRunner
from interp import Claim, Pairs, edits, splice
from interp.alignment import align
from interp.directions import Direction
from interp.features import Dictionary
from models import load
from tests.interp.claims.known import (
    comparison_pairs,
    deciding,
    induction_pairs,
    model_of,
    variable_claim,
)
from tests.interp.planted import SUM, YES


def logit_diffs(model, tokens, answers, hooks=()):
    """Return the logit difference of each text in a run with hooks."""
    with torch.no_grad():
        logits = HookedRunner(model).run_with_hooks(tokens, hooks=dict(hooks))
    rows = torch.arange(len(tokens))
    return logits[rows, -1, answers[:, 0]] - logits[rows, -1, answers[:, 1]]


def head_set(point, head, values):
    """Return a hook that sets the output of a head."""

    def edit(value, _):
        value = value.clone()
        value[:, :, head] = values
        return value

    return {point: edit}


def test_the_effects_of_a_head_are_those_of_separate_runs():
    model = model_of("comparison")
    pairs, fresh = comparison_pairs(11, 1), comparison_pairs(13, 2)
    verdict = Claim.effect(model, pairs, "a head", head=(0, 0), test=fresh, seeds=2).verify()
    point = "blocks.0.attn.z"
    clean_z, corrupted_z = (
        HookedRunner(model).capture(tokens, names=point)[point]
        for tokens in (fresh.clean, fresh.corrupted)
    )
    answers = fresh.answers
    clean, corrupted = (logit_diffs(model, t, answers) for t in (fresh.clean, fresh.corrupted))
    gap = (clean - corrupted).mean()

    def lost(head, values):
        edited = logit_diffs(model, fresh.clean, answers, head_set(point, head, values).items())
        return ((clean - edited).mean() / gap).item()

    assert verdict["effect"].measured == pytest.approx(lost(0, corrupted_z[:, :, 0]))
    assert verdict["zero ablation"].measured == pytest.approx(lost(0, 0.0))
    mean = torch.cat([clean_z, corrupted_z])[:, :, 0].mean(0)
    assert verdict["mean ablation"].measured == pytest.approx(lost(0, mean))
    hooks = head_set(point, 0, clean_z[:, :, 0]).items()
    restored = logit_diffs(model, fresh.corrupted, answers, hooks)
    expected = ((restored - corrupted).mean() / gap).item()
    assert verdict["reversed direction"].measured == pytest.approx(expected)
    others = [lost(head, corrupted_z[:, :, head]) for head in (1, 2)]
    above = lost(0, corrupted_z[:, :, 0]) - sum(others) / 2
    assert verdict["above other heads"].measured == pytest.approx(above)


def test_a_head_that_nothing_reads_fails_and_a_needed_head_holds():
    model = model_of("induction")
    pairs, fresh = induction_pairs(6, 1), induction_pairs(24, 2)
    good = Claim.effect(model, pairs, "an induction head", head=(1, 2), test=fresh)
    verdict = good.verify(paraphrase=induction_pairs(9, 5))
    assert verdict.status == "holds"
    assert verdict["paraphrase"].measured == pytest.approx(1)
    with pytest.raises(ValueError, match="paraphrase must have pairs"):
        good.verify(paraphrase=pairs)
    bad = Claim.effect(model, pairs, "another head", head=(1, 0), test=fresh, seeds=1).verify()
    assert (bad.status, bad["effect"].status) == ("fails", "fails")
    against = Claim.effect(model, pairs, "c", head=(1, 2), test=fresh, seeds=1, matters=-0.4)
    verdict = against.verify()
    assert verdict["effect"].promised == "at most -0.4"
    assert verdict["zero ablation"].promised == "at most -0.1"
    # The head helps, so it is below other heads in the promised direction.
    assert verdict["above other heads"].measured < 0
    assert verdict["effect"].measured == pytest.approx(1)


def features():
    """Return a dictionary with features for a sum of two digits, the answer and an unused part."""
    size = YES + 4
    columns = torch.zeros(size, 3).double()
    columns[SUM, 0] = columns[YES, 1] = columns[SUM + 1, 2] = 1.0
    zeros = torch.zeros(3).double(), torch.zeros(size).double()
    place = "blocks.0.resid_mid"
    return Dictionary(columns, columns.mT, *zeros, torch.nn.ReLU(), reads=place, writes=place)


def test_a_feature_that_a_later_part_reads_matters():
    model, dictionary = model_of("comparison"), features()
    pairs, fresh = comparison_pairs(9, 1), comparison_pairs(24, 2)
    read, unread = (
        Claim.effect(model, pairs, "a feature", feature=n, dictionary=dictionary, test=fresh)
        for n in (0, 2)
    )
    again = Claim._from_json(json.loads(json.dumps(read.packed())))
    verdict = again.verify(model, dictionary=dictionary)
    assert verdict.status == "holds"
    # The sum alone decides the answer.
    assert verdict["effect"].measured == pytest.approx(1)
    verdict = unread.verify(dictionary=dictionary, seeds=1)
    assert (verdict.status, verdict["effect"].measured) == ("fails", pytest.approx(0))
    with pytest.raises(ValueError, match="dictionary must be the dictionary of the claim; got no"):
        read.verify()
    with torch.no_grad():
        other = features()
        other.b_enc += 0.5
    with pytest.raises(ValueError, match="got another dictionary"):
        read.verify(dictionary=other)
    # The dictionary is out of the model again, so it can be spliced in.
    with splice(model, dictionary):
        pass


def test_wrong_effects_are_errors():
    model, pairs = model_of("comparison"), comparison_pairs(5, 1)
    with pytest.raises(ValueError, match="either head or feature"):
        Claim.effect(model, pairs, "c")
    with pytest.raises(ValueError, match="matters"):
        Claim.effect(model, pairs, "c", head=(0, 0), matters=0.0)
    with pytest.raises(ValueError, match="feature"):
        Claim.effect(model, pairs, "c", feature=3, dictionary=features())


def direction_claim(coordinate, length=3.0, **numbers):
    """Return a claim about a direction at one coordinate of a model that adds two digits."""
    model = model_of("comparison")
    pairs, fresh = comparison_pairs(12, 1), comparison_pairs(14, 2)
    vector = torch.zeros(YES + 4).double()
    vector[coordinate] = length
    prompts, test = (Pairs(these.corrupted, answers=these.answers) for these in (pairs, fresh))
    texts = {"yes": pairs.clean, "no": pairs.corrupted, "others": pairs.clean[:5]}
    direction = Direction({"blocks.0.resid_mid": vector})
    numbers = {"moves": 2.5, "cost": 2.0, **numbers}
    return Claim.direction(model, prompts, direction, "v", test=test, **texts, **numbers)


@torch.no_grad()
def test_a_direction_is_tested_on_texts_of_unequal_length():
    model = load("pydoc-4l")
    draw = torch.Generator().manual_seed(3)
    vector = 20 * torch.nn.functional.normalize(torch.randn(128, generator=draw), dim=0)
    point, others = "blocks.2.resid_post", ["class A:", "raise ValueError("]
    claim = Claim.direction(
        model,
        Pairs(["import o", "def f(", "class C ", "x = "], answers=("8", " ")),
        Direction({point: vector}),
        "v",
        yes=["part KV8", "part QX3", "a part BT5-"],
        no=["def f(", "return x", "import os"],
        others=others,
        moves=1.0,
        cost=5.0,
        test=Pairs(["import sys", "class B", "for n i"], answers=("8", " ")),
    )
    measured = claim.verify(seeds=1)["cost on other texts"].measured
    costs = []
    for text in others:
        before = HookedRunner(model).run_with_hooks(text)[0].log_softmax(-1)
        hooks = {point: lambda value, _: value + vector}
        after = HookedRunner(model).run_with_hooks(text, hooks=hooks)[0].log_softmax(-1)
        costs.append((before.exp() * (before - after)).sum(-1).mean())
    assert measured == pytest.approx(float(torch.stack(costs).mean()), rel=1e-4)


def test_the_numbers_of_a_direction_are_those_of_separate_runs():
    claim = direction_claim(YES, seeds=2, strength=2.0)
    verdict = claim.verify()
    # The unembedding reads this coordinate, so the logit of the right answer changes by 6.
    assert verdict["moves the metric"].measured == pytest.approx(6)
    assert verdict["opposite direction"].measured == pytest.approx(6)
    model = model_of("comparison")
    texts = comparison_pairs(12, 1).clean[:5]

    def added(value, _):
        value = value.clone()
        value[..., YES] += 6
        return value

    runner = HookedRunner(model)
    with torch.no_grad():
        before = model(texts).log_softmax(-1)
        hooks = {"blocks.0.resid_mid": added}
        after = runner.run_with_hooks(texts, hooks=hooks).log_softmax(-1)
    kl = (before.exp() * (before - after)).sum(-1).mean()
    assert verdict["cost on other texts"].measured == pytest.approx(kl.item())
    # Random vectors, and differences of means of texts with shuffled labels, of the same length.
    pairs, fresh = comparison_pairs(12, 1), comparison_pairs(14, 2)
    point = "blocks.0.resid_mid"
    rows = torch.cat([pairs.clean, pairs.corrupted])
    values = runner.capture(rows, names=point)[point][:, -1]
    base = logit_diffs(model, fresh.corrupted, fresh.answers)
    for name in ("above random directions", "above shuffled labels"):
        changes = []
        for seed in range(2):
            draw = torch.Generator().manual_seed(seed)
            if name == "above random directions":
                vector = torch.randn(YES + 4, generator=draw).double()
            else:
                order = torch.randperm(24, generator=draw)
                vector = values[order[:12]].mean(0) - values[order[12:]].mean(0)
            hooks = {point: edits.add(6 * vector / vector.norm())}
            after = logit_diffs(model, fresh.corrupted, fresh.answers, hooks.items())
            changes.append((after - base).mean().item())
        assert verdict[name].measured == pytest.approx(6 - max(changes), rel=1e-5)


def test_a_direction_that_nothing_reads_fails():
    verdict = direction_claim(SUM + 1, seeds=2).verify()
    assert verdict["moves the metric"].measured == pytest.approx(0)
    assert verdict["moves the metric"].status == verdict.status == "fails"


def test_a_direction_that_the_unembedding_reads_holds():
    # All of its length is along the answer, unlike random directions of this length.
    verdict = direction_claim(YES, cost=5.0, seeds=3).verify()
    assert {test.status for test in verdict.tests} == {"holds"}
    away = direction_claim(YES, length=-3.0, moves=-2.5, cost=5.0, seeds=3).verify()
    assert {test.status for test in away.tests} == {"holds"}
    assert away["moves the metric"].promised == "at most -2.5"


def test_a_direction_survives_a_file_and_wrong_numbers_are_errors(tmp_path):
    claim = direction_claim(YES, seeds=1)
    path = tmp_path / "claim.json"
    claim.save(path)
    again = Claim.load(path)
    assert again.content == claim.content
    first, second = claim.verify(), again.verify(model_of("comparison"))
    assert [test.measured for test in first.tests[1:]] == [
        test.measured for test in second.tests[1:]
    ]
    facts = json.loads(path.read_text())
    for name, wrong in (("vectors", {}), ("strength", "1"), ("texts", {"yes": [[1]]})):
        changed = {**facts, "content": {**facts["content"], name: wrong}}
        path.write_text(json.dumps(changed))
        with pytest.raises(CacheError, match=name):
            Claim.load(path)
    with pytest.raises(ValueError, match="moves"):
        direction_claim(YES, moves=0.0)
    with pytest.raises(ValueError, match="length"):
        direction_claim(YES, length=0.0)


def test_a_variable_holds_where_it_is_and_fails_elsewhere():
    claim = variable_claim(head=0, seeds=1)
    verdict = claim.verify()
    train, test = (these.restored(deciding()) for these in (claim.pairs, claim.test))
    options = {"pos": -1, "head": 0, "epochs": 12, "rate": 0.1, "seed": 0}
    alignment = align(deciding(), train, "blocks.0.attn.z", 1, test=test, **options)
    means = alignment.accuracy.mean()[:, 0, 0]
    aligned, random, weights, answers, whole = means.tolist()
    assert verdict["aligned"].measured == pytest.approx(aligned)
    assert verdict["above a random part"].measured == pytest.approx(aligned - random)
    assert verdict["above shuffled weights"].measured == pytest.approx(aligned - weights)
    assert verdict["above shuffled answers"].measured == pytest.approx(aligned - answers)
    assert verdict["near the whole value"].measured == pytest.approx(aligned - whole)
    assert {test.status for test in verdict.tests} == {"holds"}
    wrong = variable_claim(head=1, seeds=1).verify()
    assert (wrong.status, wrong["aligned"].status) == ("fails", "fails")
    facts = claim.packed()
    assert Claim._from_json(json.loads(json.dumps(facts))).content == claim.content
    assert claim.verify(fresh=train)["aligned"].status == "cannot tell"
    with pytest.raises(ValueError, match="paraphrase must be left out for a claim about a variab"):
        claim.verify(paraphrase=test)
