"""Sources of texts: files, tables and arrays give the same texts.

Texts are cut, joined or left out as options say. Stores may be in object stores.
"""

import dataclasses
import gzip
import json

import datasets
import fsspec
import numpy as np
import pytest
import torch

from hooks import CacheError, HookedRunner, HookError, UnknownNameError
from interp import edits, load_sae, splice
from interp.store import Activations, HarvestConfig, harvest, plan
from interp.store.corpora import each
from models import load
from tests.reference import variant
from tests.shipped import pydoc

LINES = ["part one", "", "def f(x):", "part KV8 is sold out"]


def files_of(folder):
    """Write the same texts to files of each format."""
    (folder / "a.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    rows = "".join(json.dumps({"id": n, "text": line}) + "\n" for n, line in enumerate(LINES))
    (folder / "b.jsonl").write_text(rows)
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    (folder / "d-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES[:3]))
    (folder / "d-1.jsonl").write_text(json.dumps(LINES[3]))
    table = datasets.Dataset.from_dict({"text": LINES, "label": [*range(4)]})
    return {
        "lines": str(folder / "a.txt"),
        "objects": folder / "b.jsonl",
        "compressed": str(folder / "c.jsonl.gz"),
        "pattern": str(folder / "d-*.jsonl"),
        "paths": [folder / "d-0.jsonl", folder / "d-1.jsonl"],
        "address": f"file://{folder}/b.jsonl",
        "table": table,
        "stream": table.to_iterable_dataset(),
        "column": table["text"],
        "list": LINES,
    }


def test_every_form_gives_the_same_texts(tmp_path):
    for form, corpus in files_of(tmp_path).items():
        assert [*each(corpus)] == LINES, form


def test_texts_without_tokens_have_no_rows(tmp_path):
    model = variant("pre", n_layers=1)
    store = harvest(
        model, [[], [3, 1], []], "*.mlp_out", tmp_path, config=HarvestConfig(per_file=1)
    )
    assert [file["rows"] for file in store.files] == [0, 2, 0]
    assert [*store.texts()] == [[], [3, 1], []]
    assert store.file(2)["blocks.0.mlp_out"].shape == (0, model.config.d_model)
    assert [len(x) for (x,) in store.batches(5, window=1)] == [2]


def test_edits_are_refused_and_dictionaries_are_part_of_the_model(tmp_path):
    model, name = pydoc(), "blocks.2.resid_post.features"
    edited = HookedRunner(model).hooks({"blocks.1.mlp_out": edits.zero()})
    with edited, pytest.raises(HookError, match="got an edit at blocks.1.mlp_out"):
        harvest(model, LINES, "blocks.2.mlp_out", tmp_path / "edited")
    dictionary = load_sae("pydoc-4l/resid_post")
    with splice(model, dictionary) as runner:
        store = harvest(model, LINES, name, tmp_path / "features")
        alone = runner.capture(LINES[3], names=name)[name][0]
    torch.testing.assert_close(store.rows(3)[name], alone)
    with pytest.raises(CacheError, match="must be from this model; its parts is"):
        store.require_weights_of(model)
    dictionary.b_enc[5] += 0.01
    with splice(model, dictionary), pytest.raises(ValueError, match="same parts"):
        harvest(model, LINES, name, tmp_path / "features")


def test_columns_are_chosen_by_name():
    rows = [{"text": "a", "body": "b", "input_ids": [1]}, {"text": "c", "body": "d"}]
    assert [*each(rows)] == ["a", "c"]
    assert [*each(rows, "body")] == ["b", "d"]
    assert [*each([{"tokens": [3, 1]}])] == [[3, 1]]
    with pytest.raises(UnknownNameError, match="column of the texts"):
        [*each(rows, "bodi")]
    with pytest.raises(UnknownNameError, match="column= selects another"):
        [*each([{"content": "a"}])]


def test_objects_that_are_not_a_corpus_are_errors(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"line 2 of .*bad.jsonl must be JSON"):
        [*each(tmp_path / "bad.jsonl")]
    with pytest.raises(ValueError, match=r"must be one of .txt.*a list with one"):
        [*each("part KV8 is sold out")]
    with pytest.raises(FileNotFoundError, match="no file matches"):
        [*each(str(tmp_path / "none-*.txt"))]
    with pytest.raises(FileNotFoundError):
        [*each(tmp_path / "none.txt")]
    np.save(tmp_path / "flat.npy", np.arange(7))
    with pytest.raises(ValueError, match=r"must be \[text, pos\]; got \[7\]"):
        [*each(tmp_path / "flat.npy")]


def test_arrays_of_tokens(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 23, (11, 6)).astype(np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    fsspec.filesystem("memory").pipe_file("/tokens.npy", (tmp_path / "tokens.npy").read_bytes())
    model = variant("pre", n_layers=2)
    expected = HookedRunner(model).run_with_cache(torch.from_numpy(tokens.astype(int)))[1]
    forms = {"npy": tmp_path / "tokens.npy", "remote": "memory://tokens.npy", "array": tokens}
    forms["tensor"] = torch.from_numpy(tokens.astype(int))
    for form, corpus in forms.items():
        store = harvest(
            model, corpus, "blocks.1.mlp_out", tmp_path / form, config=HarvestConfig(batch=4)
        )
        values = store.file(0)["blocks.1.mlp_out"].view(11, 6, -1)
        torch.testing.assert_close(values, expected["mlp_out", 1], msg=form)


def test_packed_texts_are_read_one_after_another(tmp_path):
    model = variant("pre", n_layers=2).double()
    texts = [[1, 2, 3, 4], [5], [], [6, 7, 8, 9, 10], [11, 12]]
    name = "blocks.1.mlp_out"
    store = harvest(
        model,
        texts,
        name,
        tmp_path,
        config=HarvestConfig(context=5, pack=True, per_file=4, batch=2),
    )
    # Texts of different files are not joined.
    joined = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12]]
    held = [store.file(n) for n in range(2)]
    assert [*store.texts()] == texts
    at = {
        key: torch.cat([file[key] for file in held]).tolist() for key in ("text", "offset", "pos")
    }
    assert at["text"] == [0, 0, 0, 0, 1, 3, 3, 3, 3, 3, 4, 4]
    assert at["offset"] == [0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 0, 1]
    assert at["pos"] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    runs = [HookedRunner(model).run_with_cache(torch.tensor([row]))[1][name][0] for row in joined]
    values = torch.cat([file[name] for file in held])
    torch.testing.assert_close(values, torch.cat(runs), atol=1e-12, rtol=0)
    only = store.rows(1, 0)  # the model read this token at position 4 of a joined text
    assert (only["tokens"].tolist(), only["pos"].tolist()) == ([5], [4])


def test_a_long_text_is_cut_to_the_models_context(tmp_path):
    model = variant("pre", n_layers=1)
    n_ctx = model.config.n_ctx
    text = (torch.arange(2 * n_ctx + 3) % 23).tolist()
    for context in (None, 1000):
        store = harvest(
            model,
            [text],
            "blocks.0.mlp_out",
            tmp_path / str(context),
            config=HarvestConfig(context=context),
        )
        assert store.file(0)["pos"].tolist() == [n % n_ctx for n in range(len(text))]
        assert store.manifest["context"] == n_ctx


@pytest.mark.parametrize("pack", [False, True])
def test_tokens_and_positions_are_left_out(pack, tmp_path):
    model, name = variant("pre", n_layers=2).double(), "blocks.1.mlp_out"
    texts = [[0, 2, 3, 0], [0], [0, 5, 6, 7, 8, 9, 3]]
    options = {"context": 5, "pack": pack, "batch": 2}
    whole = harvest(model, texts, name, tmp_path / "whole", config=HarvestConfig(**options)).file(0)
    cases = {
        "bos": ({"without": [0]}, whole["tokens"] != 0),
        "several": ({"without": [0, 3]}, ~torch.isin(whole["tokens"], torch.tensor([0, 3]))),
        "first": ({"pos": slice(1, None)}, whole["pos"] > 0),
        "some": ({"pos": [2, 4, 99]}, torch.isin(whole["pos"], torch.tensor([2, 4]))),
        "both": (
            {"pos": slice(1, 3), "without": [5]},
            (whole["pos"] > 0) & (whole["pos"] < 3) & (whole["tokens"] != 5),
        ),
        "none": ({"without": [*range(23)]}, torch.zeros(len(whole["pos"]), dtype=torch.bool)),
    }
    after = [*whole["pos"].tolist()[1:], 0]
    cases["last"] = ({"pos": -1}, torch.tensor(after) == 0)
    for case, (more, kept) in cases.items():
        store = harvest(
            model, texts, name, tmp_path / case, config=HarvestConfig(**options, **more)
        )
        assert (
            plan(model, texts, name, tmp_path, HarvestConfig(**options, **more)).rows
            == len(store)
            == int(kept.sum())
        )
        for key, value in store.file(0).items():
            torch.testing.assert_close(value, whole[key][kept], msg=f"{case}, {key}")
    for own in ([[1], [0], [2]], [[1]]):
        with pytest.raises(ValueError, match="pos must be the same in each piece"):
            harvest(model, texts, name, tmp_path / "own", config=HarvestConfig(pos=own, **options))


@pytest.mark.parametrize("pool", ["mean", "max"])
def test_pooled_rows_are_of_whole_pieces(pool, tmp_path):
    model, name = variant("pre", n_layers=2, n_heads=3).double(), "blocks.1.attn.z"
    texts = [[0, 2, 3, 0], [0], [4], [0, 5, 6, 7, 8, 9, 3]]
    options = {"context": 5, "batch": 3}
    whole = harvest(model, texts, name, tmp_path / "whole", config=HarvestConfig(**options)).file(0)
    store = harvest(
        model,
        texts,
        name,
        tmp_path / "pooled",
        config=HarvestConfig(pool=pool, without=[0], **options),
    )
    held, function = store.file(0), {"mean": torch.mean, "max": torch.amax}[pool]
    # The rows of each context in the whole store. Text 1 contains only BOS, so it has no rows.
    pieces = [[1, 2], [5], [7, 8, 9, 10], [11, 12]]
    expected = torch.stack([function(whole[name][rows], 0) for rows in pieces])
    torch.testing.assert_close(held[name], expected)
    assert held["text"].tolist() == [0, 2, 3, 3]
    assert held["offset"].tolist() == [2, 0, 4, 6]
    assert held["tokens"].tolist() == [3, 4, 8, 3]
    assert (
        plan(model, texts, name, config=HarvestConfig(pool=pool, without=[0], **options)).rows == 4
    )
    with pytest.raises(ValueError, match="a single text each"):
        harvest(model, texts, name, tmp_path / "wrong", config=HarvestConfig(pool=pool, pack=True))


def test_values_that_a_dtype_cannot_hold_are_refused(tmp_path):
    model, name = variant("pre", n_layers=1), "blocks.0.mlp_out"
    with torch.no_grad():
        model.blocks[0].mlp.output.bias += 1e5
    with pytest.raises(ValueError, match=r"torch.float16 at blocks.0.mlp_out"):
        harvest(model, [[1, 2]], name, tmp_path / "half", config=HarvestConfig(dtype=torch.float16))
    store = harvest(
        model, [[1, 2]], name, tmp_path / "brain", config=HarvestConfig(dtype=torch.bfloat16)
    )
    assert store.file(0)[name].dtype == torch.bfloat16


def test_a_manifest_has_the_settings_in_the_form_of_earlier_stores(tmp_path):
    """A store that an earlier commit began can be continued only if all entries are the same."""
    model = variant("pre", n_layers=1)
    config = HarvestConfig(
        dtype=torch.float16,
        context=3,
        pack=True,
        pos=slice(1, None),
        without=[7, 4],
        column="body",
        batch=2,
        per_file=5,
    )
    store = harvest(model, [{"body": [1, 2]}], "blocks.0.mlp_out", tmp_path / "packed", config)
    facts = ("format", "points", "model", "config", "weights", "parts", "texts", "files")
    assert {name: value for name, value in store.manifest.items() if name not in facts} == {
        "dtype": "torch.float16",
        "context": 3,
        "pack": True,
        "pos": "slice(1, None, None)",
        "without": [4, 7],
        "pool": None,
        "column": "body",
        "batch": 2,
        "per_file": 5,
    }
    config = HarvestConfig(pool="mean")
    store = harvest(model, [[1, 2]], "blocks.0.mlp_out", tmp_path / "pooled", config)
    assert {name: value for name, value in store.manifest.items() if name not in facts} == {
        "dtype": None,
        "context": model.config.n_ctx,
        "pack": False,
        "pos": None,
        "without": [],
        "pool": "mean",
        "column": None,
        "batch": 16,
        "per_file": 64,
    }


def test_errors_about_keywords_of_earlier_commits_name_the_config(tmp_path):
    model = variant("pre", n_layers=1)
    for field in dataclasses.fields(HarvestConfig):
        for call in (harvest, plan):
            match = rf"{field.name}=; use config=HarvestConfig\({field.name}=\.\.\.\)$"
            with pytest.raises(TypeError, match=match):
                call(model, [[1]], "blocks.0.mlp_out", tmp_path, **{field.name: 1})


@pytest.mark.usefixtures("unchecked")
def test_unknown_settings_are_refused(tmp_path):
    model = variant("pre", n_layers=1)
    for wrong, message in (
        ({"pool": "sum"}, "got .sum"),
        ({"context": 0}, "context .*got 0"),
        ({"per_file": 0}, "per_file must be"),
        ({"batch": -1}, "batch must be"),
    ):
        with pytest.raises(ValueError, match=message):
            HarvestConfig(**wrong)
    with pytest.raises(TypeError, match="HarvestConfig .*contxt=.*: context"):
        HarvestConfig(contxt=3)
    for call in (harvest, plan):
        for wrong in (128, {"context": 128}):
            with pytest.raises(TypeError, match=r"config must .*HarvestConfig; got .*128"):
                call(model, [[1]], "blocks.0.mlp_out", tmp_path, wrong)
    with pytest.raises(TypeError, match="executor must have submit.* got 'dask'"):
        harvest(model, [[1]], "blocks.0.mlp_out", tmp_path, executor="dask")
    with pytest.raises(TypeError, match="no argument engine=; use executor="):
        harvest(model, [[1]], "blocks.0.mlp_out", tmp_path, engine=None)
    with pytest.raises(TypeError, match="models.load.* got str"):
        harvest(lambda: "gpt2", [[1]], "blocks.0.mlp_out", tmp_path)


@pytest.mark.usefixtures("unchecked")
def test_a_dtype_in_words_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(TypeError, match="dtype must be .*got 'float16'"):
        harvest(
            pydoc(),
            ["a"],
            "blocks.0.mlp_out",
            tmp_path / "new",
            config=HarvestConfig(dtype="float16"),
        )
    assert not [*tmp_path.iterdir()]


DTYPES = sorted(
    {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str
)
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def test_a_dtype_that_would_cut_numbers_off_is_refused_before_anything_runs():
    assert {torch.int8, torch.bool, torch.complex64, torch.float8_e8m0fnu} <= {*DTYPES} - FLOATS
    for dtype in {*DTYPES} - FLOATS:
        with pytest.raises(ValueError, match=f"a float of 16 bits or more; got {dtype}$"):
            HarvestConfig(dtype=dtype)


def test_models_may_come_by_a_function(tmp_path):
    made = harvest(lambda: load("pydoc-4l"), LINES, "blocks.1.mlp_out", tmp_path / "made")
    given = harvest(pydoc(), LINES, "blocks.1.mlp_out", tmp_path / "given")
    assert made.checksums == given.checksums
    assert [*map(len, given.texts())] == [8, 0, 9, 20]


def test_a_listing_that_is_kept_is_not_trusted(monkeypatch):
    """File systems of object stores keep old listings of folders, although other jobs have written.

    The store must ask for a new listing.
    """
    kept, system = {}, type(fsspec.filesystem("memory"))
    listed = system.ls
    monkeypatch.setattr(
        system, "ls", lambda self, path, **more: kept.setdefault(path, listed(self, path, **more))
    )
    monkeypatch.setattr(system, "invalidate_cache", lambda self, path=None: kept.clear())
    model, out = variant("pre", n_layers=1), "memory://listed"
    for job in (1, 0):
        store = harvest(
            model, [[1], [2]], "*.mlp_out", out, config=HarvestConfig(per_file=1), shard=(job, 2)
        )
    assert len(store) == 2


def test_stores_stand_in_object_stores(tmp_path):
    model, name, out = variant("pre", n_layers=2), "blocks.1.mlp_out", "memory://corpora/store"
    texts = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
    local = harvest(model, texts, name, tmp_path, config=HarvestConfig(per_file=1))
    for job in (1, 0):
        store = harvest(model, texts, name, out, config=HarvestConfig(per_file=1), shard=(job, 2))
    assert store.checksums == local.checksums
    fs = fsspec.filesystem("memory")
    whole = fs.cat_file("/corpora/store/values-000002.safetensors")
    fs.pipe_file("/corpora/store/values-000002.safetensors", whole[:-3])
    fs.rm_file("/corpora/store/values-000001.safetensors")
    assert Activations(out).damaged() == [1, 2]
    before = fs.info("/corpora/store/values-000000.safetensors")["created"]
    store = harvest(model, texts, name, out, config=HarvestConfig(per_file=1))
    assert store.damaged() == []
    assert fs.info("/corpora/store/values-000000.safetensors")["created"] == before
    batches = [
        torch.cat(each) for each in zip(*store.batches(4, names=["text", name]), strict=True)
    ]
    assert sorted(batches[0].tolist()) == [0, 0, 0, 1, 1, 2, 3, 3, 3, 3]
    torch.testing.assert_close(store.rows(3)[name], local.rows(3)[name])
    assert plan(model, texts, name, out).free is None
