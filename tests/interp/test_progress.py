"""Progress bars of analyses: each counts to its end, disappears, and changes no number."""

import contextlib
import importlib
import inspect
import pkgutil
import tempfile

import pytest
import torch

from tests.faces import FORMER
from tests.shipped import pydoc
from tests.terminal import Terminal, appear_soon, write_to

PROMPTS = ["def __ini", "class A", "import os, sys", "return x", "for y in z:"]
"""Five texts of different lengths."""

WORDS = [f"x = {word}" for word in ("one", "two", "six", "ten", "A", "B", "CD", "EFG")]


def pairs(interp):
    return interp.Pairs("def __ini", "def __nam", ("t", "e"))


def scores(interp, model):
    return interp.edge_attribution(model, pairs(interp), progress=False)


ANALYSES = {
    "activation_patching": lambda i, m, p: i.activation_patching(m, pairs(i), "z", progress=p),
    "sweep": lambda i, m, p: i.sweep(
        m, pairs(i), [{f"blocks.{n}.mlp_out": i.edits.zero()} for n in range(3)], progress=p
    ),
    "acdc": lambda i, m, p: [*i.acdc(m, pairs(i), [3.0, 5.0], progress=p)[3.0]],
    "attribution_patching": lambda i, m, p: i.attribution_patching(m, pairs(i), progress=p),
    "integrated_gradients": lambda i, m, p: i.integrated_gradients(
        m, pairs(i), "mlp_out", layers=[2, 3], progress=p
    ),
    "circuit_curve": lambda i, m, p: (
        i.circuit_curve(
            m, several(i), i.graph.Graph(m), scores(i, m), shares=(0.1, 1.0), progress=p
        ).signed
    ),
    "edge_attribution": lambda i, m, p: i.edge_attribution(m, pairs(i), progress=p),
    "faithfulness": lambda i, m, p: i.faithfulness(m, pairs(i), circuit(i, m), progress=p),
    "evaluate_circuit": lambda i, m, p: (
        i.evaluate_circuit(m, pairs(i), circuit(i, m), progress=p).completeness
    ),
    "node_effects": lambda i, m, p: i.node_effects(m, pairs(i), progress=p),
    "edge_patching": lambda i, m, p: i.edge_patching(
        m, pairs(i), ["input->m0", "m3->logits"], progress=p
    ),
    "path_patching": lambda i, m, p: i.path_patching(m, pairs(i), progress=p),
    "top_attributions": lambda i, m, p: i.top_attributions(m, pairs(i), k=3, progress=p),
    "max_activating": lambda i, m, p: i.max_activating(
        m, PROMPTS, "blocks.1.mlp.post", neuron=7, batch=2, progress=p
    ),
    "jacobian_lens": lambda i, m, p: i.jacobian_lens(m, PROMPTS[:2], skip=2, progress=p).weight,
    "tuned_lens": lambda i, m, p: i.tuned_lens(m, PROMPTS, steps=3, batch=2, progress=p).weight,
    "logit_lens": lambda i, m, p: i.logit_lens(m, cache(i, m), progress=p).kl,
    "head_scores": lambda i, m, p: i.head_scores(m, cache(i, m), progress=p),
    "evaluate_sae": lambda i, m, p: (
        i.evaluate_sae(m, i.load_sae("pydoc-4l/resid_post"), PROMPTS, batch=2, progress=p).losses
    ),
    "feature_cards": lambda i, m, p: i.features.feature_cards(
        m, i.load_sae("pydoc-4l/resid_post"), PROMPTS, [5, 3], batch=2, progress=p
    ),
    "purity": lambda i, m, p: i.features.purity(
        m, PROMPTS, "blocks.1.mlp.post", k=3, batch=2, progress=p
    ),
    "statistics": lambda i, m, p: i.store.statistics(
        m, PROMPTS, "blocks.1.mlp_out", batch=2, progress=p
    ),
    "difference_of_means": lambda i, m, p: i.directions.difference_of_means(
        m, i.directions.Contrast(PROMPTS[:2], PROMPTS[2:], batch=1), progress=p
    ),
    "erasure": lambda i, m, p: i.directions.erasure(
        m, i.directions.Contrast(PROMPTS[:2], PROMPTS[2:], batch=1), "resid_post", progress=p
    ),
    "probe": lambda i, m, p: (
        i.directions.probe(
            m,
            i.directions.Contrast(WORDS[:4], WORDS[4:], batch=3),
            folds=2,
            draws=1,
            progress=p,
        ).auroc
    ),
    "align": lambda i, m, p: (
        i.alignment.align(
            m,
            several(i).read_by(m)[:3],
            k=2,
            test=several(i).read_by(m)[3:],
            layers=1,
            batch=2,
            epochs=2,
            progress=p,
        ).accuracy
    ),
    "harvest": lambda i, m, p: i.store.harvest(
        m,
        PROMPTS,
        "blocks.1.mlp_out",
        temporary(),
        config=i.store.HarvestConfig(per_file=2),
        progress=p,
    ),
    "load": lambda i, m, p: loaded(p).W_E,
    "over_examples": lambda i, m, p: i.over_examples(
        i.attribution_patching, m, several(i), "z", at_once=2, progress=p
    ),
    "attribution_graph": lambda i, m, p: (
        i.attribution_graph(
            m,
            "part KV8 and",
            i.load_transcoders("pydoc-4l/transcoders"),
            max_features=5,
            progress=p,
        ).rows
    ),
}


WITHOUT_LOOPS = {"top_attributions"}
"""They show their name and their time."""


def several(interp):
    """Return five pairs with answers."""
    clean = [f"part KV{digit} and part K" for digit in range(5)]
    other = [f"part ZQ{digit} and part Z" for digit in range(5)]
    return interp.Pairs(clean, other, [("V", "Q")] * 5)


def temporary():
    return tempfile.mkdtemp()


def loaded(progress):
    from models import load

    return load("pydoc-4l", progress=progress)


def circuit(interp, model):
    return interp.Circuit(interp.graph.Graph(model), ["input->m0", "m0->m3", "m3->logits"])


def cache(interp, model):
    return interp.run_with_cache(model, PROMPTS[0])[1]


@pytest.fixture(scope="module")
def model():
    return pydoc()


@pytest.fixture
def counts(monkeypatch):
    """A list of all counts of progress that are made. Their bars appear at once."""
    from hooks.base import progress

    appear_soon(monkeypatch, delay=0, every=0.02)
    made = []
    begin = progress.Count.__init__

    def noted(self, *args, **options):
        begin(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(progress.Count, "__init__", noted)
    return made


@pytest.fixture
def terminal(monkeypatch):
    """A terminal to which progress bars write instead of to standard error."""
    terminal = Terminal()
    write_to(terminal, monkeypatch)
    return terminal


def numbers(result):
    """Return the result of an analysis in a form that can be compared."""
    values = getattr(result, "values", result)
    return values if isinstance(values, torch.Tensor) else repr(result)


@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_counts_to_its_end(name, model, counts, terminal):
    import interp
    import interp.alignment
    import interp.directions
    import interp.store

    shown = ANALYSES[name](interp, model, True)
    assert name in terminal.getvalue()
    assert terminal.screen == []
    loops = [count for count in counts if count.unit]
    assert all(count.done == pytest.approx(count.total) for count in loops if count.total)
    assert name in WITHOUT_LOOPS or any(count.done for count in loops)
    written = terminal.getvalue()
    silent = ANALYSES[name](interp, model, False)
    assert terminal.getvalue() == written
    # The second harvest writes to another folder, so the results cannot be compared.
    if name == "harvest":
        return
    if isinstance(numbers(shown), torch.Tensor):
        # The same operations in the same order, so rounding is the same.
        torch.testing.assert_close(numbers(shown), numbers(silent), rtol=0, atol=0, equal_nan=True)
    else:
        assert numbers(shown) == numbers(silent)


# Five steps leave a gap.
@pytest.mark.filterwarnings("ignore:scores of edges should add up")
@pytest.mark.parametrize("steps", ["auto", 5])
@pytest.mark.parametrize("method", ["eap_ig_inputs", "eap_ig_activations"])
def test_the_runs_along_a_path_are_one_loop(method, steps, model, counts, terminal):
    import interp

    result = interp.edge_attribution(model, pairs(interp), method=method, steps=steps)
    (count,) = [count for count in counts if "path" in count.title]
    # The run at the start of the path belongs to another loop.
    largest = result.about["steps"]
    n_steps = largest if isinstance(largest, int) else max(largest)
    assert count.done == n_steps
    assert count.total == (None if steps == "auto" else 5)


def public_functions():
    """Yield all functions of `interp` and `models`, with their module and name."""
    import interp
    import models

    for package in (interp, models):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if module.name.endswith(("__main__", *FORMER)):
                continue
            for name, value in vars(importlib.import_module(module.name)).items():
                if inspect.isfunction(value) and value.__module__ == module.name:
                    yield name, value


def test_the_keyword_acts_wherever_it_is_taken():
    taking = {
        name: function
        for name, function in public_functions()
        if "progress" in inspect.signature(function).parameters
    }
    assert {*ANALYSES} <= {*taking}
    for name, function in taking.items():
        assert inspect.signature(function).parameters["progress"].default is True, name
        wrappers = []
        while function is not None:
            wrappers.append(function.__code__.co_filename)
            function = getattr(function, "__wrapped__", None)
        assert any(path.endswith("progress.py") for path in wrappers), name


def test_the_command_line_prints_an_error_on_a_line_of_its_own(counts, terminal, tmp_path, capsys):
    from interp.cli.command import main

    rows = ['{"text": "part AB1"}'] * 3 + ["no JSON"]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows))
    given = ["harvest", str(tmp_path / "texts.jsonl"), "--model", "pydoc-4l", "--point", "embed"]
    with contextlib.redirect_stderr(terminal):
        assert main([*given, "--per-file", "1", "--out", str(tmp_path / "out")]) == 1
    assert "harvest" in terminal.getvalue()
    assert len(terminal.screen) == 1
    assert terminal.screen[0].startswith("error: ")
