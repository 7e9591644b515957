"""The command `verify`: the table of `Claim.verify`, and an exit status for each verdict."""

import json

import pytest

from interp.cli.command import main
from models import save
from tests.interp.claims.known import EDGES, claim_of, induction_pairs, model_of


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with a model, a claim that holds, a claim that fails, and fresh pairs."""
    folder = tmp_path_factory.mktemp("claims")
    save(folder / "model", model_of("induction"))
    claim_of(EDGES, "two heads copy", n=18, seeds=1).save(folder / "true.json")
    claim_of(EDGES[:-1], "one head copies", n=9, seeds=1).save(folder / "false.json")
    pairs = induction_pairs(7, 3)
    facts = {
        "clean": pairs.clean.tolist(),
        "corrupted": pairs.corrupted.tolist(),
        "answers": pairs.answers.tolist(),
    }
    (folder / "fresh.json").write_text(json.dumps(facts))
    return folder


def run(files, capsys, claim, *options):
    status = main(["verify", str(files / claim), "--model", str(files / "model"), *options])
    out, err = capsys.readouterr()
    assert err == ""
    return status, out


def test_the_exit_status_says_whether_the_claim_holds(files, capsys):
    status, out = run(files, capsys, "true.json")
    assert (status, out.splitlines()[0].split(",")[0]) == (0, "Verdict: holds")
    assert len(out.splitlines()) < 40
    status, out = run(files, capsys, "false.json", "--json")
    tables = json.loads(out)["tables"]
    assert (status, tables["status"]["values"]) == (1, "fails")
    measured = tables["test.measured"]
    by_name = dict(zip(measured["labels"]["test"], measured["values"], strict=True))
    assert by_name["faithful"] == pytest.approx(0)


def test_fresh_pairs_and_seeds_are_options(files, capsys):
    fresh = ["--fresh", str(files / "fresh.json")]
    status, out = run(files, capsys, "true.json", *fresh, "--seeds", "2")
    assert "7 fresh pairs; 2 seeds" in out
    assert status in (0, 3)


def test_another_model_is_noticed(files, capsys):
    facts = json.loads((files / "true.json").read_text())
    facts["model"]["weights"] = "0" * 64
    (files / "other.json").write_text(json.dumps(facts))
    assert run(files, capsys, "other.json")[0] == 3
    assert run(files, capsys, "other.json", "--on-another-model")[0] == 0


@pytest.mark.parametrize(
    ("name", "facts", "named"),
    [
        ("claim", {"format": "hookscope-claim-1"}, "kind"),
        ("fresh", {"clean": ["a"], "corrupted": None}, "answers"),
        ("fresh", {"clean": [[1, -2]], "corrupted": None, "answers": [[1]]}, r"clean[0][1]"),
        ("fresh", {"clean": ["a"], "corrupted": None, "answers": [[1.5]]}, r"answers[0][0]"),
    ],
)
def test_a_wrong_file_is_an_error_of_one_line(files, capsys, tmp_path, name, facts, named):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(facts))
    claim = path if name == "claim" else files / "true.json"
    options = [] if name == "claim" else ["--fresh", str(path)]
    assert main(["verify", str(claim), "--model", str(files / "model"), *options]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert named in err
    assert len(err.splitlines()) == 1
