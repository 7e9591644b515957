"""Data sets in Arrow: those that SAELens wrote are read, and what is written is what it reads (`tests/stores/make_cached.py`)."""

import itertools
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hooks import HookedRunner, UnknownNameError
from interp.store import from_arrow, harvest, to_arrow
from tests.reference import variant

HERE = Path(__file__).parent / "stores"
HOOK, POINT = "blocks.1.hook_resid_post", "blocks.1.resid_post"


def test_a_data_set_of_saelens_is_read(tmp_path):
    expected = load_file(HERE / "expected.safetensors")
    for columns, name in ((None, POINT), ({HOOK: "mine"}, "mine")):
        store = from_arrow(HERE / "cached", tmp_path / name, columns, per_file=5)
        assert store.names == [name]
        assert len(store) == 96
        values = torch.cat([store.file(n)[name] for n in range(3)])
        assert torch.equal(values.view(12, 8, 16), expected[HOOK])
        assert [*store.texts()] == expected["token_ids"].tolist()
        assert store.rows(7, 3)["pos"].tolist() == [3]
        assert store.damaged() == []
        store.require_weights_of(variant("pre"))  # it does not say of which model it is


def test_what_is_written_is_what_saelens_reads(tmp_path):
    """As its ActivationsStore does, by `datasets`: columns by name, of a shape [context, d_in]."""
    model = variant("pre", n_layers=2, n_heads=3)
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, 23, draw.integers(1, 9)).tolist() for _ in range(23)]
    names = {POINT: HOOK, "blocks.0.attn.z": "blocks.0.attn.hook_z"}
    options = {"context": 4, "pack": True, "per_file": 10}
    store = harvest(model, texts, [*names], tmp_path / "store", dtype=torch.float32, **options)
    with pytest.raises(ValueError, match=r"must have 4 tokens; \d of \d+ have fewer"):
        to_arrow(store, tmp_path / "arrow", names)
    n = to_arrow(store, tmp_path / "arrow", names, drop_short=True)
    table = datasets.load_from_disk(tmp_path / "arrow")
    assert table.features[HOOK].shape == (4, model.config.d_model)
    assert table.features["blocks.0.attn.hook_z"].dtype == "float32"
    joined = [[*itertools.chain(*texts[first : first + 10])] for first in (0, 10, 20)]
    full = [row[at : at + 4] for row in joined for at in range(0, len(row) - 3, 4)]
    assert table["token_ids"][:] == full
    assert n == len(full)
    caches = [model_cache(model, row) for row in full]
    for name, column in names.items():
        expected = torch.stack([cache[name][0].flatten(1) for cache in caches]).float()
        torch.testing.assert_close(table.with_format("torch")[column][:], expected)
    again = from_arrow(tmp_path / "arrow", tmp_path / "again", {HOOK: POINT})
    rows = again.rows(len(full) - 1, names=[POINT])[POINT]
    torch.testing.assert_close(rows, caches[-1][POINT][0].float())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "arrow", "store"]


def model_cache(model, row):
    return HookedRunner(model).run_with_cache(torch.tensor([row]))[1]


def test_half_precision_is_written_as_float32(tmp_path):
    model = variant("pre", n_layers=2)
    store = harvest(
        model, [[1, 2, 3]] * 2, POINT, tmp_path / "store", dtype=torch.bfloat16, context=3
    )
    assert to_arrow(store, tmp_path / "arrow", {POINT: HOOK}) == 2
    written = datasets.load_from_disk(tmp_path / "arrow").with_format("torch")[HOOK][:]
    assert torch.equal(written[1], store.rows(1)[POINT].float())


def test_what_does_not_fit_is_refused(tmp_path):
    model = variant("pre", n_layers=2)
    for wrong in ({"pos": -1}, {"without": [3]}, {"pool": "max"}):
        store = harvest(model, [[1, 2]], POINT, tmp_path / str(wrong), **wrong)
        with pytest.raises(ValueError, match="contexts need all their tokens"):
            to_arrow(store, tmp_path / "arrow", {POINT: HOOK})
    store = harvest(model, [[1, 2]], POINT, tmp_path / "store", context=2)
    with pytest.raises(UnknownNameError):
        to_arrow(store, tmp_path / "arrow", {"blocks.1.mlp_out": HOOK})
    with pytest.raises(UnknownNameError, match="column of"):
        from_arrow(HERE / "cached", tmp_path / "new", {"blocks.0.hook_resid_post": POINT})
    table = datasets.Dataset.from_dict({HOOK: [[1.0]]})
    table.save_to_disk(tmp_path / "tokenless")
    with pytest.raises(UnknownNameError, match="token_ids"):
        from_arrow(tmp_path / "tokenless", tmp_path / "new")
