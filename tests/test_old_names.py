"""Every old name in the list of changes raises an error with the new name, or still works.

`USES` has the old forms of each row of the tables. Python runs the old form, and the error must
contain texts of the new form. The rows under "Announced" have forms that still work: they must give
a DeprecationWarning with these texts and with the version that makes the change.
`interp.accumulated` and other names of packages need no entry.
"""

import importlib
import re
from pathlib import Path

import pytest
import torch

import interp
import models
from hooks import HookedRunner, Options
from hooks.base.renamed import renamed_keywords
from interp import Pairs, edits, spectral
from interp.attribution_graphs import PrunedGraph
from interp.store import Ray
from tests.faces import FORMER
from tests.interp.made import NUMBERS, TEXT, WORDS, changed, shared, traced
from tests.released import announcements

CHANGES = (Path(__file__).parent.parent / "examples/guides/changes.md").read_text()
TABLE = re.compile(
    r"^\| (earlier commits|\d[\d.]+) \| \d[\d.]+ \|\n\| --- \| --- \|\n((?:\|.*\n)+)", re.MULTILINE
)
NAME_OF_A_PACKAGE = re.compile(r"(interp|models)\.(\w+)")

FIELDS = ("context", "dtype", "pack", "pos", "without", "pool", "column", "batch", "per_file")
CONTRASTS = ("probe", "difference_of_means", "erasure")
HARVEST = "interp.store.harvest(model, [TEXT], site, out"
PROBES = "interp.directions.sparse_probes(model, dictionary"

# For each left cell: the old forms, each with texts of the error, which are in the right cell.
USES = {
    "interp.store.Settings": {"interp.store.Settings": ["interp.store.HarvestConfig"]},
    "at= of spectral_gap": {"spectral.spectral_gap(torch.eye(3), at=1)": ["k="]},
    'harvest(engine="ray", workers=8), harvest(engine=Ray(workers=8))': {
        f'{HARVEST}, engine="ray", workers=8)': ["executor="],
        f"{HARVEST}, engine=Ray(workers=8))": ["executor="],
        f"{HARVEST}, workers=8)": ["executor=Ray(workers="],
    },
    "harvest(..., context=128), plan(..., context=128); also "
    "dtype=, pack=, pos=, without=, pool=, column=, batch= and per_file=": {
        f"interp.store.{call}(model, [TEXT], site, {name}=128)": ["config=HarvestConfig("]
        for call in ("harvest", "plan")
        for name in FIELDS
    },
    "probe(model, yes, no, site); also difference_of_means and erasure": {
        f"interp.directions.{name}(model, yes, no, site)": ["(model, (yes, no), "]
        for name in CONTRASTS
    },
    "sparse_probes(model, dictionary, yes, no, k)": {
        f"{PROBES}, yes, no, k)": ["sparse_probes(model, dictionary, (yes, no), "]
    },
    "probe(model, store, site=site, labels=labels); also difference_of_means and erasure": {
        f"interp.directions.{name}(model, store, site=site, labels=labels)": [
            "(model, Contrast(store, labels="
        ]
        for name in CONTRASTS
    },
    "probe(model, yes, no, site, pos=None, batch=8); also "
    "difference_of_means, erasure and sparse_probes": {
        **{
            f"interp.directions.{name}(model, yes, no, site, {option})": [
                "Contrast(yes, no, ",
                f"{option.partition('=')[0]}=",
            ]
            for name in CONTRASTS
            for option in ("pos=None", "batch=8")
        },
        f"{PROBES}, (yes, no), k=k, pos=None)": ["Contrast(yes, no, pos="],
    },
    'change.controls["kl"]["other texts"], change.controls["kl"]["shuffled"]': {
        'change.controls["kl"]["other texts"]': ["base on the next text"],
        'change.controls["kl"]["shuffled"]': ["tuned on the next text"],
    },
    'faithfulness(...).mean(); also .select(circuit="random")': {
        "interp.faithfulness(model, pairs, circuit).mean()": ["faithfulness(...).circuit.mean"],
        'interp.faithfulness(model, pairs, circuit).select(circuit="random")': [
            "faithfulness(...).random"
        ],
    },
    "faithfulness(..., connected=True, among=strongest)": {
        "interp.faithfulness(model, pairs, circuit, connected=True, among=strongest)": [
            "all edges of its random circuits are on paths"
        ],
    },
    "interp.completeness, interp.minimality": {
        "interp.completeness": ["interp.evaluate_circuit", "completeness"],
        "interp.minimality": ["interp.evaluate_circuit", "minimality"],
    },
    "other_texts of change.top().layers": {"change.top().layers[0].other_texts": ["next_text"]},
    "PrunedGraph.as_json(slug, scan)": {
        "PrunedGraph.as_json(graph, slug, scan)": ["PrunedGraph.neuronpedia(slug, scan)"],
        "PrunedGraph.as_json(graph, slug=slug, scan=scan)": ["PrunedGraph.neuronpedia(slug, scan)"],
    },
    "positions= of run_with_cache, capture, plan and Options": {
        "runner.run_with_cache(TEXT, positions=[0])": ["pos="],
        "runner.capture(TEXT, names=site, positions=[0])": ["pos="],
        "runner.plan(TEXT, names=site, positions=[0])": ["pos="],
        "Options(positions=[0])": ["pos="],
    },
    "direction= of direct_logit_attribution, accumulated_logits and max_activating": {
        "interp.direct_logit_attribution(model, cache, direction=vector)": ["vector="],
        "interp.accumulated_logits(model, cache, direction=vector)": ["vector="],
        "interp.max_activating(model, [TEXT], site, direction=vector)": ["vector="],
    },
    "at= of splice": {"interp.splice(model, dictionary, at=site)": ["point="]},
    "over= of edits.mean": {'edits.mean(cache, over="pos")': ["across="]},
    "load_sae of several layers": {
        'interp.features.load_sae("pydoc-4l/transcoders")': ["load_transcoders"]
    },
    "pairs.text.mask": {"pairs.text.mask": ["text.attention_mask"]},
    'positions="shortformer"': {
        'models.TransformerConfig(**sizes, positions="shortformer")': ["use TransformerLens"]
    },
    "arguments, corrupted_arguments, corrupted_mask of Pairs": {
        f"Pairs(TEXT, TEXT, {name}={{}})": ["a mapping as text, such as the output of a processor"]
        for name in ("arguments", "corrupted_arguments", "corrupted_mask")
    },
}


def rows(page=CHANGES):
    """Return the cells of all rows: the new text by the old text."""
    cells = {}
    for _, table in TABLE.findall(page):
        for row in table.splitlines():
            old, new = row.strip("| ").split(" | ")
            cells[old] = new
    return cells | {row.now: row.later for row in announcements(page)}


def still_work(page=CHANGES):
    """Return the rows under "Announced": the version that makes the change by the old text.

    A warning names a version as `0.3`, without the number of the patch.
    """
    return {row.now: row.changes.removesuffix(".0") for row in announcements(page)}


def message_of(code, names, text, works):
    """Return the error of an old form, which has the text, or the warning if the form works."""
    if not works:
        with pytest.raises(Exception, match=re.escape(text)) as caught:
            exec(code, names)
        # In tests, a warning of a form that still works is an exception too.
        assert not isinstance(caught.value, Warning)
        return str(caught.value)
    with pytest.warns(DeprecationWarning, match=re.escape(text)) as warned:
        exec(code, names)
    return " ".join(str(warning.message) for warning in warned)


def plain(cell):
    """Return a cell without the signs of code."""
    return cell.replace("`", "")


def uses_of(old):
    """Return the old forms of a row, each with the texts of its error."""
    if uses := USES.get(plain(old)):
        return uses
    package, name = NAME_OF_A_PACKAGE.fullmatch(plain(old)).groups()
    new = [plain(rows()[old])]
    return {f"{package}.{name}": new, f"from {package} import {name}": new}


def values():
    """Return the values of the names in `USES`."""
    s = shared()
    packages = dict(interp=interp, models=models, torch=torch, edits=edits, spectral=spectral)
    classes = dict(Options=Options, Pairs=Pairs, PrunedGraph=PrunedGraph, Ray=Ray)
    return dict(
        **packages,
        **classes,
        TEXT=TEXT,
        model=s.model,
        runner=HookedRunner(s.model),
        cache=s.cache,
        pairs=s.pairs,
        circuit=interp.Circuit(s.graph, ["input->m0", "m0->logits"]),
        strongest=s.circuit,
        dictionary=s.sae,
        change=changed(),
        graph=traced().pruned(),
        yes=NUMBERS,
        no=WORDS,
        site="blocks.1.mlp_out",
        store=None,
        labels=[True, False],
        out="unused",
        k=1,
        slug="a",
        scan="b",
        vector=torch.ones(128),
        sizes=dict(vocab_size=7, n_ctx=5, n_layers=1, n_heads=2, d_model=4),
    )


def test_the_tables_have_rows_and_each_entry_has_a_row():
    assert len(rows()) > 25
    assert USES.keys() <= {*map(plain, rows())}


@pytest.mark.parametrize("old", rows(), ids=plain)
def test_each_old_name_of_a_row_is_used(old):
    used = re.findall(r"\w+", " ".join(uses_of(old)))
    for name in re.findall(r"`([^`]+)`", old):
        assert {*re.findall(r"\w+", name)} <= {*used}, name


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("old", rows(), ids=plain)
def test_each_old_name_raises_an_error_with_the_new_name(old):
    names = values()
    for code, texts in uses_of(old).items():
        message = message_of(code, names, texts[0], old in still_work())
        assert still_work().get(old, "") in message, code
        for text in texts:
            assert text in message, code
            assert text in plain(rows()[old]), code


def test_an_announced_form_must_still_work():
    @renamed_keywords("0.3", positions="pos")
    def last(pos):
        return pos

    names = {"last": last}
    table = "| 0.1.0 | 0.2.0 |\n| --- | --- |\n| `positions=` | `pos=` |\n"
    header = "| now | later | announced in | changes in |\n| --- | --- | --- | --- |\n"
    announced = f"{header}| `positions=` | `pos=` | 0.2.0 | 0.3.0 |\n"
    assert rows(table) == rows(announced) == {"`positions=`": "`pos=`"}
    assert still_work(announced) == {"`positions=`": "0.3"}
    assert still_work(table) == {}
    assert "0.3" in message_of("last(positions=3)", names, "pos=", works=True)
    # A form that works and should not, and a form that gives no warning.
    with pytest.raises(AssertionError, match="isinstance"):
        message_of("last(positions=3)", names, "pos=", works=False)
    with pytest.raises(pytest.fail.Exception, match="DID NOT WARN"):
        message_of("last(pos=3)", names, "pos=", works=True)


@pytest.mark.parametrize("module", FORMER)
def test_the_import_of_a_former_module_raises_an_error_with_the_new_name(module):
    with pytest.raises(ImportError, match=re.escape(plain(rows()[f"`{module}`"]))):
        exec(f"import {module}")
    package, _, name = module.partition(".")
    assert not hasattr(importlib.import_module(package), name)
