"""Edge attribution, compared with slow masked runs and autograd, and with exact patching."""

import re

import pytest
import torch

from hooks import HookedRunner, HookError, ModeError
from hooks.base import peak_bytes
from interp import Pairs, edge_attribution, edge_patching, splice
from interp.features import Dictionary
from interp.graph import Graph
from tests.streams import FORMS, made, slow_run

BATCH, POS = 3, 5
BASE, TARGET = torch.randint(23, (2, BATCH, POS), generator=torch.Generator().manual_seed(1))
RIGHT, WRONG = torch.tensor([3, 0, 7]), torch.tensor([1, 4, 2])
ANSWERS = torch.stack([RIGHT, WRONG], 1)
REAL = torch.ones(BATCH, POS).bool()
LEFT, SHORT = REAL.clone(), REAL.clone()
LEFT[0, :2], SHORT[1, 3:] = False, False
PADDED = {"output": LEFT, "rms": SHORT, "sandwich": LEFT, "parallel": SHORT}
PAIRS = Pairs(BASE, TARGET, ANSWERS)
GAPS = "ignore:scores of edges should add up"


def close(ours, theirs, tolerance=1e-11):
    size = theirs.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * size)


def measured(logits, real=REAL):
    """Return the metric by hand: the difference of two logits at the last real token of each
    text.
    """
    rows = torch.arange(BATCH)
    last = logits[rows, POS - 1 - real.flip(1).int().argmax(1)]
    return last[rows, RIGHT] - last[rows, WRONG]


def by_masks(model, real=REAL, texts=(BASE, TARGET)):
    """Return the derivative of the metric with respect to the mask of each edge, at mask 0.

    It has the shape [edge, pos, batch]. The run is the slow reference of `tests.streams`.
    """
    nodes = Graph(model)
    _, source = slow_run(model, texts[1], real=real)
    size = *nodes.allowed.shape, *BASE.shape
    mask = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    logits, _ = slow_run.__wrapped__(model, texts[0], mask, source, real, nodes)
    (found,) = torch.autograd.grad(measured(logits, real).sum(), mask)
    return found[nodes.allowed].transpose(1, 2)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("form", FORMS)
def test_an_edge_is_the_derivative_of_a_masked_run(form):
    model, real = made(**FORMS[form]), PADDED.get(form, REAL)
    expected = by_masks(model, real)
    pairs = Pairs(BASE, TARGET, ANSWERS, attention_mask=real, pos=-1)
    found = edge_attribution(model, pairs, over="pos")
    together = edge_attribution(model, pairs)
    close(found.values, expected)
    close(together.values, expected.sum(1))
    assert found.axes == ("edge", "pos", "example")
    assert found.labels["edge"] == Graph(model).edges
    assert together.about["node_gap"] < 1e-12
    assert (expected.abs().amax((1, 2)) > 0).all()


def test_denoising_starts_from_the_corrupted_text():
    model = made()
    found = edge_attribution(model, PAIRS, direction="denoising")
    close(found.values, by_masks(model, texts=(TARGET, BASE)).sum(1))
    with torch.no_grad():
        torch.testing.assert_close(found.base, measured(model(TARGET)))
        torch.testing.assert_close(found.target, measured(model(BASE)))
    assert found.unit == "logits"


def test_spans_take_values_from_where_they_are_in_the_other_text():
    model, other = made(**FORMS["sandwich"]), torch.cat([TARGET[:, :2], TARGET], 1)
    spans = {"a": [[1, 2], [0, 0], [4, 3]], "b": [[3], [2], [1]]}
    there = {"a": [[3, 4], [5, 2], [6, 5]], "b": [[5], [4], [3]]}
    # The other text is longer, so its values come from two columns later. If a span has a column
    # twice, the last value counts.
    pairs = Pairs(BASE, other, ANSWERS, spans=spans, corrupted_spans=there)
    found = edge_attribution(model, pairs, over="span")
    _, source = slow_run(model, other)
    nodes = Graph(model)
    size = *nodes.allowed.shape, *BASE.shape
    mask = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    moved = {w: value[:, 2:] for w, value in source.items()}
    logits, _ = slow_run.__wrapped__(model, BASE, mask, moved, None, nodes)
    (each,) = torch.autograd.grad(measured(logits).sum(), mask)
    for n, name in enumerate(spans):
        expected = [each[..., b, sorted({*at})].sum(2) for b, at in enumerate(spans[name])]
        close(found.values[:, n], torch.stack(expected, 2)[nodes.allowed])
    assert found.labels["span"] == ("a", "b")


@torch.no_grad()
def test_the_input_moves_at_spans_only():
    model, name = made(**FORMS["sandwich"]), "blocks.0.resid_pre"
    spans = {"a": [[1, 2], [0, 0], [4, 3]]}
    pairs = Pairs(BASE, TARGET, ANSWERS, spans=spans)
    found = edge_attribution(model, pairs, method="eap_ig_inputs", over="span")
    runner = HookedRunner(model)
    ours, theirs = (runner.capture(text, names=name)[name].clone() for text in (BASE, TARGET))
    for b, columns in enumerate(spans["a"]):
        ours[b, columns] = theirs[b, columns]
    logits = runner.run_with_hooks(BASE, hooks={name: lambda value, point: ours})
    missing = outgoing(found, "input").sum(0) - (measured(logits) - found.base)
    assert missing.abs().max() <= 0.01 * (found.target - found.base).abs().mean()


@torch.no_grad()
def test_edges_are_exact_if_the_model_is_linear_after_them():
    model = made(mlp="none", d_mlp=0, norm="none", final_norm=False, n_layers=1)
    nodes = Graph(model)
    edges = [edge for edge in nodes.edges if edge.endswith(("logits", "<v>"))]
    found = edge_attribution(model, PAIRS).select(edge=edges)
    close(found.values, edge_patching(model, PAIRS, edges=edges).values)


@pytest.mark.parametrize("form", ["pre", "sandwich rms"])
def test_edges_of_the_input_add_up_to_the_difference(form):
    model = made(**FORMS[form])
    given = model, PAIRS, "eap_ig_inputs"
    found = edge_attribution(*given)
    sums = outgoing(found, "input")
    change = found.target - found.base
    missing = (sums - change).abs() / change.abs().mean()
    assert missing.max() <= 0.01
    assert found.about["gaps"] == pytest.approx(missing.tolist(), rel=0.06, abs=1e-12)
    assert found.about["node_gap"] < 1e-12
    steps = found.about["steps"]
    assert steps > 4
    with pytest.warns(UserWarning, match="add up"):
        edge_attribution(*given, steps=steps // 4)


@pytest.mark.filterwarnings(GAPS)
def test_fixed_steps_are_the_trapezoid_rule():
    model, steps = made(**FORMS["rms"]), 3
    inputs = [model.input_resid(text, model.context(text)).detach() for text in (BASE, TARGET)]
    runner, total, changes = HookedRunner(model), 0, []
    for text in (BASE, TARGET):
        changes.append(slow_run(model, text)[1])
    for n in range(steps + 1):
        at = inputs[0] + n / steps * (inputs[1] - inputs[0])
        with runner.hooks({"blocks.0.resid_pre": lambda value, point, at=at: at}):
            # Multiply the gradients at this input by the changes from the clean run.
            part = by_input(model, at, changes)
        total = total + part * (0.5 if n in (0, steps) else 1) / steps
    found = edge_attribution(model, PAIRS, "eap_ig_inputs", steps=steps)
    close(found.values, total)
    assert found.about["steps"] == steps


def by_input(model, stream, changes):
    """Return scores of edges: gradients of a run that starts from the stream `stream`, multiplied
    by the changes between two runs.
    """
    nodes = Graph(model)
    mask = torch.zeros(*nodes.allowed.shape, *BASE.shape, dtype=torch.float64, requires_grad=True)
    input_resid = model.input_resid
    model.input_resid = lambda tokens, context=None: stream
    try:
        _, now = slow_run(model, BASE)
        source = {w: value + changes[1][w] - changes[0][w] for w, value in now.items()}
        logits, _ = slow_run.__wrapped__(model, BASE, mask, source, None, nodes)
    finally:
        model.input_resid = input_resid
    (found,) = torch.autograd.grad(measured(logits).sum(), mask)
    return found.sum(3)[nodes.allowed]


@torch.no_grad()
@pytest.mark.parametrize(("form", "tokens"), [("pre", 100), ("sandwich", 40), ("parallel", 1024)])
def test_edges_of_a_writer_add_up_to_its_exact_patch(form, tokens, monkeypatch):
    monkeypatch.setattr("interp.effects.edges._TOKENS", tokens)
    model, real = made(**FORMS[form], n_layers=2), PADDED.get(form, REAL)
    given = model, Pairs(BASE, TARGET, ANSWERS, attention_mask=real)
    found = edge_attribution(*given, method="eap_ig_activations")
    nodes = Graph(model)
    size = (found.target - found.base).abs().mean()
    missing = []
    for w, name in enumerate(nodes.writers):
        exact = measured(patched(model, real, nodes, w), real) - found.base
        missing.append((outgoing(found, name) - exact).abs() / size)
    missing = torch.stack(missing)
    assert missing.max() <= 0.1
    assert found.about["gaps"] == pytest.approx(missing.amax(0).tolist(), rel=0.06, abs=1e-12)
    assert len(set(found.about["steps"])) > 1


def outgoing(found, writer):
    """Return the sum of the effects of all edges of a writer."""
    rows = [n for n, edge in enumerate(found.labels["edge"]) if edge.startswith(f"{writer}->")]
    return found.values[rows].sum(0)


def patched(model, real, nodes, writer):
    """Return the logits of a run in which one writer adds its output of the other run.

    All later nodes read this output, and compute their values from it.
    """
    ours, theirs = (
        nodes.contributions(
            HookedRunner(model).run_with_cache(t, attention_mask=real, names=nodes.needed)[1]
        )
        for t in (BASE, TARGET)
    )
    name = nodes.writers[writer]
    layer = name[1:].partition(".")[0]
    point = {"i": "blocks.0.resid_pre", "m": f"blocks.{layer}.mlp_out"}.get(
        name[0], f"blocks.{layer}.attn_out"
    )
    change = theirs[writer] - ours[writer]
    hooks = {point: lambda value, point: value + change}
    return HookedRunner(model).run_with_hooks(BASE, hooks=hooks, attention_mask=real)


@pytest.mark.filterwarnings(GAPS)
@torch.no_grad()
def test_half_precision_is_summed_in_float32():
    model = made().requires_grad_(False)
    exact = edge_attribution(model, PAIRS).values
    found = edge_attribution(model.bfloat16(), PAIRS)
    assert found.values.dtype == torch.float32
    close(found.values.double(), exact, 0.05)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("error", "match", "given"),
    [
        (ValueError, "eap_ig_inputs", {"method": "eap_ig_input"}),
        (ValueError, "steps", {"method": "eap_ig_inputs", "steps": 0}),
        (ValueError, "over", {"over": "head"}),
        (ValueError, "spans", {"over": "span"}),
        (
            ValueError,
            "correspond",
            {"pairs": Pairs(BASE, TARGET[:, 1:], ANSWERS, spans={"a": [[3]] * 3})},
        ),
        (
            ValueError,
            "NaN.*ln_final",
            {"metric": lambda out: out[:, -1, 3] * out[:, -1, 0].mul(0).sqrt()},
        ),
        (ValueError, "finite", {"metric": lambda logits: logits[:, -1, 0] - torch.inf}),
        (ValueError, "norm_place", {"norm_place": "post"}),
        (ModeError, "eval", {"training": True}),
    ],
)
def test_bad_input_is_refused(error, match, given):
    model = made(norm_place=given.pop("norm_place", "pre")).train(given.pop("training", False))
    pairs = given.pop("pairs", PAIRS)
    if "metric" in given:
        pairs = pairs.measured_by(given.pop("metric"))
    with pytest.raises(error, match=match):
        edge_attribution(model, pairs, **given)


@pytest.mark.parametrize("part", ["ln1", "ln2"])
def test_a_norm_without_its_scale_is_not_the_identity(part):
    model = made()
    setattr(model.blocks[1], part, torch.nn.LayerNorm(14).double().eval())
    with pytest.raises(AttributeError, match="scale"):
        edge_attribution(model, PAIRS)


def test_hooks_that_act_are_refused():
    model = made()
    hooks = {"blocks.1.attn_out": lambda value, point: value * 0}
    with HookedRunner(model).hooks(hooks), pytest.raises(HookError, match="hook"):
        edge_attribution(model, PAIRS)


def test_readers_are_scored_a_few_at_a_time(monkeypatch):
    model = made(**FORMS["sandwich"])
    whole = edge_attribution(model, PAIRS)
    monkeypatch.setattr("interp.effects.edge_scores._ENOUGH", 7)
    close(edge_attribution(model, PAIRS).values, whole.values)


def least_bytes(*given, **options):
    """Return the smallest `max_bytes` of a call, as the error names it."""
    with pytest.raises(ValueError, match="max_bytes must be at least") as error:
        edge_attribution(*given, max_bytes=1, **options)
    number = re.search(r"at least ([\d,]+)", str(error.value))[1]
    return int(number.replace(",", ""))


@pytest.mark.filterwarnings(GAPS)
@pytest.mark.parametrize(
    ("method", "over"),
    [
        ("eap", None),
        ("eap", "pos"),
        ("eap", "span"),
        ("eap_ig_inputs", None),
        ("eap_ig_activations", "pos"),
    ],
)
def test_any_bound_of_the_memory_gives_the_same_scores(method, over, monkeypatch):
    model = made(**FORMS["sandwich"], n_layers=2)
    spans = {"a": [[1, 2], [0, 0], [4, 3]], "b": [[3], [2], [1]]}
    pairs = Pairs(BASE, TARGET, ANSWERS, attention_mask=SHORT, spans=spans)
    options = {"method": method, "over": over} | ({} if method == "eap" else {"steps": 2})
    monkeypatch.setattr("interp.effects.edge_scores._CPU_BYTES", 0)
    one_by_one = edge_attribution(model, pairs, **options).values
    least = least_bytes(model, pairs, **options)
    # One position or two at a time.
    for max_bytes in (least, 5 * least // 2):
        split = edge_attribution(model, pairs, **options, max_bytes=max_bytes)
        close(split.values, one_by_one)
    # Two texts and then one, or all texts together.
    monkeypatch.setattr("interp.effects.edge_scores._CPU_BYTES", 2**40)
    for max_bytes in (2 * POS * least, 2**30):
        grouped = edge_attribution(model, pairs, **options, max_bytes=max_bytes)
        close(grouped.values, one_by_one)


@pytest.mark.filterwarnings(GAPS)
def test_the_memory_stays_within_its_bound(monkeypatch):
    monkeypatch.setattr("interp.effects.edge_scores._CPU_BYTES", 2**40)
    model = made(n_layers=4).requires_grad_(False)
    texts = torch.randint(23, (30, 11), generator=torch.Generator().manual_seed(2))
    pairs = Pairs(texts, (texts + 1) % 23, metric=lambda logits: logits[:, -1, 4])
    least = least_bytes(model, pairs)

    def peak(max_bytes):
        return peak_bytes(lambda: edge_attribution(model, pairs, max_bytes=max_bytes))[1]

    # The memory of the runs and of the result is the same in both calls.
    one_text, ten_texts = 11 * least, 110 * least
    difference = peak(ten_texts) - peak(one_text)
    assert ten_texts / 3 < difference <= ten_texts


def test_effects_that_no_reader_sees_give_a_warning():
    model = made()
    block, forward = model.blocks[1], model.blocks[1].forward
    block.forward = lambda resid, context: forward(resid, context) + resid.tanh()
    with pytest.warns(UserWarning, match="add up"):
        found = edge_attribution(model, PAIRS)
    assert found.about["node_gap"] > 0.01


@pytest.mark.parametrize("reads", [None, "blocks.1.ln2.normalized"])
def test_a_dictionary_must_keep_the_gradients_of_sublayers(reads):
    model = made(**FORMS["rms"])
    d_model, n_features = model.config.d_model, 17
    dictionary = Dictionary(
        torch.randn(d_model, n_features).double(),
        torch.randn(n_features, d_model).double(),
        torch.randn(n_features).double(),
        torch.randn(d_model).double(),
        torch.nn.ReLU(),
    )
    plain = edge_attribution(model, PAIRS).values
    place = {"blocks.1.mlp_out": dictionary}
    with splice(model, place, reads=reads):
        close(edge_attribution(model, PAIRS).values, plain)
    for error in (None, "frozen"):
        with (
            splice(model, place, error=error, reads=reads),
            pytest.raises(HookError, match=f"error='live'.*blocks.1.mlp_out with error={error!r}"),
        ):
            edge_attribution(model, PAIRS)
