"""Files of claims: every field is checked, and a model with other weights is noticed."""

import copy
import json
from pathlib import Path

import pytest
import torch

from hooks import CacheError
from interp import Circuit, Claim, Pairs, run_circuit
from interp.graph import Graph
from models import attach
from tests import tiny
from tests.interp.claims.known import EDGES, claim_of, induction_pairs, model_of
from tests.shipped import pydoc


@pytest.fixture(scope="module")
def facts():
    return claim_of(EDGES, says="zwei Köpfe kopieren", n=5, seeds=2).packed()


def loaded(facts, folder):
    path = folder / "changed.json"
    path.write_text(json.dumps(facts))
    return Claim.load(path)


def test_a_claim_survives_a_file(facts, tmp_path):
    claim = claim_of(EDGES, says="zwei Köpfe kopieren", n=5, seeds=2)
    path = tmp_path / "claim.json"
    claim.save(path)
    again = Claim.load(path)
    assert again.packed() == claim.packed() == json.loads(path.read_text("utf-8"))
    assert again.content == claim.content
    numbers = [
        [test.measured for test in one.verify(model_of("induction")).tests[1:]]
        for one in (claim, again)
    ]
    assert numbers[0] == numbers[1]
    with pytest.raises(ValueError, match="model must be given"):
        again.verify()


def places(value, path=()):
    """Yield the path of each field of an object of JSON."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield (*path, name)
            yield from places(entry, (*path, name))


def changed(facts, path, value):
    """Return a copy of facts with another value at a path."""
    facts = copy.deepcopy(facts)
    part = facts
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return facts


def test_every_field_is_checked(facts, tmp_path):
    paths = [*places(facts)]
    assert len(paths) > 25
    for path in paths:
        with pytest.raises(CacheError, match=path[-1]):
            loaded(changed(facts, path, {"other": 1}), tmp_path)
        without = copy.deepcopy(facts)
        part = without
        for name in path[:-1]:
            part = part[name]
        del part[path[-1]]
        with pytest.raises(CacheError, match=path[-1]):
            loaded(without, tmp_path)
    for path in [(), *[path for path in paths if isinstance(at(facts, path), dict)]]:
        with pytest.raises(CacheError, match="unknown field 'more'"):
            loaded(changed(facts, (*path, "more"), 1), tmp_path)


def at(facts, path):
    """Return the value at a path."""
    for name in path:
        facts = facts[name]
    return facts


WRONG = [
    (("format",), "hookscope-claim-0"),
    (("kind",), "feature"),
    (("seeds",), 0),
    (("seeds",), True),
    (("model", "weights"), "12ab"),
    (("content", "promised", "faithful"), 1.01),
    (("content", "promised", "faithful"), "0.8"),
    (("content", "promised", "robust"), True),
    (("content", "edges"), []),
    (("content", "edges"), ["a0.h1->logits", "a0.h1->logits"]),
    (("content", "split_embeddings"), 0),
    (("pairs", "clean"), [[1, 2], []] + [[3]] * 3),
    (("pairs", "clean"), [[1, 2.0]] * 5),
    (("pairs", "clean"), [[1, -2]] * 5),
    (("pairs", "corrupted"), [[1, 2]] * 5),
    (("pairs", "corrupted"), None),
    (("test", "corrupted"), None),
    (("pairs", "answers"), [[[1], [2], [3]]] * 5),
    (("pairs", "answers"), [[[1], [2]]] * 4),
    (("pairs", "pos"), [11] * 5),
    (("pairs", "pos"), [-12] * 5),
    (("pairs", "words"), ["a"] * 4),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("path", "value"), WRONG)
def test_a_wrong_value_is_an_error_that_names_the_field(facts, path, value, tmp_path):
    with pytest.raises(CacheError, match=path[-1]) as error:
        loaded(changed(facts, path, value), tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[1", "[]", "3", '{"format": NaN}', "\x80"])
def test_a_file_that_is_no_claim_is_an_error(text, tmp_path):
    path = tmp_path / "claim.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CacheError, match="claim.json"):
        Claim.load(path)


def test_nan_and_infinity_are_refused(facts, tmp_path):
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(CacheError, match=r"finite.*content\.promised\.faithful"):
            loaded(changed(facts, ("content", "promised", "faithful"), wrong), tmp_path)


def test_a_claim_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "claim.json"
    path.write_text("old")
    write = Path.write_text

    def full(self, text, **options):
        write(self, text[:100], **options)
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        claim_of(EDGES, n=5).save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["claim.json"]
    assert path.read_text() == "old"
    with pytest.raises(ValueError, match=r"\.json"):
        claim_of(EDGES, n=5).save(tmp_path / "claim.safetensors")


def test_other_weights_are_noticed():
    claim = claim_of(EDGES, n=12, seeds=1)
    other = copy.deepcopy(model_of("induction"))
    with torch.no_grad():
        other.blocks[1].attn.W_V[0, 3, 2] += 1e-9
    verdict = claim.verify(other)
    assert verdict["same model"].status == verdict.status == "cannot tell"
    assert "other hashes" in repr(verdict)
    asked = claim.verify(other, on="another model")
    assert asked.status == "holds"
    assert "other hashes" in repr(asked)
    with pytest.raises(KeyError, match="same model"):
        asked["same model"]
    assert claim.verify()["same model"].status == "holds"
    with pytest.raises(ValueError, match="on must"):
        claim.verify(on="this model")


TEXTS = (["part KV81; KV8", "the part QX7; QX"], ["part KV84; KV8", "the part QX2; QX"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "answers", [[("1", "4"), ("7", "2")], ["1", "7"], [(" of", " a"), (" to", " in it")]]
)
def test_texts_answers_and_padding_survive_a_file(side, answers, tmp_path):
    model = pydoc()
    pairs = Pairs(*TEXTS, answers).read_by(model)
    if side == "left":
        tokens = [model.to_tokens(texts, side="left") for texts in TEXTS]
        answers = pairs.answers if pairs.continuations is None else answers
        pairs = Pairs(tokens[0], tokens[1], answers)
    circuit = Circuit(Graph(model), ["input->m0", "m0->logits"])
    claim = Claim.circuit(model, pairs, circuit, "c", test=pairs)
    again = loaded(claim.packed(), tmp_path).test.restored(model)
    expected = pairs.read_by(model)
    assert again.digests() == expected.digests()
    with torch.no_grad():
        values = []
        for these in (again, expected):
            text = these.rows().text
            logits = model(text.tokens, attention_mask=text.attention_mask)
            values.append(these.metric(logits, text.attention_mask))
    torch.testing.assert_close(*values)


def test_a_model_with_other_words_is_an_error():
    model = pydoc()
    pairs = Pairs(*TEXTS, [("1", "4"), ("7", "2")])
    circuit = Circuit(Graph(model), ["input->m0", "m0->logits"])
    facts = Claim.circuit(model, pairs, circuit, "c").packed()
    facts["pairs"]["words"][1] = "the part QX8; QX"
    claim = Claim._from_json(facts)
    with pytest.raises(ValueError, match="same words.*QX7.*QX8.*text 1"):
        claim.verify(model)


def test_an_attached_model_is_verified(tmp_path):
    model = tiny.model("GPT2LMHeadModel", vocab_size=31)
    attach(model)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(31, (4, 6, 7), generator=draw)
    answers = torch.arange(12).view(6, 2)
    pairs, test = Pairs(tokens[0], tokens[1], answers), Pairs(tokens[2], tokens[3], answers)
    graph = Graph(model)
    circuit = Circuit(graph, graph.edges[::2])
    claim = Claim.circuit(model, pairs, circuit, "c", test=test, seeds=1)
    verdict = loaded(claim.packed(), tmp_path).verify(model)
    shares = []
    for direction, name in (("noising", "faithful"), ("denoising", "texts exchanged")):
        metrics = []
        for kept in (circuit, [], graph.edges):
            with torch.no_grad():
                logits = run_circuit(model, test, kept, direction=direction)
            last = logits[:, -1].gather(1, answers)
            metrics.append((last[:, 0] - last[:, 1]).mean().item())
        share, none, whole = metrics
        shares.append((share - none) / (whole - none))
        assert verdict[name].measured == pytest.approx(shares[-1], rel=1e-3)
    assert shares[0] != pytest.approx(shares[1], rel=0.01)


def test_a_position_survives_a_file():
    model, pairs = model_of("induction"), induction_pairs(5, 1)
    for pos in (-1, -3, 4, [10, 2, 3, 4, 5]):
        given = Pairs(pairs.clean, pairs.corrupted, pairs.answers, pos=pos)
        claim = Claim.circuit(model, given, Circuit(Graph(model), EDGES), "c")
        again = Claim._from_json(claim.packed()).pairs.restored(model)
        with torch.no_grad():
            logits = model(pairs.clean)
        torch.testing.assert_close(again.metric(logits), given.metric(logits))
