"""Analyses of parts of examples equal the analysis of all examples, on any executor."""

import multiprocessing
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from hooks import EditError, HookedRunner, HookError
from interp import (
    Pairs,
    accuracy,
    activation_patching,
    attribution_patching,
    edge_attribution,
    edits,
    evaluate_circuit,
    evaluate_sae,
    faithfulness,
    integrated_gradients,
    kl_divergence,
    log_prob,
    logit_diff,
    max_activating,
    node_effects,
    over_examples,
    path_patching,
    sweep,
)
from interp.features import Dictionary, TopK, splice
from interp.graph import Graph, circuits
from interp.many.fingerprints import fingerprint
from interp.store import Ray, statistics
from models import load
from tests.interp.many.analyses import (
    CLEAN,
    CORRUPTED,
    MASK,
    PAIRS,
    POS,
    RIGHT,
    VOCAB,
    WRONG,
    N,
    direct,
    make_model,
    patched_once,
)
from tests.shipped import pydoc

AT_ONCE = 3


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def circuit(model):
    return circuits.greedy(Graph(model), edge_attribution(model, PAIRS), 9)


def require_equal(joined, whole):
    """Check that two results are equal, up to the rounding of float64."""
    largest = whole.values.nan_to_num().abs().max().item()
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-12 * largest, equal_nan=True)
    close(joined.values, whole.values)
    close(joined.mean(), whole.mean())
    for name in ("base", "target", "exists"):
        if getattr(whole, name) is None:
            assert getattr(joined, name) is None
        else:
            torch.testing.assert_close(getattr(joined, name), getattr(whole, name))
    for name in ("axes", "labels", "words", "groups", "unit", "is_ratio", "bounds"):
        assert getattr(joined, name) == getattr(whole, name), name
    # The gaps of sums are rounding here.
    about = {name: fact for name, fact in whole.about.items() if name not in ("node_gap", "gap")}
    assert {name: joined.about[name] for name in about} == about
    assert joined.about.keys() == whole.about.keys()


def metric_of_each(logits):
    """Return a number that needs no data of examples."""
    return logits[:, -1, 3] - logits[:, -1].logsumexp(-1)


REFERENCE = torch.randn(N, POS, VOCAB, dtype=torch.float64)
GAPS = "ignore:.*should add up to within"
CASES = {
    "patching": (activation_patching, PAIRS, ("z",), {}),
    "patching noising": (activation_patching, PAIRS, (), {"direction": "noising", "layers": 1}),
    "ablation": (activation_patching, PAIRS, ("z",), {"edit": edits.zero()}),
    "attribution": (attribution_patching, PAIRS, ("z",), {}),
    "attribution of an edit": (attribution_patching, PAIRS, ("z",), {"edit": edits.zero()}),
    "grad_drop": (attribution_patching, PAIRS, ("mlp_out",), {"grad_drop": True}),
    "edges": (edge_attribution, PAIRS, (), {}),
    "edges by position": (edge_attribution, PAIRS, ("eap", "pos"), {}),
    "edges along a path": (edge_attribution, PAIRS, ("eap_ig_inputs",), {"steps": 2}),
    "integrated": (integrated_gradients, PAIRS, ("mlp_out",), {"steps": 3}),
    "nodes": (node_effects, PAIRS, (), {}),
    "paths": (path_patching, PAIRS, (), {}),
    "metric of tokens": (
        activation_patching,
        PAIRS.measured_by(logit_diff(RIGHT.tolist(), 2)),
        ("z",),
        {},
    ),
    "metric of a reference": (
        attribution_patching,
        PAIRS.measured_by(kl_divergence(REFERENCE, None, attention_mask=MASK)),
        ("z",),
        {},
    ),
    "metric of one's own": (activation_patching, PAIRS.measured_by(metric_of_each), ("z",), {}),
    "sweep": (
        sweep,
        CLEAN,
        ([{"blocks.1.mlp_out": edits.zero()}], log_prob(RIGHT)),
        {},
    ),
}


@pytest.mark.filterwarnings(GAPS)
@pytest.mark.parametrize("name", CASES)
def test_parts_equal_the_whole(model, name):
    analysis, examples, args, options = CASES[name]
    whole = analysis(model, examples, *args, **options)
    joined = over_examples(analysis, make_model, examples, *args, at_once=AT_ONCE, **options)
    require_equal(joined, whole)


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.filterwarnings("ignore:the circuit was found on")
def test_shares_are_divided_by_the_mean_of_all_examples(model, circuit, out, tmp_path):
    options = {"at_once": AT_ONCE, "out": tmp_path if out else None}
    whole = faithfulness(model, PAIRS, circuit)
    scores = evaluate_circuit(model, PAIRS, circuit)
    for _ in range(2):
        joined = over_examples(faithfulness, make_model, PAIRS, circuit, **options)
        for name in ("circuit", "random"):
            require_equal(getattr(joined, name), getattr(whole, name))
        assert repr(joined) == repr(whole)
        joined = over_examples(evaluate_circuit, make_model, PAIRS, circuit, **options)
        for name in ("faithfulness", "completeness", "minimality"):
            require_equal(getattr(joined, name), getattr(scores, name))


def test_arguments_of_examples_are_divided(model):
    over = partial(over_examples, direct, make_model, CLEAN, at_once=AT_ONCE)
    joined = over(right=RIGHT, by_example="right")
    require_equal(joined, direct(model, CLEAN, right=RIGHT))
    assert joined.groups is None
    with pytest.raises(ValueError, match=r"right= is named .* of the 7 examples; got .*"):
        over(right=RIGHT[:3], by_example=["right"])
    # With one token for all texts, examples with one text are copies, also in different parts.
    joined = over(right=5)
    require_equal(joined, direct(model, CLEAN, right=5))
    assert joined.groups == (0, 1, 2, 3, 0, 4, 1)


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_words_are_the_words_of_all_texts(direction):
    """The texts of a part have other words at a position than all texts."""
    clean, corrupted = ["def __ini", "def a", "import o"], ["def __nam", "def b", "import s"]
    pairs = Pairs(clean, corrupted, metric=log_prob(["t", "s", "e"]))
    options = {"layers": [1, 2], "direction": direction}
    whole = attribution_patching(pydoc(), pairs, **options)
    joined = over_examples(attribution_patching, pydoc, pairs, at_once=2, **options)
    assert joined.words == whole.words
    assert joined.about == whole.about
    assert joined.about["metric"] == "log_prob(['t', 's', 'e'])"
    torch.testing.assert_close(joined.values, whole.values, rtol=1e-4, atol=1e-5)


def test_an_address_of_fsspec_keeps_finished_parts(model):
    out = "memory://parts"
    calls = Calls()
    over = partial(over_examples, patched, make_model, PAIRS, 1.0, calls, fails=Calls())
    first = over(at_once=AT_ONCE, out=out)
    require_equal(first, activation_patching(model, PAIRS, "z"))
    require_equal(over(at_once=AT_ONCE, out=out), first)
    assert len(calls) == 3


def test_answers_of_several_tokens(model):
    answers = [((3, 5), (7,)), *[((n, 4), (2, n, 6)) for n in range(N - 1)]]
    tensors = [tuple(torch.tensor(answer) for answer in pair) for pair in answers]
    mask = torch.ones(N, POS)
    mask[:AT_ONCE, 3:] = 0
    pairs = Pairs(CLEAN, CORRUPTED, tensors, attention_mask=mask)
    whole = activation_patching(model, pairs, "mlp_out")
    joined = over_examples(activation_patching, make_model, pairs, "mlp_out", at_once=AT_ONCE)
    require_equal(joined, whole)


LISTS = [[n, 3, 1 + n % 4, *[7] * (n % 3)] for n in range(11)]


@pytest.mark.parametrize("folder", [False, True])
def test_largest_values_and_statistics_of_many_texts(model, folder, tmp_path):
    out = tmp_path if folder else None
    over = partial(over_examples, at_once=4, out=out)
    for _ in range(1 + folder):
        places = over(max_activating, make_model, LISTS, "blocks.1.mlp.post", neuron=5, k=6)
        expected = max_activating(model, LISTS, "blocks.1.mlp.post", neuron=5, k=6)
        assert [place[1:] for place in places] == [place[1:] for place in expected]
        values = [[place.value for place in listed] for listed in (places, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-12)
        names, options = "blocks.*.mlp_out", {"top": 3, "sample": 9}
        found = over(statistics, make_model, LISTS, names, **options)
        wanted = statistics(model, LISTS, names, **options)
        for name, one in wanted.items():
            assert found[name].n == one.n
            for field in ("mean", "products", "top_values", "sample", "keys"):
                torch.testing.assert_close(getattr(found[name], field), getattr(one, field))
            assert torch.equal(found[name].top_places, one.top_places)


# Texts of one token have no loss. All texts of the third part are such texts.
TEXTS = [*LISTS[:7], [9], [3], [2], *LISTS[7:]]
POINT = "blocks.1.mlp_out"


@pytest.fixture(scope="module")
def scores(model):
    with pytest.warns(UserWarning, match="3 of 14 texts are left out"):
        return evaluate_sae(model, {POINT: random_dictionary()}, TEXTS, batch=4)


def random_dictionary():
    """Return a dictionary with random weights, of which some features are never active."""
    generator = torch.Generator().manual_seed(8)
    weights = torch.randn(2, 12, 17, generator=generator, dtype=torch.float64)
    zero = torch.zeros(17, dtype=torch.float64)
    return Dictionary(weights[0], weights[1].T / 9, zero, zero[:12], TopK(2))


def require_equal_scores(joined, whole):
    for name in ("losses", "kl"):
        torch.testing.assert_close(getattr(joined, name), getattr(whole, name), rtol=0, atol=1e-6)
    assert joined.groups == whole.groups
    ours, theirs = joined.points[POINT], whole.points[POINT]
    assert torch.equal(ours.density, theirs.density)
    assert 0 < (ours.density == 0).sum() < 17
    assert (ours.l0, ours.n_tokens) == (theirs.l0, theirs.n_tokens)
    assert ours.explained_variance == pytest.approx(theirs.explained_variance, rel=1e-9)


@pytest.mark.filterwarnings("ignore:3 of 14 texts")
def test_scores_of_dictionaries_have_the_means_of_all_texts(scores, tmp_path):
    dictionaries = {POINT: random_dictionary()}
    over = partial(over_examples, make_model=make_model, examples=TEXTS, at_once=2)
    stored = over(partial(evaluate_sae, dictionaries=dictionaries), batch=4, out=tmp_path)
    require_equal_scores(stored, scores)
    assert len([*tmp_path.glob("part-*")]) == 14
    with ThreadPoolExecutor(2) as executor:
        threaded = over(evaluate_sae, dictionaries=dictionaries, executor=executor)
    require_equal_scores(threaded, scores)


def test_scores_of_dictionaries_in_shards(scores, tmp_path):
    """The first shard runs the first pass of all texts, because its second pass needs the means."""
    over = partial(over_examples, evaluate_sae, make_model, TEXTS, {POINT: random_dictionary()})
    over = partial(over, at_once=3, out=tmp_path, batch=4)
    with pytest.warns(UserWarning, match=". of . texts are left out"):
        own = [over(shard=(rank, 2)) for rank in (1, 0)]
    torch.testing.assert_close(own[0].losses, scores.losses[:, [3, 4, 5, 7, 8]])
    assert len([*tmp_path.glob("part-*")]) == 10
    with pytest.warns(UserWarning, match="3 of 14 texts are left out"):
        require_equal_scores(over(), scores)


def test_one_part_may_depend_on_all_examples(model):
    options = {"edit": edits.noise(0.5), "site": "mlp_out"}
    joined = over_examples(activation_patching, make_model, PAIRS, **options)
    require_equal(joined, activation_patching(model, PAIRS, **options))


def test_threads_give_the_result_of_one_thread(model):
    whole = edge_attribution(model, PAIRS)
    with ThreadPoolExecutor(3) as executor:
        joined = over_examples(edge_attribution, make_model, PAIRS, at_once=2, executor=executor)
    require_equal(joined, whole)


def test_a_dead_worker_is_named_and_its_part_is_repeated(model, tmp_path):
    """The process dies in part 1. A second call runs only the parts that are missing."""
    count, out = tmp_path / "count", tmp_path / "out"
    pairs = Pairs(CLEAN, CORRUPTED, metric=log_prob(RIGHT))
    over = partial(over_examples, patched_once, make_model, pairs, str(count), at_once=AT_ONCE)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor, pytest.raises(HookError) as told:
        over(executor=executor, out=out)
    assert "died while it ran part 1 (examples 3 to 5); call again" in str(told.value)
    assert len([*out.glob("part-*.safetensors")]) == 1
    assert not [*out.glob("*.partial")]
    whole = activation_patching(model, pairs, "z")
    for _ in range(2):
        require_equal(over(out=out), whole)
        assert len(count.read_text().splitlines()) == 4


def patched(model, pairs, scale, calls, fails=()):
    """Patch pairs, and record the first token of each part."""
    calls.append(pairs.clean[0, 0].item())
    if len(calls) in fails:
        raise OSError("the disk is full")
    return activation_patching(model, pairs, "z")


class Calls(list):
    """A list that is equal to any other list for the hash of a part."""

    def __reduce__(self):
        return Calls, ()


def test_finished_parts_are_found_by_their_values(model, tmp_path):
    calls = Calls()
    over = partial(over_examples, patched, make_model, at_once=AT_ONCE, out=tmp_path)
    over(PAIRS, 1.0, calls, fails=Calls())
    with pytest.raises(OSError, match="the disk is full") as told:
        over(PAIRS[:6], 2.0, calls, fails=[5])
    assert told.value.__notes__ == ["this error was raised in part 1 (examples 3 to 5)"]
    assert len(calls) == 5
    over(PAIRS, 1.0, calls, fails=Calls())
    assert len(calls) == 5
    # A token far inside a tensor, an answer or another weight is another value.
    other = CLEAN.clone()
    other[6, 4] = (other[6, 4] + 1) % VOCAB
    answers = torch.stack([RIGHT, WRONG], 1)
    over(Pairs(other, CORRUPTED, answers, attention_mask=MASK), 1.0, calls, fails=Calls())
    assert calls[5:] == [CLEAN[6, 0]]
    changed = make_model()
    changed.blocks[1].mlp.W_out.data[7, 5] += 1e-9
    partial(over_examples, patched, changed, at_once=AT_ONCE, out=tmp_path)(
        PAIRS, 1.0, calls, fails=Calls()
    )
    assert len(calls) == 6 + 3
    # A damaged file counts as missing.
    path = sorted(tmp_path.glob("part-*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-3])
    n = len(calls)
    over(PAIRS, 1.0, calls, fails=Calls())
    over(PAIRS[:6], 2.0, calls, fails=[5])
    over(Pairs(other, CORRUPTED, answers, attention_mask=MASK), 1.0, calls, fails=Calls())
    assert len(calls) <= n + 2


class Scaled(nn.Module):
    """A module whose attributes are values of several kinds."""

    def __init__(self, heads=(1, 2), scale=3.0, shift=5.0, function=torch.relu, limit=7):
        super().__init__()
        self.heads = [*heads]
        self.scale = torch.tensor([scale])
        self.function = function
        self.options = {"limit": limit}
        self.lock = threading.Lock()
        self.register_buffer("shift", torch.tensor([shift]), persistent=False)


def test_the_hash_of_a_module_depends_on_its_attributes():
    changes = [
        {"heads": (1, 4)},
        {"scale": 4.0},
        {"shift": 4.0},
        {"function": torch.tanh},
        {"function": lambda value: value},
        {"function": lambda value: value + 1},
        {"limit": 8},
        {},
    ]
    hashes = [fingerprint("a module", Scaled(**options)) for options in changes]
    assert len({*hashes}) == len(hashes)
    same = Scaled()
    same._cache = [3]
    assert fingerprint("a module", same) == hashes[-1]


def test_the_hash_of_one_number_does_not_depend_on_its_stride():
    of_column = torch.arange(35.0).view(5, 7)[2:3, 3]
    assert fingerprint("a number", of_column) == fingerprint("a number", torch.tensor([17.0]))
    assert fingerprint("a number", of_column) != fingerprint("a number", torch.tensor([18.0]))


OF_USER = """
SITE, UNUSED = "z", 1
def helper(pairs):
    return [read() for pair in pairs]
@lru_cache
def read():
    return SITE, tools.scale * 2
class Base:
    @property
    def last(self):
        return 1
class Metric(Base):
    def __call__(self, logits):
        return self.inner(logits)
    @staticmethod
    def inner(logits):
        return logits[:, -1, 3]
def analysis(model, pairs):
    return (lambda: helper(pairs))(), lock
"""


def test_the_hash_of_a_function_depends_on_what_it_reads():
    def hashed(old="", new="", scale=1.5):
        module = ModuleType("of_user")
        vars(module).update(lru_cache=lru_cache, tools=ModuleType("tools"), lock=threading.Lock())
        module.tools.scale = scale
        exec(OF_USER.replace(old, new) if old else OF_USER, vars(module))
        return fingerprint("it", (module.analysis, module.Metric()))

    changes = [('"z"', '"v"'), ("* 2", "* 3"), ("read() for", "read for"), ("return 1", "return 2")]
    changes += [("-1, 3", "-1, 4"), ("self.inner(", "-self.inner("), ("lambda:", "lambda x=1:")]
    hashes = [hashed(), hashed(scale=2.5), *(hashed(*change) for change in changes)]
    assert len({*hashes}) == 2 + 7
    assert hashed(", 1\n", ", 2\n") == hashes[0]


def test_hooks_that_stored_parts_would_ignore_are_errors(tmp_path):
    model = make_model()
    over = partial(over_examples, activation_patching, model, PAIRS, "z", at_once=AT_ONCE)
    with HookedRunner(model).hooks({"blocks.0.mlp_out": edits.zero()}):
        require_equal(over(), activation_patching(model, PAIRS, "z"))
        with ThreadPoolExecutor(1) as threads:
            for options in ({"out": tmp_path}, {"executor": threads}):
                with pytest.raises(HookError, match="got an edit at blocks.0.mlp_out"):
                    over(**options)
    handle = model.blocks[1].mlp.register_forward_hook(lambda mlp, args, output: 2 * output)
    require_equal(over(), activation_patching(model, PAIRS, "z"))
    with pytest.raises(HookError, match=r"got a hook on blocks\.1\.mlp:"):
        over(out=tmp_path)
    handle.remove()
    # The points of a dictionary that is spliced in belong to the model.
    hashes = set()
    for scale in (1.0, 2.0):
        dictionary = random_dictionary()
        dictionary.W_dec.data.mul_(scale)
        with splice(model, {POINT: dictionary}):
            spliced = over(out=tmp_path)
            require_equal(spliced, activation_patching(model, PAIRS, "z"))
        hashes |= {path.name for path in tmp_path.glob("part-*")}
    assert len(hashes) == 6


def test_shards_are_joined_by_a_later_call(model, tmp_path):
    whole = attribution_patching(model, PAIRS, "z")
    over = partial(over_examples, attribution_patching, make_model, PAIRS, "z", at_once=2)
    own = over(out=tmp_path, shard=(1, 3))
    torch.testing.assert_close(own.values, whole.values[..., 2:4])
    over(out=tmp_path, shard=(0, 3))
    with pytest.raises(ValueError, match=r"part 2 \(examples 4 to 5\): call .* shard=\(2, 3\)$"):
        over(out=tmp_path)
    over(out=tmp_path, shard=(2, 3))
    require_equal(over(out=tmp_path), whole)
    wrong = (
        ((3, 3), ValueError, "0 <= rank"),
        (3, TypeError, "got 3"),
        (("0", "2"), TypeError, "two integers"),
        ((0, 5), ValueError, "got 4 parts"),
    )
    for shard, error, message in wrong:
        with pytest.raises(error, match=message):
            over(out=tmp_path, shard=shard)
    with pytest.raises(ValueError, match="shard needs out="):
        over(shard=(0, 2))


@pytest.mark.parametrize(
    ("analysis", "argument", "steps"),
    [
        (edge_attribution, "eap_ig_inputs", 16),
        (integrated_gradients, "resid_pre", [16, 8]),
        pytest.param(
            edge_attribution,
            "eap_ig_activations",
            [16, 8, 4, 4, 4, 4, 4, 4, 4, 4, 4],
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_number_of_steps_is_decided_over_all_examples(model, analysis, argument, steps):
    """The first two pairs alone take more steps on the first path, and the others take fewer."""
    pairs = PAIRS[2:6]
    whole = analysis(model, pairs, argument)
    assert whole.about["steps"] == steps
    joined = over_examples(analysis, make_model, pairs, argument, at_once=2)
    require_equal(joined, whole)
    alone = analysis(model, pairs[2:], argument)
    size = whole.values.abs().max()
    assert (alone.values - joined.values[..., 2:]).abs().max() > 1e-3 * size
    again = analysis(model, pairs[2:], argument, steps=steps)
    assert (again.values - joined.values[..., 2:]).abs().max() < 1e-12 * size


# A model with random weights hardly prefers an answer.
@pytest.mark.filterwarnings("ignore:the gap between the runs")
def test_what_depends_on_all_examples_is_an_error():
    over = partial(over_examples, make_model=make_model, examples=PAIRS, at_once=AT_ONCE)
    with pytest.raises(ValueError, match="steps must be a number in over_examples, because"):
        over(lambda model, pairs: integrated_gradients(model, pairs))
    for edit in (edits.noise(0.5), edits.resample(torch.randn(AT_ONCE, POS, 12))):
        with pytest.raises(ValueError, match="edits must not draw"):
            over(activation_patching, edit=edit, site="mlp_out")
    with pytest.raises(EditError, match=r"must have size 3 along batch; got 7 \(over_examples"):
        over(activation_patching, edit=edits.replace(torch.randn(N, POS, 12)), site="mlp_out")
    # Each part has rows 0 and 2, so these rows would change in every part.
    with pytest.raises(ValueError, match="edits must not select examples in over_examples"):
        over(activation_patching, examples=PAIRS[:6], edit=edits.zero(batch=[0, 2]), site="mlp_out")
    tokens = RIGHT
    with pytest.raises(ValueError, match=r"must have a method rows\(numbers\)"):
        over(
            activation_patching,
            examples=PAIRS.measured_by(lambda logits: logits[range(N), -1, tokens]),
        )
    # The first numbers of `tokens` would be used in every part.
    with pytest.raises(ValueError, match=r"must have a method rows\(numbers\)"):
        over(
            activation_patching,
            examples=PAIRS.measured_by(lambda logits: logits[:, -1, tokens].diagonal()),
        )
    # In a batch of equal logits, the first two metrics are 0 and the last is 1.
    for function in (
        lambda logits: logits[:, -1, 3] - logits[0, -1, 3],
        lambda logits: logits[:, -1, 3] - logits[-1, -1, 3],
        lambda logits: logits[:, -1].logsumexp(-1).softmax(0) * len(logits),
    ):
        for size in (1, AT_ONCE):
            with pytest.raises(ValueError, match="the numbers of .* depend on other examples"):
                over(activation_patching, examples=PAIRS.measured_by(function), at_once=size)
    with pytest.raises(ValueError, match="call normalized"):
        over(lambda model, pairs: activation_patching(model, pairs, "z").normalized())
    with pytest.raises(TypeError, match="must return one of Result, .*; got 3"):
        over(lambda model, pairs: 3)
    with pytest.raises(TypeError, match="executor must have submit"):
        over(activation_patching, executor=8)


def test_an_analysis_in_a_thread_must_not_end_the_program():
    def end(model, pairs):
        sys.exit(3)

    message = r"part 0 \(examples 0 to 2\) raised SystemExit\(3\)"
    with ThreadPoolExecutor(1) as executor, pytest.raises(HookError, match=message):
        over_examples(end, make_model, PAIRS, at_once=AT_ONCE, executor=executor)


def test_functions_that_processes_cannot_import_are_errors():
    """The part is not sent, so no process starts a model."""
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(1, mp_context=spawn) as executor,
        pytest.raises(TypeError, match="define them with def at the top level of a module.*lambda"),
    ):
        over_examples(lambda model, pairs: 3, make_model, PAIRS, executor=executor)


def test_misspelt_options_are_found_before_the_model_is_loaded():
    over = partial(over_examples, activation_patching, sys.exit, PAIRS)
    for option, close in (("shards", "shard"), ("at_onec", "at_once"), ("layer", "layers")):
        with pytest.raises(TypeError, match=rf"no argument {option}=; close matches: {close}"):
            over(**{option: 2})


def test_a_function_of_any_options_gets_all_options(model):
    def patched_with(model, pairs, **options):
        return activation_patching(model, pairs, **options)

    joined = over_examples(patched_with, make_model, PAIRS, at_once=4, site="mlp_out", layers=1)
    require_equal(joined, activation_patching(model, PAIRS, "mlp_out", layers=1))


def test_processes_must_not_be_forked():
    """A forked process hangs if PyTorch has several threads. The error comes before the model."""
    over = partial(over_examples, activation_patching, sys.exit, PAIRS)
    fork = multiprocessing.get_context("fork")
    with (
        ProcessPoolExecutor(1, mp_context=fork) as executor,
        pytest.raises(ValueError, match=r'mp_context=multiprocessing.get_context\("spawn"\)'),
    ):
        over(executor=executor)


@pytest.mark.full
def test_each_process_of_torchrun_runs_its_shard(model, tmp_path):
    """A later call finds all parts. If a part were missing, it would raise an error."""
    script = Path(__file__).with_name("sharded.py")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    folder = tmp_path / "parts"
    subprocess.run(
        [*torchrun, "--nproc-per-node=2", script, folder], check=True, cwd=script.parents[3]
    )
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == ["rank-0", "rank-1"]
    over = partial(over_examples, attribution_patching, make_model, PAIRS, "z", at_once=2)
    require_equal(over(out=folder), attribution_patching(model, PAIRS, "z"))


@pytest.mark.full
@pytest.mark.filterwarnings("default")
def test_a_client_of_dask_gives_the_result_of_one_process(model, tmp_path):
    distributed = pytest.importorskip(
        "distributed", reason="needs the package distributed, of Dask"
    )
    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with cluster, distributed.Client(cluster) as client:
        over = partial(over_examples, attribution_patching, make_model, PAIRS, at_once=AT_ONCE)
        whole = attribution_patching(model, PAIRS, "z")
        require_equal(over("z", executor=client), whole)
        require_equal(over("z", executor=client, out=tmp_path), whole)
        with pytest.raises(ValueError, match="layers must be among") as told:
            over("z", layers=5, executor=client)
        assert "part" in told.value.__notes__[0]


@pytest.mark.full
@pytest.mark.filterwarnings("default")
def test_a_ray_cluster_gives_the_result_of_one_process(model, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        over = partial(over_examples, attribution_patching, make_model, PAIRS, at_once=AT_ONCE)
        joined = over("z", executor=Ray(workers=2))
        require_equal(joined, attribution_patching(model, PAIRS, "z"))
        stored = over("z", executor=Ray(workers=2), out=tmp_path)
        require_equal(stored, joined)
        with pytest.raises(ValueError, match="layers must be among") as told:
            over("z", layers=5, executor=Ray(workers=2))
        assert "part" in told.value.__notes__[0]
    finally:
        ray.shutdown()


def test_metrics_of_answers_can_be_sent_to_other_processes():
    part = PAIRS[:2]
    assert repr(pickle.loads(pickle.dumps(part)).metric) == repr(part.metric)


def test_accuracy_with_a_token_for_each_example_is_divided():
    model = load("pydoc-4l")
    texts = ["part KV81 is gone; ask for KV8", "part BT52 is gone; ask for BT5", "import os and sy"]
    tokens = torch.tensor([model.to_id(text) for text in "12s"])
    given = Pairs(texts), [{"blocks.0.mlp_out": edits.zero()}], accuracy(tokens)
    parts = over_examples(sweep, model, *given, at_once=1)
    assert parts.values.tolist() == sweep(model, *given).values.tolist() == [[-1.0, -1.0, 0.0]]
    assert parts.unit == "accuracy"
