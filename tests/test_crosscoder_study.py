"""The example that trains a crosscoder from two stores, on a few steps."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from interp.features import load_crosscoder
from interp.store import Activations, harvest
from tests.shipped import pydoc

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = "--steps 3 --tuning-steps 2 --texts 20 --features 48 --k 5 --seed 1"


@pytest.fixture
def study(monkeypatch):
    for folder in (EXAMPLES, EXAMPLES / "studies"):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "crosscoder", raising=False)
    return import_module("crosscoder")


def test_the_study_writes_a_crosscoder_that_loads(study, tmp_path, capsys):
    assert study.main([*SMALL.split(), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "explained variance of base" in printed
    assert "truly belong to tuned" in printed
    made = load_crosscoder(tmp_path, names=["base", "tuned"])
    assert made.points == ("blocks.2.resid_post",) * 2
    assert (made.n_features, made.d_model) == (48, 128)
    assert json.loads((tmp_path / "config.json").read_text())["trainer"]["k"] == 5
    # The models differ, and both stores have the same rows.
    rows = [next(Activations(tmp_path / name).batches(64, None)) for name in ("base", "tuned")]
    assert not torch.equal(rows[0][0], rows[1][0])
    # Formula of the library for the saved tensors.
    saved = torch.load(tmp_path / "ae.pt", weights_only=True)
    values = [row[0] for row in rows]
    x = torch.stack(values, 1) - saved["activation_mean"]
    x = x * saved["activation_global_scale"][:, None]
    pre = torch.einsum("rmd,mdf->rf", x, saved["encoder.weight"]) + saved["encoder.bias"]
    scores = pre.relu() * saved["decoder.weight"].norm(dim=2).sum(0)
    wanted = pre.relu() * (scores > saved["threshold"])
    assert_close(made.encode(values), wanted, atol=1e-5, rtol=1e-5)
    assert saved["threshold"] > 0


def test_the_training_keeps_k_features_and_lowers_the_error(study, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "ROWS", 256)
    model = pydoc()
    text = torch.tensor(model.tokenizer.encode("def f(x): return x\n" * 90))
    texts = text.unfold(0, 64, 19)[:70]
    stores = [harvest(model, texts, [study.POINT], tmp_path / name) for name in ("one", "two")]
    few, many = (study.fit(stores, 48, 5, steps, seed=0) for steps in (2, 200))
    values = next(study.pairs(stores, 512, seed=3))
    errors = []
    for tensors in (few, many):
        scale = tensors["activation_global_scale"][:, None]
        x = (torch.stack(values, 1) - tensors["activation_mean"]) * scale
        pre = torch.einsum("rmd,mdf->rf", x, tensors["encoder.weight"]) + tensors["encoder.bias"]
        norms = tensors["decoder.weight"].norm(dim=2).sum(0)
        features = pre.relu() * (pre.relu() * norms > tensors["threshold"])
        output = study.decoded(features, tensors) + tensors["decoder.bias"]
        errors.append(float((x - output).square().sum(2).mean()))
    assert (features != 0).sum(1).float().mean() == pytest.approx(5, abs=1.5)
    assert errors[1] < 0.5 * errors[0]
    # Equal models have equal decoders.
    assert_close(many["decoder.weight"][0], many["decoder.weight"][1])


def test_stores_of_other_texts_are_an_error(study, tmp_path):
    model = pydoc()
    stores = [
        harvest(model, [word * 40], [study.POINT], tmp_path / word) for word in ("abc", "abd")
    ]
    with pytest.raises(ValueError, match="both stores must have the same texts"):
        next(study.pairs(stores, 16, seed=0))
