"""Tests of stores: the stored values of a text equal those of a run with only this text.

The files of a store do not depend on the number of jobs, or on jobs that were killed.
"""

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch

from hooks import CacheError, HookedRunner, UnknownNameError
from hooks.base import storage
from interp.store import Activations, HarvestConfig, harvest, plan, rows
from tests.reference import variant
from tests.shipped import pydoc

NAMES = ["blocks.0.ln2.normalized", "blocks.0.mlp_out", "blocks.1.attn.z"]


def model_and_texts(count=23):
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, 23, draw.integers(1, 9)).tolist() for _ in range(count)]
    return variant("pre", n_layers=2, n_heads=3).double(), texts


def made(model, texts, out, shard=(0, 1), **settings):
    config = HarvestConfig(batch=3, per_file=5, **settings)
    return harvest(model, texts, NAMES, out, config, shard=shard)


def changed_call(call, change):
    """Return the arguments of a call of `harvest` with some arguments or settings changed."""
    arguments = {name: value for name, value in change.items() if name in (*call, "out")}
    settings = {name: value for name, value in change.items() if name not in arguments}
    return {**call, "config": dataclasses.replace(call["config"], **settings), **arguments}


def contents(folder):
    """Return the content of each complete file: its metadata, and the bytes of each tensor."""
    found = {}
    for path in Path(folder).glob("values-*.safetensors"):
        with safetensors.safe_open(path, framework="np") as file:
            arrays = {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
            found[path.name] = file.metadata(), arrays
    return found


@pytest.mark.parametrize("causal", [True, False])
def test_values_match_each_text_alone(causal, tmp_path):
    _, texts = model_and_texts()
    model = variant("pre", n_layers=2, n_heads=3, causal=causal).double()
    store = made(model, iter(texts), tmp_path)
    assert store.names == NAMES
    assert [file["rows"] for file in store.files] == [
        sum(map(len, texts[n : n + 5])) for n in range(0, 23, 5)
    ]
    assert repr(store) == f"Activations of 3 points, {sum(map(len, texts))} rows of 23 texts"
    alone = [HookedRunner(model).run_with_cache(torch.tensor([text]))[1] for text in texts]
    # Read the files with a library that does not know this package.
    files = [safetensors.numpy.load_file(path) for path in sorted(tmp_path.glob("values-*"))]
    for name in NAMES:
        expected = np.concatenate([cache[name][0].numpy() for cache in alone])
        np.testing.assert_allclose(
            np.concatenate([file[name] for file in files]), expected, atol=1e-9
        )
    rows = [(token, n, pos, pos) for n, text in enumerate(texts) for pos, token in enumerate(text)]
    keys = ("tokens", "text", "offset", "pos")
    found = [np.concatenate([file[key] for file in files]).tolist() for key in keys]
    assert [*zip(*found, strict=True)] == rows
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["points"]["blocks.1.attn.z"] == ["head", "d_head"]
    assert [file["first"] for file in manifest["files"]] == [0, 5, 10, 15, 20]
    assert manifest["files"][4]["texts"] == 3
    described = manifest["files"][1]["tensors"]
    assert described["blocks.1.attn.z"] == ["float64", 3, model.config.d_head]
    assert described["text"] == ["int32"]


def test_several_jobs_write_the_files_of_one_job(tmp_path):
    model, texts = model_and_texts()
    made(model, texts, tmp_path / "one")
    for job in (2, 0):
        store = made(model, texts, tmp_path / "three", shard=(job, 3))
        assert repr(store) == "Activations of 3 points, not complete"
        with pytest.raises(CacheError, match=r"\d of 5 files .*, the first is .*: repeat the same"):
            len(store)
    made(model, texts, tmp_path / "three", shard=(1, 3))
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    one, other = (
        json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("one", "three")
    )
    assert one == other
    assert len({str(file["checksums"]) for file in one["files"]}) == 5
    assert len(Activations(tmp_path / "three")) == sum(map(len, texts))


def test_a_store_without_a_finished_job_says_to_repeat_the_call(tmp_path):
    model, texts = model_and_texts()
    made(model, texts, tmp_path, shard=(0, 2))
    # A job that is killed does not write this file.
    next(tmp_path.glob("done-*.json")).unlink()
    with pytest.raises(CacheError, match="no job of .* has finished: repeat the same harvest call"):
        len(Activations(tmp_path))
    made(model, texts, tmp_path, shard=(0, 2))
    made(model, texts, tmp_path, shard=(1, 2))
    assert len(Activations(tmp_path)) == sum(map(len, texts))


def test_only_missing_or_damaged_files_are_written_again(tmp_path):
    model, texts = model_and_texts()
    made(model, texts, tmp_path)
    before = contents(tmp_path)
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("values-*")}
    (tmp_path / "values-000001.safetensors").unlink()
    torn, flipped = tmp_path / "values-000002.safetensors", tmp_path / "values-000003.safetensors"
    torn.write_bytes(torn.read_bytes()[:-9])
    bytes_ = bytearray(flipped.read_bytes())
    bytes_[-5] ^= 1
    flipped.write_bytes(bytes_)
    (tmp_path / "values-000002.safetensors.1f.partial").write_bytes(b"of a job that was killed")
    made(model, texts, tmp_path)
    assert contents(tmp_path) == before
    assert not [*tmp_path.glob("*.partial")]
    for n in (0, 4):
        name = f"values-00000{n}.safetensors"
        assert (tmp_path / name).stat().st_mtime_ns == times[name]


def test_two_processes_may_do_the_same_job(tmp_path, monkeypatch):
    """Two processes of a split model do the same job. One of them ends and removes partial files
    while the other one writes its last file.
    """
    model, texts = model_and_texts()
    whole = made(model, texts, tmp_path / "whole")
    save = storage.save

    def overtaken(path, *arguments):
        if path.name == "values-000004.safetensors":
            save(path, *arguments)
            raise FileNotFoundError("the unfinished file is gone")
        save(path, *arguments)

    monkeypatch.setattr(storage, "save", overtaken)
    assert made(model, texts, tmp_path / "both").checksums == whole.checksums

    def gone(path, *arguments):
        raise FileNotFoundError("the directory is gone")

    monkeypatch.setattr(storage, "save", gone)
    with pytest.raises(FileNotFoundError, match="directory is gone"):
        made(model, texts, tmp_path / "gone")


def test_another_model_text_or_setting_is_refused(tmp_path):
    model, texts = model_and_texts()
    made(model, texts, tmp_path)
    changed = [*texts[:7], [1, 2], *texts[8:]]
    with pytest.raises(ValueError, match="same texts; file 1 has other texts"):
        made(model, changed, tmp_path)
    with pytest.raises(ValueError, match="same dtype; .* has None, got 'torch.float16'"):
        made(model, texts, tmp_path, dtype=torch.float16)
    with pytest.raises(ValueError, match="same points"):
        harvest(model, texts, NAMES[:2], tmp_path, config=HarvestConfig(batch=3, per_file=5))
    with torch.no_grad():
        model.blocks[1].attn.W_Q[2, 3, 1] += 1e-9
    with pytest.raises(ValueError, match="same weights"):
        made(model, texts, tmp_path)
    for shard in ((3, 3), (-1, 2)):
        with pytest.raises(ValueError, match="0 <= job < jobs"):
            made(model, texts, tmp_path / "other", shard=shard)
    with pytest.raises(ValueError, match="at least one text"):
        made(model, [], tmp_path / "empty")
    with pytest.raises(ValueError, match=r"\[batch pos\].*got blocks.0.attn.pattern"):
        harvest(model, texts, "blocks.0.attn.pattern", tmp_path / "pattern")
    with pytest.raises(UnknownNameError):
        harvest(model, texts, "blocks.9.mlp_out", tmp_path / "none")


def test_texts_are_cut_into_pieces(tmp_path):
    model, _ = model_and_texts()
    texts = [[1, 2, 3, 4, 5, 6, 7], [8, 9]]
    cut = harvest(
        model,
        texts,
        NAMES[1],
        tmp_path / "cut",
        config=HarvestConfig(context=3, dtype=torch.bfloat16),
    )
    whole = harvest(model, [[1, 2, 3], [4, 5, 6], [7], [8, 9]], NAMES[1], tmp_path / "whole")
    one, other = cut.file(0), whole.file(0)
    assert one["text"].tolist() == [0] * 7 + [1, 1]
    assert one["offset"].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert one["pos"].tolist() == [0, 1, 2, 0, 1, 2, 0, 0, 1]
    assert torch.equal(one[NAMES[1]], other[NAMES[1]].bfloat16())


@pytest.mark.parametrize("context", [None, 3])
def test_a_plan_counts_the_bytes(context, tmp_path, monkeypatch):
    model, texts = model_and_texts()
    options = {"dtype": torch.float16, "context": context}
    planned = plan(model, iter(texts), NAMES, tmp_path, config=HarvestConfig(batch=3, **options))
    store = harvest(model, texts, NAMES, tmp_path, config=HarvestConfig(batch=3, **options))
    files = [safetensors.numpy.load_file(path) for path in tmp_path.glob("values-*")]
    assert planned.bytes == sum(array.nbytes for file in files for array in file.values())
    assert planned.tokens == len(store)
    assert repr(store).endswith(f"of {planned.texts} texts")
    assert planned.seconds > 0
    assert planned.fits
    assert " GB in 1 file, which fits on the disk; about " in repr(planned)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    assert "but the disk has room for only 1e-07 GB" in repr(plan(model, texts, NAMES, tmp_path))
    with pytest.raises(ValueError, match="at least one text"):
        plan(model, [], NAMES)


def test_batches_have_each_row_once(tmp_path):
    model, texts = model_and_texts(40)
    store = made(model, texts, tmp_path)
    tokens, rows = torch.cat([store.file(n)["tokens"] for n in range(8)]), len(store)
    places = torch.cat(
        [torch.stack([store.file(n)[key] for key in ("text", "pos")], 1) for n in range(8)]
    )
    values = torch.cat([store.file(n)[NAMES[1]] for n in range(8)])
    every = {tuple(place): n for n, place in enumerate(places.tolist())}
    orders = []
    for seed, window in ((0, 3), (0, 3), (1, 3), (0, 8), (None, 3)):
        asked = ["text", NAMES[1], "pos", "tokens"]
        batches = [*store.batches(16, seed, asked, window=window)]
        assert [len(batch[0]) for batch in batches] == [16] * (rows // 16) + [rows % 16]
        text, value, pos, token = (torch.cat(each) for each in zip(*batches, strict=True))
        order = [every[place] for place in zip(text.tolist(), pos.tolist(), strict=True)]
        assert sorted(order) == [*range(rows)]
        assert torch.equal(value, values[order])
        assert torch.equal(token, tokens[order])
        orders.append(order)
    assert orders[0] == orders[1] != orders[2]
    assert orders[4] == [*range(rows)]
    # Rows that follow each other in a batch rarely follow each other in a text.
    assert np.mean(np.diff(orders[3]) == 1) < 0.05
    parts = [
        torch.cat([x for (x,) in store.batches(7, 0, ["text"], window=2, part=(n, 3))])
        for n in range(3)
    ]
    assert sorted(torch.cat(parts).tolist()) == sorted(places[:, 0].tolist())
    assert not {*parts[0].tolist()} & {*parts[1].tolist()}
    for names in ("blocks.0.mlp_oot", ["blocks.0.mlp_oot"]):
        with pytest.raises(UnknownNameError, match="point of this store is named 'blocks.0.mlp_oo"):
            next(store.batches(3, names=names))
    for wrong in ({"size": 0}, {"size": 2, "window": 0}, {"size": 2, "epochs": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            next(store.batches(**wrong))


def test_one_name_is_a_list_of_one_name(tmp_path):
    model, texts = model_and_texts()
    store = made(model, texts, tmp_path)
    one = {"names": NAMES[1]}
    (alone,) = next(store.batches(5, None, **one))
    assert torch.equal(alone, store.file(0)[NAMES[1]][:5])
    assert store.file(0, **one).keys() == store.rows(0, **one).keys() == {NAMES[1]}
    assert len(next(iter(store.dataset(5, **one)))) == 1
    assert [*store.statistics(**one)] == [NAMES[1]]
    for read in (store.statistics, partial(store.file, 0), partial(store.rows, 0)):
        with pytest.raises(ValueError, match=r"at least one point.*\[\]"):
            read(names=[])
    with pytest.raises(ValueError, match="at least one point"):
        next(store.batches(5, names=[]))


PLAIN = """
import glob, json, sys
import numpy as np
from safetensors.numpy import load_file
manifest = json.load(open(sys.argv[1] + "/manifest.json"))
files = [load_file(path) for path in sorted(glob.glob(sys.argv[1] + "/values-*.safetensors"))]
assert [len(file["tokens"]) for file in files] == [file["rows"] for file in manifest["files"]]
assert not {"torch", "hooks", "interp"} & {*sys.modules}
print(sum(len(file["text"]) for file in files), float(files[0]["blocks.0.mlp_out"][0, 0]))
"""


def test_plain_libraries_read_it(tmp_path):
    model, texts = model_and_texts()
    store = made(model, texts, tmp_path)
    command = [sys.executable, "-c", PLAIN, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    first = float(store.file(0)["blocks.0.mlp_out"][0, 0])
    assert done.stdout.split() == [str(len(store)), str(first)], done.stderr


def test_a_folder_without_a_store_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no store at .*: it has no manifest.json"):
        Activations(tmp_path / "none")


def test_files_are_drawn_too(tmp_path):
    model, texts = model_and_texts(40)
    store = made(model, texts, tmp_path)
    firsts = [next(store.batches(1, seed, ["text"], window=1))[0].item() // 5 for seed in range(12)]
    assert len({*firsts}) > 3


def test_epochs_differ_and_need_not_end(tmp_path):
    model, texts = model_and_texts()
    store = made(model, texts, tmp_path)
    places = [n for n, text in enumerate(texts) for _ in text]
    two = torch.cat([x for (x,) in store.batches(7, 0, ["text"], epochs=2)]).tolist()
    first, second = two[: len(places)], two[len(places) :]
    assert sorted(first) == sorted(second) == places
    assert first != second
    endless = store.batches(7, 0, ["text"], epochs=None)
    seen = [next(endless)[0] for _ in range(-(-len(places) // 7) * 3)]
    assert sorted(torch.cat(seen).tolist()) == sorted(places * 3)
    with pytest.raises(ValueError, match="reader 7 has none"):
        next(store.batches(7, epochs=None, part=(7, 9)))


def test_the_shuffle_is_as_good_as_documented(tmp_path):
    """Count the pairs of rows in a batch that come from the same file. A full shuffle has a certain
    number of them. The local shuffle has at most this number times files / window.
    """
    model, texts = model_and_texts(200)
    store = made(model, texts, tmp_path)
    sizes = np.array([file["rows"] for file in store.files])
    by_chance = ((sizes / sizes.sum()) ** 2).sum()
    for window in (4, 20, 40):
        shares = []
        for seed in range(6):
            for (text,) in store.batches(25, seed, ["text"], window=window):
                file = text.numpy() // 5
                shares.append((file[:, None] == file)[np.triu_indices(len(file), 1)].mean())
        assert np.mean(shares) / by_chance < 1.1 * 40 / window
        assert window == 40 or np.mean(shares) / by_chance > 0.8 * 40 / window


def test_jobs_with_other_texts_are_errors(tmp_path):
    model, texts = model_and_texts()
    made(model, texts[:10], tmp_path, shard=(0, 2))
    with pytest.raises(ValueError, match="same texts; other jobs had 10, got 23"):
        made(model, texts, tmp_path, shard=(1, 2))
    made(model, texts, tmp_path, shard=(0, 2))
    assert len(made(model, texts, tmp_path, shard=(1, 2))) == sum(map(len, texts))


def test_rows_of_a_text(tmp_path):
    model, texts = model_and_texts()
    store = made(model, texts, tmp_path)
    assert [*store.texts()] == texts
    for n in (0, 4, 5, 22):
        _, cache = HookedRunner(model).run_with_cache(torch.tensor([texts[n]]))
        rows = store.rows(n, names=[NAMES[1], "tokens"])
        assert rows["tokens"].tolist() == texts[n]
        torch.testing.assert_close(rows[NAMES[1]], cache[NAMES[1]][0], atol=1e-9, rtol=0)
        last = store.rows(n, len(texts[n]) - 1)
        assert last["tokens"].tolist() == texts[n][-1:]
        torch.testing.assert_close(last[NAMES[2]], cache[NAMES[2]][0, -1:], atol=1e-9, rtol=0)
    for wrong in (-1, 23):
        with pytest.raises(IndexError, match="text must be from 0 to 22"):
            store.rows(wrong)
    with pytest.raises(IndexError, match="no row for offset 8"):
        store.rows(3, 8)


def test_damage_is_found_by_reading_all(tmp_path):
    model, texts = model_and_texts()
    store = made(model, texts, tmp_path)
    assert store.damaged() == []
    path = tmp_path / "values-000003.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    (tmp_path / "values-000001.safetensors").unlink()
    assert store.damaged() == [1, 3]
    path.write_bytes(whole[:100])
    with pytest.raises(CacheError, match="harvest again"):
        store.file(3)
    with pytest.raises(FileNotFoundError):
        store.file(1)
    assert made(model, texts, tmp_path).damaged() == []


def test_loaders_share_the_rows(tmp_path):
    model, texts = model_and_texts(40)
    store = made(model, texts, tmp_path)
    expected = sorted(n for n, text in enumerate(texts) for _ in text)
    for workers in (0, 2):
        loader = torch.utils.data.DataLoader(
            store.dataset(7, names=["text"], window=2), batch_size=None, num_workers=workers
        )
        assert sorted(torch.cat([batch for (batch,) in loader]).tolist()) == expected


def test_ranks_share_the_rows(tmp_path, monkeypatch):
    model, texts = model_and_texts(40)
    store, seen = made(model, texts, tmp_path), []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    for rank in range(3):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        seen += torch.cat([batch for (batch,) in store.dataset(7, names=["text"])]).tolist()
    assert sorted(seen) == sorted(n for n, text in enumerate(texts) for _ in text)


def test_moments_match_numpy(tmp_path):
    model, texts = model_and_texts()
    store = made(model, texts, tmp_path)
    for name in NAMES[1:]:
        values = np.concatenate([store.file(n)[name].flatten(1).numpy() for n in range(5)])
        moments = store.moments(name)
        assert moments.n == len(values)
        np.testing.assert_allclose(moments.mean, values.mean(0), atol=1e-12)
        np.testing.assert_allclose(moments.covariance, np.cov(values.T, bias=True), atol=1e-12)


def test_a_full_disk_is_an_error_and_leaves_no_partial_file(tmp_path, monkeypatch):
    model, texts = model_and_texts()
    usage = shutil.disk_usage(tmp_path)
    room = iter([10**9, 10**9, 5])
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=next(room)))
        with pytest.raises(OSError, match=r"1 more like this file\); .* has 5"):
            made(model, texts, tmp_path)
    assert [*sorted(contents(tmp_path))] == [
        "values-000000.safetensors",
        "values-000001.safetensors",
    ]
    assert len(made(model, texts, tmp_path)) == sum(map(len, texts))


def test_a_harvest_that_would_not_fit_does_not_begin(tmp_path, monkeypatch):
    model, texts = model_and_texts()
    # These texts make four files of one size.
    texts = [[1, 2, 3]] * 20
    size = plan(model, texts, NAMES, tmp_path).bytes
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size - 1))
    with pytest.raises(OSError, match="4 more like this file"):
        made(model, texts, tmp_path)
    assert not contents(tmp_path)
    # One text is one file, whether it is a list or a tensor.
    for n, one in enumerate(([1, 2, 3] * 5, torch.tensor([1, 2, 3] * 5))):
        harvest(model, one, NAMES, tmp_path / f"one {n}", config=HarvestConfig(per_file=1))
    # Half of the texts fit. For texts of unknown number, nothing is checked.
    made(model, texts, tmp_path / "half", shard=(1, 2))
    made(model, iter(texts), tmp_path / "stream")


SCRIPT = """
import sys
from interp.store import HarvestConfig, harvest
from models import load
texts = [f"part {n} of " * (1 + n % 5) for n in range(60)]
config = HarvestConfig(batch=4, per_file=3)
harvest(load("pydoc-4l"), texts, "blocks.1.mlp_out", sys.argv[1], config)
"""


def test_a_killed_job_goes_on(tmp_path):
    def started(out):
        return subprocess.Popen([sys.executable, "-c", SCRIPT, str(out)])

    texts = [f"part {n} of " * (1 + n % 5) for n in range(60)]
    harvest(
        pydoc(),
        texts,
        "blocks.1.mlp_out",
        tmp_path / "whole",
        config=HarvestConfig(batch=4, per_file=3),
    )
    expected = contents(tmp_path / "whole")
    assert len(expected) == 20
    job = started(tmp_path / "killed")
    for _ in range(6000):
        if len(contents(tmp_path / "killed")) >= 5 or job.poll() is not None:
            break
        time.sleep(0.01)
    job.send_signal(signal.SIGKILL)
    assert job.wait(60) == -signal.SIGKILL
    assert len(contents(tmp_path / "killed")) < 20
    assert started(tmp_path / "killed").wait(120) == 0
    assert contents(tmp_path / "killed") == expected
    assert len(Activations(tmp_path / "killed")) == sum(map(len, texts))
    assert (
        pydoc().to_text(Activations(tmp_path / "killed").file(0)["tokens"].tolist()[:10])
        == texts[0]
    )


def other_model():
    """Return a model of the same form in which one weight differs."""
    model, _ = model_and_texts()
    with torch.no_grad():
        model.blocks[0].mlp.output.bias[1] += 0.5
    return model


OTHERS = [
    {"model": other_model},
    {"names": NAMES[:2]},
    {"names": [*NAMES[:2], "blocks.0.attn.z"]},
    {"dtype": torch.float32},
    {"pos": slice(1, None)},
    {"pool": "mean"},
    {"context": 3},
    {"pack": True},
    {"without": [4]},
    {"batch": 4},
]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("change", OTHERS, ids=lambda change: "-".join(change))
@pytest.mark.parametrize("place", ["disk", "memory://lost"])
def test_a_lost_manifest_lets_no_other_adopt_the_files(place, change, tmp_path):
    model, texts = model_and_texts()
    out = str(tmp_path) if place == "disk" else f"{place}/{tmp_path.name}"
    config = HarvestConfig(batch=3, per_file=5)
    call = {"model": model, "texts": texts, "names": NAMES, "out": out, "config": config}
    whole = harvest(**call).checksums
    system, root = fsspec.core.url_to_fs(out)
    system.rm_file(f"{root}/manifest.json")
    # This is the first file that the call would write.
    system.rm_file(f"{root}/values-000000.safetensors")
    change = {name: value() if name == "model" else value for name, value in change.items()}
    changed = changed_call(call, change)
    before = {name: system.cat_file(name) for name in system.ls(root, detail=False)}
    with pytest.raises(ValueError, match="must contain files of one store; .*values-000001"):
        harvest(**changed)
    assert {name: system.cat_file(name) for name in system.ls(root, detail=False)} == before
    assert harvest(**call).checksums == whole
    # Each job writes a file with "done" in its name when it ends. These files of another store must
    # not make this harvest believe that its own jobs have ended.
    for name in [name for name in system.ls(root, detail=False) if "done" not in name]:
        system.rm_file(name)
    alone = harvest(**changed | {"out": str(tmp_path / "alone")})
    half = harvest(**changed, shard=(1, 2))
    with pytest.raises(CacheError, match="3 of 5 files .* are missing"):
        len(half)
    assert harvest(**changed, shard=(0, 2)).checksums == alone.checksums
    assert half.damaged() == []


def at_once(*jobs):
    """Return the result or the error of each call. The calls run in threads."""

    def result(job):
        try:
            return job()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [*pool.map(result, jobs)]


def meet(monkeypatch, name):
    """Make two threads move the file `name` to its place at the same time, in their first write."""
    replacing, barrier, met = storage.replacing, threading.Barrier(2, timeout=30), threading.local()

    @contextmanager
    def together(path, *place):
        with replacing(path, *place) as partial:
            yield partial
            if path.name == name and not hasattr(met, "once"):
                met.once = barrier.wait()

    monkeypatch.setattr(storage, "replacing", together)


@pytest.mark.parametrize("change", OTHERS[:4], ids=lambda change: "-".join(change))
def test_of_two_that_begin_at_once_one_is_refused(change, tmp_path, monkeypatch):
    model, texts = model_and_texts()
    config = HarvestConfig(batch=3, per_file=5)
    one = {"model": model, "texts": texts, "names": NAMES, "config": config}
    change = {name: value() if name == "model" else value for name, value in change.items()}
    other = changed_call(one, change)
    alone = [harvest(**call, out=tmp_path / str(n)) for n, call in enumerate((one, other))]
    meet(monkeypatch, "manifest.json")
    results = at_once(*(partial(harvest, **call, out=tmp_path / "both") for call in (one, other)))
    refused = [isinstance(result, ValueError) for result in results]
    assert sorted(refused) == [False, True]
    winner = refused.index(False)
    assert results[winner].checksums == alone[winner].checksums
    assert results[winner].damaged() == []
    assert "must continue with the same" in str(results[1 - winner])


def test_the_same_harvest_at_once_is_one_and_other_texts_are_refused(tmp_path, monkeypatch):
    model, texts = model_and_texts()
    whole = made(model, texts, tmp_path / "whole")
    with monkeypatch.context() as patch:
        meet(patch, "values-000001.safetensors")
        both = at_once(*[partial(made, model, texts, tmp_path / "same")] * 2)
    assert [store.checksums for store in both] == [whole.checksums] * 2
    assert both[0].damaged() == []
    changed = [*texts[:7], [1, 2], *texts[8:]]
    meet(monkeypatch, "values-000001.safetensors")
    results = at_once(
        *(partial(made, model, given, tmp_path / "other") for given in (texts, changed))
    )
    refused = [isinstance(result, ValueError) for result in results]
    assert sorted(refused) == [False, True]
    assert "same texts; file 1 has other texts" in str(results[refused.index(True)])
    store = results[refused.index(False)]
    assert [*store.texts()] == (texts, changed)[refused.index(False)]


@pytest.mark.parametrize("place", ["disk", "memory://between"])
def test_a_file_that_came_in_between_is_not_replaced(place, tmp_path, monkeypatch):
    model, texts = model_and_texts(7)
    out, tensors = str(tmp_path) if place == "disk" else place, rows.RowReader.tensors
    changed = [*texts[:3], [1, 2], *texts[4:]]

    def slow(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(rows.RowReader, "tensors", tensors)
            made(model, changed, out)
        return tensors(*arguments)

    monkeypatch.setattr(rows.RowReader, "tensors", slow)
    with pytest.raises(ValueError, match="same texts; file 0 has other texts"):
        made(model, texts, out)
    store = Activations(out)
    assert [*store.texts()] == changed
    assert store.damaged() == []


def test_file_systems_without_links_or_with_their_own_errors(tmp_path, monkeypatch):
    """Some file systems have no hard links, and some have their own error for existing files."""
    model, texts = model_and_texts(7)

    def refused(*arguments):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refused)
    assert made(model, texts, tmp_path).damaged() == []
    with pytest.raises(FileExistsError, match="no file must be at"):
        storage.create(tmp_path / "done-0-of-1.json", tmp_path / "manifest.json")
    system = type(fsspec.filesystem("memory"))
    pipe_file = system.pipe_file

    first = made(other_model(), texts, tmp_path / "first")
    began = []

    def overtaken(self, path, value, mode="overwrite"):
        if mode == "create" and not began:
            began.append(path)
            made(other_model(), texts, "memory://conditional")
        if mode == "create" and self.exists(path):
            raise OSError(errno.EINVAL, "precondition failed")
        return pipe_file(self, path, value, mode)

    monkeypatch.setattr(system, "pipe_file", overtaken)
    with pytest.raises(ValueError, match="same weights"):
        made(model, texts, "memory://conditional")
    assert Activations("memory://conditional").checksums == first.checksums

    def full(self, path, value, mode="overwrite"):
        if mode == "create":
            raise OSError(errno.ENOSPC, "no room")
        return pipe_file(self, path, value, mode)

    monkeypatch.setattr(system, "pipe_file", full)
    with pytest.raises(OSError, match="no room"):
        made(model, texts, "memory://full")


def test_a_job_whose_store_was_taken_over_writes_no_more(tmp_path):
    """If another job with other settings has taken over the folder, the first job stops.

    Some file systems cannot refuse to write a file that exists already. There, the manifest of the
    later job replaces that of the first.
    """
    model, texts = model_and_texts(25)
    other = made(other_model(), texts, tmp_path / "other")
    # The manifest of another store appears after 5 texts (one file), or after all (five files).
    for number, n_files in ((5, 1), (25, 5)):
        out = tmp_path / str(number)

        def given(number=number, out=out):
            yield from texts[:number]
            shutil.copy(tmp_path / "other" / "manifest.json", out)
            yield from texts[number:]

        with pytest.raises(ValueError, match="same weights"):
            made(model, given(), out)
        assert len(contents(out)) == n_files
        assert not [*out.glob("done-*")]
        assert Activations(out).checksums == other.checksums
        with pytest.raises(CacheError, match="values-000000.* to another store"):
            Activations(out).file(0)


@pytest.mark.parametrize("place", ["disk", "memory://folder"])
def test_a_store_is_a_folder(place, tmp_path):
    model, texts = model_and_texts(3)
    out = f"{tmp_path if place == 'disk' else place}/store.safetensors"
    with pytest.raises(ValueError, match=r"must be a folder; got .*store\.safetensors"):
        made(model, texts, out)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("place", ["disk", "memory://mixed"])
def test_files_of_another_store_are_refused_by_name(place, tmp_path):
    model, texts = model_and_texts()
    out = str(tmp_path / "one") if place == "disk" else place
    store = made(model, texts, out)
    made(other_model(), texts, tmp_path / "other")
    made(model, [[5, 6, 7], *texts[1:5], [3], *texts[6:]], tmp_path / "texts")
    system, root = fsspec.core.url_to_fs(out)
    path = f"{root}/values-000001.safetensors"
    own, next_one = system.cat_file(path), system.cat_file(path.replace("1.", "2."))
    # Another setting, but the same numbers.
    made(model, texts, tmp_path / "setting", column="of no table")
    foreign, of_texts, of_setting = (
        (tmp_path / name / "values-000001.safetensors").read_bytes()
        for name in ("other", "texts", "setting")
    )
    storage.save(tmp_path / "old.safetensors", "store", {"tokens": torch.arange(3)}, {"rows": 3})
    older = (tmp_path / "old.safetensors").read_bytes()
    reads = {
        "file": lambda: store.file(1),
        "rows": lambda: store.rows(6),
        "texts": lambda: [*store.texts()],
        "batches": lambda: [*store.batches(4)],
        "statistics": store.statistics,
        "moments": lambda: store.moments(NAMES[1]),
    }
    cases = {
        "files of one store": foreign,
        "files of one store;": older,
        "files of one store; .*values-000001": of_setting,
        "same texts; file 1 has other texts": of_texts,
        "same texts; file 1": next_one,
    }
    for message, data in cases.items():
        system.pipe_file(path, data)
        assert store.damaged() == [1]
        for read in reads.values():
            with pytest.raises(CacheError, match="values-000001.safetensors must be"):
                read()
        with pytest.raises(ValueError, match=message):
            made(model, texts, out)
        assert system.cat_file(path) == data
    system.pipe_file(path, own)
    assert made(model, texts, out).damaged() == []
    # The manifest lists no files until all jobs are done.
    some = made(model, texts, tmp_path / "some", shard=(1, 2))
    torch.testing.assert_close(some.file(1), store.file(1))
    (tmp_path / "some" / "values-000001.safetensors").write_bytes(foreign)
    with pytest.raises(CacheError, match="to another store"):
        some.file(1)


def test_a_store_of_the_older_form_is_refused_in_a_line(tmp_path):
    model, texts = model_and_texts(7)
    made(model, texts, tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"format": "hookscope-store-2"}))
    with pytest.raises(CacheError, match="has 'hookscope-store-2'$"):
        Activations(tmp_path)
    with pytest.raises(ValueError, match="same format; .* has 'hookscope-store-2', got"):
        made(model, texts, tmp_path)
    # A manifest that was changed by hand does not belong to the files any more.
    path.write_text(json.dumps(manifest | {"weights": "0" * 64}))
    with pytest.raises(CacheError, match="to another store"):
        Activations(tmp_path).file(0)


@pytest.mark.parametrize("lost", [[], ["done-0-of-1.json"], ["values-000004.safetensors"]])
def test_a_store_never_shrinks(lost, tmp_path):
    model, texts = model_and_texts()
    rows = [sum(map(len, texts[:n])) for n in range(24)]
    made(model, texts[:10], tmp_path)
    # A call with more texts adds them to the store.
    assert len(made(model, texts, tmp_path)) == rows[23]
    for name in lost:
        (tmp_path / name).unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for n, message in ((10, "other jobs had 23, got 10"), (22, "file 4 has other texts")):
        for given in (texts[:n], iter(texts[:n])):
            with pytest.raises(ValueError, match=f"same texts; {message}"):
                made(model, given, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert len(Activations(tmp_path)) == rows[23]
    assert made(model, texts, tmp_path).damaged() == []


def test_the_end_of_a_job_never_shrinks(tmp_path):
    model, texts = model_and_texts()
    made(model, texts, tmp_path, shard=(0, 2))
    with pytest.raises(ValueError, match="other jobs had 23, got 10"):
        made(model, texts[:10], tmp_path, shard=(0, 2))
    assert len(made(model, texts, tmp_path, shard=(1, 2))) == sum(map(len, texts))


def test_a_harvest_that_fails_before_its_first_value_leaves_nothing(tmp_path, monkeypatch):
    model, texts = model_and_texts(7)
    with pytest.raises(ValueError, match="at least one text"):
        made(model, [], tmp_path / "new")
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5))
        with pytest.raises(OSError, match="room for"):
            made(model, texts, tmp_path / "new")
    assert not [*tmp_path.iterdir()]
    assert made(model, texts, tmp_path / "new", dtype=torch.float16).damaged() == []


def large(texts, number):
    """Return a model with values of 1e5 in one text, which overflow float16, and the texts."""
    model, _ = model_and_texts()
    texts = [[token % 22 for token in text] for text in texts]
    texts[number][-1] = 22
    with torch.no_grad():
        model.token_embedding.weight[22] = 1e5
    return model.float(), texts


@pytest.mark.sampled(8)
@pytest.mark.parametrize("place", ["disk", "memory://large"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, None])
@pytest.mark.parametrize("jobs", [1, 2])
def test_after_an_overflow_another_dtype_begins_again(jobs, dtype, place, tmp_path):
    """After an overflow, the call that the error suggests works in the same folder."""
    # The overflow is in file 2.
    model, texts = large(model_and_texts()[1], 12)
    out = str(tmp_path / "one") if place == "disk" else f"{place}/{tmp_path.name}"
    call = {"texts": texts, "names": ["embed", NAMES[1]]}
    config = HarvestConfig(batch=3, per_file=5, dtype=dtype)
    alone = harvest(model, **call, out=tmp_path / "alone", config=config)

    def job(n, dtype, model=model):
        config = HarvestConfig(batch=3, per_file=5, dtype=dtype)
        return harvest(model, **call, out=out, config=config, shard=(n, jobs))

    for n in reversed(range(1, jobs)):
        job(n, torch.float16)
    stamps = []
    for _ in range(2):  # the second call gives the same error, and does not write the files again
        with pytest.raises(ValueError, match=r"torch.float16 at embed .*dtype="):
            job(0, torch.float16)
        with pytest.raises(CacheError, match="must be complete"):
            len(Activations(out))
        stamps.append(
            {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("one/values-*")}
        )
    assert stamps[0] == stamps[1]
    with pytest.raises(ValueError, match="same weights"):
        job(0, dtype, other_model().float())
    for n in range(jobs):
        store = job(n, dtype)
    assert store.checksums == alone.checksums
    assert store.damaged() == []
    with pytest.raises(ValueError, match="same dtype"):
        job(0, torch.float16)
    assert store.damaged() == []


def test_points_are_in_the_order_of_the_model(tmp_path):
    model = variant("pre", n_layers=12)
    store = harvest(model, [[1, 2]], "*.mlp_out", tmp_path)
    assert Activations(tmp_path).names == store.names == [f"blocks.{n}.mlp_out" for n in range(12)]


DAMAGE = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "junk": lambda text: "\x00junk",
    "list": lambda text: "[1, 2]",
    "null": lambda text: "null",
    "types": lambda text: json.dumps(json.loads(text) | {"files": 3, "texts": None}),
    "files": lambda text: json.dumps(json.loads(text) | {"files": [3]}),
}


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory):
    """Return a model, texts and the folder of their store, which two jobs wrote."""
    model, texts = model_and_texts()
    folder = tmp_path_factory.mktemp("two_shards")
    for job in (0, 1):
        made(model, texts, folder, shard=(job, 2))
    return model, texts, folder


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["manifest.json", "done-0-of-2.json", "done-1-of-2.json"])
@pytest.mark.parametrize("jobs", [[0], [1], [0, 1]])
def test_damaged_facts_of_a_store_are_made_again(name, damage, jobs, two_shards, tmp_path):
    model, texts, folder = two_shards
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    path = tmp_path / name
    path.write_text(DAMAGE[damage](path.read_text()))
    for job in jobs:
        made(model, texts, tmp_path, shard=(job, 2))
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    is_mended = name[:6] not in ("done-0", "done-1") or int(name[5]) in jobs
    if is_mended:
        assert after == before
        assert len(Activations(tmp_path)) == sum(map(len, texts))
    assert after["values-000002.safetensors"] == before["values-000002.safetensors"]


def test_a_damaged_manifest_is_named_to_readers_and_other_stores_do_not_adopt_its_files(tmp_path):
    model, texts = model_and_texts()
    made(model, texts, tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(CacheError, match=r"manifest\.json.*harvest again"):
        Activations(tmp_path)
    with pytest.raises(ValueError, match="another store"):
        harvest(model, texts, NAMES[:1], tmp_path, config=HarvestConfig(batch=3, per_file=5))
