"""Data sets in Arrow: this package reads SAELens' files, and SAELens can read ours.

`tests/stores/make_cached.py` made the files of SAELens.
"""

import itertools

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hooks import CacheError, HookedRunner, UnknownNameError
from hooks.base import storage
from interp.store import Activations, HarvestConfig, from_arrow, harvest, to_arrow
from tests.count import ROOT
from tests.reference import variant

HERE = ROOT / "tests" / "stores"
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
        # The store does not name its model, so this check passes with any model.
        store.require_weights_of(variant("pre"))


def test_saelens_reads_the_files(tmp_path):
    """The files are read with the library `datasets`, like SAELens' ActivationsStore reads them.

    The columns have the names of points, and values of the shape [context, d_in].
    """
    model = variant("pre", n_layers=2, n_heads=3)
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, 23, draw.integers(1, 9)).tolist() for _ in range(23)]
    names = {POINT: HOOK, "blocks.0.attn.z": "blocks.0.attn.hook_z"}
    config = HarvestConfig(context=4, pack=True, per_file=10, dtype=torch.float32)
    store = harvest(model, texts, [*names], tmp_path / "store", config=config)
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
        model,
        [[1, 2, 3]] * 2,
        POINT,
        tmp_path / "store",
        config=HarvestConfig(dtype=torch.bfloat16, context=3),
    )
    assert to_arrow(store, tmp_path / "arrow", {POINT: HOOK}) == 2
    written = datasets.load_from_disk(tmp_path / "arrow").with_format("torch")[HOOK][:]
    assert torch.equal(written[1], store.rows(1)[POINT].float())


def test_arguments_that_do_not_fit_are_errors(tmp_path):
    model = variant("pre", n_layers=2)
    for wrong in ({"pos": -1}, {"without": [3]}, {"pool": "max"}):
        store = harvest(model, [[1, 2]], POINT, tmp_path / str(wrong), HarvestConfig(**wrong))
        with pytest.raises(ValueError, match="all tokens of its contexts"):
            to_arrow(store, tmp_path / "arrow", {POINT: HOOK})
    store = harvest(model, [[1, 2]], POINT, tmp_path / "store", config=HarvestConfig(context=2))
    with pytest.raises(UnknownNameError):
        to_arrow(store, tmp_path / "arrow", {"blocks.1.mlp_out": HOOK})
    with pytest.raises(UnknownNameError, match="column of"):
        from_arrow(HERE / "cached", tmp_path / "new", {"blocks.0.hook_resid_post": POINT})
    table = datasets.Dataset.from_dict({HOOK: [[1.0]]})
    table.save_to_disk(tmp_path / "tokenless")
    with pytest.raises(UnknownNameError, match="token_ids"):
        from_arrow(tmp_path / "tokenless", tmp_path / "new")


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_no_store_is_replaced(tmp_path):
    model, out = variant("pre", n_layers=2), tmp_path / "out"
    harvest(model, [[1, 2, 3]] * 2, POINT, out, config=HarvestConfig(per_file=5))
    before = files_of(out)
    with pytest.raises(ValueError, match="a store must continue with the same points; "):
        from_arrow(HERE / "cached", out, {HOOK: POINT}, per_file=5)
    (out / "manifest.json").rename(tmp_path / "manifest.json")
    with pytest.raises(ValueError, match="values-000000.safetensors belongs to another"):
        from_arrow(HERE / "cached", out, per_file=5)
    (tmp_path / "manifest.json").rename(out / "manifest.json")
    assert files_of(out) == before


def test_a_data_set_is_read_again_and_no_other(tmp_path, monkeypatch):
    """After a kill, complete files stay, and missing or damaged files are written again."""
    out, whole = tmp_path / "out", from_arrow(HERE / "cached", tmp_path / "whole", per_file=5)
    save = storage.save

    def killed(path, *arguments):
        if path.name == "values-000001.safetensors":
            raise KeyboardInterrupt
        save(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            from_arrow(HERE / "cached", out, per_file=5)
    with pytest.raises(CacheError, match="must be complete"):
        len(Activations(out))
    assert from_arrow(HERE / "cached", out, per_file=5).checksums == whole.checksums
    before = files_of(out)
    assert len(from_arrow(HERE / "cached", out, per_file=5)) == 96
    assert files_of(out) == before
    table = datasets.load_from_disk(HERE / "cached")
    others = {
        "values": table.map(
            lambda row, n: {HOOK: [[x + (n == 7) for x in xs] for xs in row[HOOK]]},
            with_indices=True,
            features=table.features,
        ),
        "tokens": table.map(
            lambda row, n: {"token_ids": [token + (n == 7) for token in row["token_ids"]]},
            with_indices=True,
            features=table.features,
        ),
        "fewer": table.select(range(10)),
        "cut": table.select(range(11)),
    }
    messages = ("file 1 has other texts",) * 2 + ("had 12, got 10", "file 2 has other texts")
    for (name, other), message in zip(others.items(), messages, strict=True):
        other.save_to_disk(tmp_path / name)
        with pytest.raises(ValueError, match=f"same texts; .*{message}"):
            from_arrow(tmp_path / name, out, per_file=5)
    for wrong in ({"columns": {HOOK: "mine"}}, {"per_file": 4}):
        with pytest.raises(ValueError, match="a store must continue with the same p"):
            from_arrow(HERE / "cached", out, **{"per_file": 5} | wrong)
    assert files_of(out) == before
    torn = out / "values-000002.safetensors"
    torn.write_bytes(torn.read_bytes()[:-3])
    with pytest.raises(ValueError, match="file 2 has other texts"):
        from_arrow(tmp_path / "cut", out, per_file=5)
    assert Activations(out).damaged() == [2]
    assert len(torn.read_bytes()) == len(before[torn.name]) - 3
    assert from_arrow(HERE / "cached", out, per_file=5).damaged() == []
    # A longer data set continues where the shorter one ended.
    assert len(from_arrow(tmp_path / "fewer", tmp_path / "grows", per_file=5)) == 80
    assert from_arrow(HERE / "cached", tmp_path / "grows", per_file=5).checksums == whole.checksums


def test_no_data_set_is_replaced(tmp_path):
    store = harvest(
        variant("pre", n_layers=2),
        [[1, 2]],
        POINT,
        tmp_path / "store",
        config=HarvestConfig(context=2),
    )
    (tmp_path / "empty").mkdir()
    assert to_arrow(store, tmp_path / "empty", {POINT: HOOK}) == 1
    for folder in (tmp_path / "empty", tmp_path / "store"):
        before = files_of(folder)
        with pytest.raises(FileExistsError, match="an empty or a new directory; got"):
            to_arrow(store, folder, {POINT: HOOK})
        assert files_of(folder) == before
