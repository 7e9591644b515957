"""Sweeps and activation patching, compared with a whole run for each edit with PyTorch's own
hooks.
"""

import contextlib
import itertools
import random
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hooks import EditError, HookedRunner, HookPoint, ModeError, NeverFiredError, UnknownNameError
from hooks.base._torch import PeakBytes
from interp import Pairs, activation_patching, edits, kl_divergence, log_prob, logit_diff, sweep
from tests.reference import BATCH, POS, VOCAB, separately, some_tokens, variant

FORMS = [
    *("pre", "post", "output", "sandwich", "parallel", "parallel output", "parallel sandwich"),
    *("attention only", "attention only output", "attention only sandwich", "sinusoidal"),
    *("rotary partly", "grouped", "window", "window of one layer", "no positions", "embed_norm"),
    *("like llama", "like gemma 2", "qk_norm all"),
]
MASKS = {
    "none": None,
    "left": torch.ones(BATCH, POS).bool(),
    "right": torch.ones(BATCH, POS).bool(),
}
MASKS["left"][0, :3], MASKS["left"][2, :1] = False, False
MASKS["right"][0, 4:], MASKS["right"][3, 6:] = False, False
RIGHT, WRONG = torch.tensor([3, 0, 7, 22, 5]), torch.tensor([1, 4, 2, 9, 8])
METRIC = logit_diff(RIGHT, WRONG)


def masked(mask):
    return {} if mask is None else {"attention_mask": mask}


def last_real(mask):
    return torch.full((BATCH,), POS - 1) if mask is None else POS - 1 - mask.flip(1).int().argmax(1)


def measured(logits, mask):
    """Return the metric by hand: the difference of two logits at the last real token of each
    text.
    """
    rows = torch.arange(BATCH)
    last = logits[rows, last_real(mask)]
    return last[rows, RIGHT] - last[rows, WRONG]


@torch.no_grad()
def brute(model, tokens, changes, mask=None):
    """Return the metric of a whole run in which PyTorch's own hooks change the outputs of
    modules.
    """
    with contextlib.ExitStack() as stack:
        for name, change in changes:
            hook = model.get_submodule(name).register_forward_hook(
                lambda module, args, output, change=change: change(output.clone())
            )
            stack.callback(hook.remove)
        return measured(model(tokens, **masked(mask)), mask)


def put(source, *index):
    def change(value):
        value[index] = source[index]
        return value

    return change


def close(ours, theirs):
    scale = theirs.abs().max().clamp(min=1e-3).item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11 * scale)


def sites_of(model):
    ends = {name.split(".", 2)[2] for name, _ in model.named_modules() if name.count(".") > 1}
    streams = ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "mlp.post"]
    return [site for site in streams if site in ends], ["z", "q", "k", "v", "scores", "pattern"]


EVERY = slice(None)


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("form", "mask"), [(f, list(MASKS)[i % 3]) for i, f in enumerate(FORMS)])
def test_patching_every_site_equals_whole_runs(form, mask):
    model, mask = variant(form), MASKS[mask]
    clean, corrupted = some_tokens(1), some_tokens(2)
    pairs = draw_pairs(attention_mask=mask)
    _, cache = HookedRunner(model).run_with_cache(clean, **masked(mask))
    base, target = (brute(model, text, [], mask) for text in (corrupted, clean))
    streams, inside = sites_of(model)
    for site in streams + inside:
        found = activation_patching(model, pairs, site)
        axis = "pos" if site in streams else "head"
        assert found.axes == ("layer", axis, "example")
        close(found.base, base)
        close(found.target, target)
        places = list(itertools.product(*map(range, found.values.shape[:2])))
        for layer, place in random.Random(site).choices(places, k=4):
            name = f"blocks.{layer}.{site if site in streams else 'attn.' + site}"
            by_query = site in ("scores", "pattern")
            index = (EVERY, place) if axis == "pos" or by_query else (EVERY, EVERY, place)
            expected = brute(model, corrupted, [(name, put(cache[name], *index))], mask)
            close(found.values[layer, place], expected - base)


@pytest.mark.parametrize("name", ["pre", "not causal"])
def test_earlier_positions_that_read_later_ones_follow_an_edit(name):
    model, tokens = variant(name), some_tokens(shape=(70, POS))
    everything = torch.ones(POS, POS, dtype=torch.bool)
    arguments = {"query_key_mask": everything} if name == "pre" else {}
    given = {"input_ids": tokens, **arguments}
    pairs = Pairs(given, metric=lambda logits: logits[:, 0, 3])
    changes = [{"blocks.0.attn.z": edits.zero(pos=pos)} for pos in range(POS)]
    found = sweep(model, pairs, changes)
    for pos, effect in enumerate(found.values):
        hook = model.blocks[0].attn.z.register_forward_hook(
            lambda module, args, output, pos=pos: output.index_fill(1, torch.tensor(pos), 0)
        )
        edited = model(tokens, **arguments)
        hook.remove()
        close(effect, (edited - model(tokens, **arguments))[:, 0, 3])


@pytest.mark.parametrize(
    ("site", "over", "end"),
    [
        ("embed", ("pos",), ""),
        ("ln_final.normalized", ("pos",), ""),
        ("mlp.pre", ("layer", "pos"), "mlp.pre"),
        ("ln1.normalized", ("layer", "pos"), "ln1.normalized"),
        ("attn.z", ("layer", "head"), "attn.z"),
        ("blocks.1.resid_mid", ("layer", "pos"), "resid_mid"),
    ],
)
def test_any_point_is_a_site(site, over, end):
    model, clean, corrupted = variant("pre"), some_tokens(1), some_tokens(2)
    effects = activation_patching(model, draw_pairs(), site)
    assert effects.axes == (*over, "example")
    assert effects.labels.get("layer") == {"": None, "resid_mid": (1,)}.get(end, (0, 1))
    layers = effects.labels.get("layer", [None])
    names = [f"blocks.{layer}.{end}" if end else site for layer in layers]
    _, cache = HookedRunner(model).run_with_cache(clean, names=names)
    base = brute(model, corrupted, [])
    for values, name in zip(effects.values.view(len(names), -1, BATCH), names, strict=True):
        index = (EVERY, EVERY, 2) if "head" in over else (EVERY, 2)
        close(values[2], brute(model, corrupted, [(name, put(cache[name], *index))]) - base)


@torch.no_grad()
def alone(model, tokens, hooks, metric=measured, mask=None):
    return metric(HookedRunner(model).run_with_hooks(tokens, hooks=hooks, **masked(mask)), mask)


def random_edit(draw, caches, is_left):
    """Return a random selector and a random edit for it.

    Args:
        draw: the source of the choices.
        caches: runs of other texts.
        is_left: whether texts are padded on the left, and so have no common mean at each position.
    """
    layer, cache = draw.randrange(2), caches[draw.randrange(2)]
    pos = draw.choice(
        [{}, {"pos": draw.randrange(-4, 0)}, {"pos": slice(draw.randrange(POS), None)}]
    )
    query = draw.randrange(POS)
    place = draw.choice(
        [
            (f"blocks.{layer}.resid_pre", pos),
            ("blocks.*.attn_out", pos),
            (f"blocks.{layer}.attn.z", pos | {"head": draw.randrange(5)}),
            ("blocks.*.attn.v", pos | {"kv_head": 0}),
            (f"blocks.{layer}.attn.k", pos),
            (f"blocks.{layer}.attn.pattern", {"head": [0, 3], "query": slice(query, query + 1)}),
            ("embed", pos),
            ("ln_final.normalized", pos),
            (f"blocks.{layer}.resid_post", pos | {"batch": [1, 3]}),
        ]
    )
    name, where = place
    values = cache[name if "*" not in name else name.replace("*", "0")]
    axis = "query" if "query" in where else "pos"
    across = ("batch", axis) if is_left else ("batch",)
    kinds = [
        lambda: edits.zero(**where),
        lambda: edits.mean(cache, across=across, **where),
        lambda: edits.resample(values, draw.randrange(9), **where),
        lambda: edits.replace(cache, **where),
        lambda: edits.scale(draw.uniform(-2, 2), **where),
        lambda: edits.noise(0.7, draw.randrange(9), **where),
    ]
    return name, draw.choice(kinds)()


METRICS = {
    "last": METRIC,
    "third last": logit_diff(RIGHT, WRONG, pos=-3),
    "column 2": logit_diff(RIGHT, WRONG, pos=2),
    "all": lambda logits: logits.logsumexp(-1).mean(1),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(14))
def test_random_sweeps_equal_whole_runs(seed):
    draw = random.Random(seed)
    form, metric = draw.choice(FORMS), draw.choice(list(METRICS))
    model, tokens = variant(form), some_tokens(seed)
    runner = HookedRunner(model)
    # A metric of fixed columns may read padding, whose logits may differ in a resumed run. So use
    # padding only with the metric of the last token.
    mask = MASKS[draw.choice(list(MASKS))] if metric == "last" else None
    caches = [runner.run_with_cache(some_tokens(n), **masked(mask))[1] for n in (8, 9)]
    entries = [
        [random_edit(draw, caches, mask is MASKS["left"]) for _ in range(draw.choice([1, 1, 2, 3]))]
        for _ in range(9)
    ]
    entries += [{"blocks.1.attn_out": lambda x, point: -x}]
    entries += [{"blocks.0.attn.scores": edits.knockout(query=-1, key=slice(1, 3))}, {}]
    budget = draw.choice([2**30, 700_000])
    found = sweep(model, tokens, entries, METRICS[metric], attention_mask=mask, max_bytes=budget)
    assert found.axes == ("edit", "example")
    read = measured if metric == "last" else lambda logits, mask: METRICS[metric](logits)
    base = alone(model, tokens, {}, read, mask)
    close(found.base, base)
    for n, entry in enumerate(entries):
        close(found.values[n], alone(model, tokens, entry, read, mask) - base)


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_a_sweep_may_edit_either_text(direction):
    model = variant("pre")
    clean, corrupted = some_tokens(3), some_tokens(4)
    source, edited = clean, corrupted
    if direction == "noising":
        source, edited = edited, source
    _, cache = HookedRunner(model).run_with_cache(source)
    entries = [
        {
            "blocks.0.mlp_out": edits.replace(cache, pos=-1),
            "blocks.1.attn_out": edits.replace(cache),
        },
        {"blocks.1.attn.z": edits.replace(cache, head=2)},
    ]
    pairs = Pairs(clean, corrupted, metric=METRIC)
    found = sweep(model, pairs, entries, direction=direction)
    base = alone(model, edited, {})
    close(found.base, base)
    close(found.target, alone(model, source, {}))
    for n, entry in enumerate(entries):
        close(found.values[n], alone(model, edited, entry) - base)
    with pytest.raises(ValueError, match="corrupted texts"):
        sweep(model, Pairs(clean, metric=METRIC), entries, direction=direction)
    assert sweep(model, pairs, [{"embed": edits.zero()}]).target is None


@pytest.mark.parametrize("is_first", [True, False])
def test_each_edit_of_a_sweep_has_its_own_words(is_first):
    """The edits differ in the first of six changes, or in the last."""
    model, tokens = variant("pre"), some_tokens()
    _, cache = HookedRunner(model).run_with_cache(some_tokens(8))
    entries = []
    for head in range(2):
        entry = [("blocks.1.mlp_out", edits.scale(0.5))] * 5
        mean = edits.mean(cache, across=("batch", "pos"), head=head)
        entry.insert(0 if is_first else 5, ("blocks.1.attn.z", mean))
        entries.append(entry)
    words = sweep(model, tokens, entries, METRICS["last"]).words["edit"]
    if is_first:
        said = "blocks.1.attn.z: edits.mean(..., head={}) and 5 more"
        assert words == [said.format(head) for head in range(2)]
    else:
        # The short forms are equal.
        whole = (
            "edits.scale(0.5), blocks.1.attn.z: edits.mean(cache, across=('batch', 'pos'), head={})"
        )
        assert all(word.endswith(whole.format(head)) for head, word in enumerate(words))


def test_a_long_description_leaves_out_the_arguments_of_edits():
    model, tokens = variant("pre"), some_tokens()
    _, cache = HookedRunner(model).run_with_cache(some_tokens(8))
    mean = edits.mean(cache, across=("batch", "pos"), head=1, pos=[0, 1, 2])
    entries = [{"blocks.1.attn.z": mean}, {"embed": edits.zero(), "blocks.1.attn.z": mean}]
    words = sweep(model, tokens, entries, METRICS["last"]).words["edit"]
    said = "blocks.1.attn.z: edits.mean(..., head=1, pos=[0, 1, 2])"
    assert words == [said, "embed: edits.zero() and 1 more"]
    entries = [
        {"embed": edits.zero(), "blocks.1.attn.z": edits.mean(cache, across=("batch", "pos"))}
    ]
    (word,) = sweep(model, tokens, entries, METRICS["last"]).words["edit"]
    assert word == "embed: edits.zero(), blocks.1.attn.z: edits.mean(...)"


def draw_pairs(**options):
    return Pairs(some_tokens(1), some_tokens(2), torch.stack([RIGHT, WRONG], 1), **options)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("site", "over", "options", "index"),
    [
        ("z", ("head", "pos"), {}, lambda head, pos: (EVERY, pos, head)),
        ("k", ("layer", "head"), {"heads": [2, 0]}, lambda _, head: (EVERY, EVERY, head)),
        ("mlp.post", ("neuron", "layer"), {"neurons": 5}, lambda n, _: (..., slice(n, n + 5))),
        ("mlp.post", ("layer", "neuron"), {"layers": [1]}, lambda _, n: (..., n)),
        ("pattern", ("layer", "query"), {}, lambda _, query: (EVERY, EVERY, query)),
        ("scores", ("key",), {"layers": [1]}, lambda key: (..., key)),
        ("resid_post", ("layer",), {}, lambda _: ()),
    ],
)
def test_any_axes_in_both_directions(site, over, options, index):
    model, pairs = variant("grouped"), draw_pairs()
    for direction in ("denoising", "noising"):
        source, tokens = pairs.clean, pairs.corrupted
        if direction == "noising":
            source, tokens = tokens, source
        _, cache = HookedRunner(model).run_with_cache(source)
        found = activation_patching(model, pairs, site, over, direction=direction, **options)
        assert (found.axes, found.about["direction"]) == ((*over, "example"), direction)
        close(found.target, brute(model, source, []))
        layers = options.get("layers", range(2))
        for place in itertools.product(*(range(n) for n in found.values.shape[:-1])):
            labels = [found.labels[axis][at] for axis, at in zip(over, place, strict=True)]
            starts = [int(str(label).partition("-")[0]) for label in labels]
            chosen = [starts[over.index("layer")]] if "layer" in over else layers
            names = [
                f"blocks.{n}.{'attn.' if site in ('z', 'k', 'pattern', 'scores') else ''}{site}"
                for n in chosen
            ]
            changes = [(name, put(cache[name], *index(*starts))) for name in names]
            close(found.values[place], brute(model, tokens, changes) - found.base)


def test_labels_say_what_was_patched():
    found = activation_patching(
        variant("pre"), draw_pairs(), site="mlp.post", over=("neuron",), neurons=6
    )
    assert found.labels["neuron"] == ("0-5", "6-11", 12)
    assert found.unit == "logits"
    assert "logit_diff" in found.about["metric"]


def test_labels_say_that_several_layers_were_patched_together():
    model, pairs = variant("pre"), draw_pairs()
    n_layers = len(model.blocks)
    for layers, together in ((None, f"all {n_layers} layers"), ([0, 1], "layers 0, 1")):
        result = activation_patching(model, pairs, "z", over="head", layers=layers)
        assert f"head 1 of {together}" in [place.name for place in result.top(9)]
        assert together in repr(result).splitlines()[1]
        assert "together" not in result.to_dataframe()
    for options in (
        dict(over=["layer", "head"]),
        dict(over="head", layers=[1]),
        dict(over="head", layers=1),
    ):
        result = activation_patching(model, pairs, "z", **options)
        assert " of " not in repr(result.top(9)) + repr(result).splitlines()[1]


def test_ablation_of_each_head_is_the_same_sweep():
    model, tokens = variant("like llama"), some_tokens(3)
    _, cache = HookedRunner(model).run_with_cache(some_tokens(4))
    ablation = edits.mean(cache)
    found = activation_patching(model, Pairs(tokens, metric=METRIC), "z", edit=ablation)
    assert found.target is None
    assert "mean" in found.about["edit"]
    for layer, head in itertools.product(range(2), range(6)):
        name = f"blocks.{layer}.attn.z"
        source = cache[name].mean(0, keepdim=True).expand_as(cache[name])
        expected = brute(model, tokens, [(name, put(source, EVERY, EVERY, head))])
        close(found.values[layer, head], expected - brute(model, tokens, []))


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_spans_connect_texts_of_different_lengths(direction):
    model, clean, corrupted = variant("rotary"), some_tokens(1), some_tokens(2, (BATCH, POS + 2))
    spans = {"name": [[1, 2], [0, 1], [4, 3], [5, 6], [2, 2]], "end": [[POS - 1]] * BATCH}
    others = {"name": [[3, 2], [1, 2], [0, 1], [7, 8], [6, 4]], "end": [[POS + 1]] * BATCH}
    answers = torch.stack([RIGHT, WRONG], 1)
    pairs = Pairs(clean, corrupted, answers, spans=spans, corrupted_spans=others)
    found = activation_patching(
        model, pairs, site="attn_out", over=("span", "layer"), direction=direction
    )
    assert found.labels["span"] == ("name", "end")
    texts, places = (corrupted, clean), (others, spans)
    if direction == "noising":
        texts, places = texts[::-1], places[::-1]
    _, cache = HookedRunner(model).run_with_cache(texts[1])
    for span, layer in itertools.product(range(2), range(2)):
        name, own, theirs = f"blocks.{layer}.attn_out", *(list(p.values())[span] for p in places)

        def change(value, name=name, own=own, theirs=theirs):
            for row in range(BATCH):
                for at, source in zip(own[row], theirs[row], strict=True):
                    value[row, at] = cache[name][row, source]
            return value

        with torch.no_grad():
            handle = model.get_submodule(name).register_forward_hook(
                lambda m, a, out: change(out.clone())
            )
            last = model(texts[0])[torch.arange(BATCH), -1]
            handle.remove()
        expected = last[torch.arange(BATCH), RIGHT] - last[torch.arange(BATCH), WRONG]
        close(found.values[span, layer], expected - found.base)


@pytest.mark.parametrize(
    ("site", "axes"),
    [
        ("resid_pre", ("layer", "span")),
        ("z", ("layer", "head", "span")),
        ("embed", ("span",)),
    ],
)
def test_texts_of_different_lengths_are_compared_at_spans(site, axes):
    model, clean, corrupted = variant("rotary"), some_tokens(1), some_tokens(2, (BATCH, POS + 2))
    spans = {"name": [[1, 2], [0], [3], [5, 6], [2]]}
    others = {"name": [[3], [2], [0, 1], [8], [4]]}
    options = dict(spans=spans, corrupted_spans=others, last_only=True, metric=METRIC)
    pairs = Pairs(clean, corrupted, **options)
    effects = activation_patching(model, pairs, site)
    assert effects.axes == (*axes, "example")
    # Without the span, an error gives the axes that fit.
    with pytest.raises(ValueError, match=re.escape(f"write over={[*axes]}")):
        activation_patching(model, pairs, site, over=[axes[0].replace("span", "pos")])
    with pytest.raises(ValueError, match="'pattern', with the axes batch, head, query, key"):
        activation_patching(model, pairs, "pattern")
    # Texts of one length are compared at spans too, unless `over` says otherwise.
    other = some_tokens(2)
    same_length = Pairs(clean, other, spans=spans, metric=METRIC)
    effects = activation_patching(model, same_length, site)
    assert effects.axes == (*axes, "example")
    _, cache = HookedRunner(model).run_with_cache(clean)
    name = {"resid_pre": "blocks.1.resid_pre", "z": "blocks.1.attn.z", "embed": "embed"}[site]

    def put(value, point):
        for row, columns in enumerate(spans["name"]):
            selected = (row, columns, 2) if site == "z" else (row, columns)
            value[selected] = cache[name][selected]

    at = {"layer": 1, "head": 2} if site == "z" else {"layer": 1} if site != "embed" else {}
    found = effects.select(span="name", **at)
    edited = HookedRunner(model).run_with_hooks(other, hooks={name: put})
    close(found.values, METRIC(edited) - METRIC(model(other)))
    by_position = [axis.replace("span", "pos") for axis in axes]
    assert "pos" in activation_patching(model, same_length, site, over=by_position).axes


def same(model, tokens, entries, metric=METRIC, **options):
    """Check that a sweep equals a separate run for each edit."""
    found = sweep(model, tokens, entries, metric, **options)
    read = measured if metric is METRIC else lambda logits, mask: metric(logits)
    base = alone(model, tokens, {}, read)
    close(found.base, base)
    for n, entry in enumerate(entries):
        close(found.values[n], alone(model, tokens, entry, read) - base)


HEADS_OFF = [{f"blocks.{n % 2}.attn.z": edits.zero(head=n, pos=n)} for n in range(4)]


def test_a_sweep_inside_other_edits_has_them_in_every_run():
    model, tokens, outer = variant("pre"), some_tokens(), {"blocks.1.attn_out": edits.scale(0.5)}
    with HookedRunner(model).hooks(outer):
        found = sweep(model, tokens, HEADS_OFF, METRIC)
    base = alone(model, tokens, outer)
    close(found.base, base)
    for n, entry in enumerate(HEADS_OFF):
        close(found.values[n], alone(model, tokens, outer | entry) - base)


@pytest.mark.parametrize("name", ["blocks.0.mlp_out", "ln_final", "blocks.1"])
def test_hooks_of_the_user_see_whole_texts_and_one_batch(name):
    def first_row_and_column(module, args, output):
        output = output.clone()
        output[0, 2] = 0
        return output - output.mean((0, 1))

    model = variant("pre")
    model.get_submodule(name).register_forward_hook(first_row_and_column)
    same(model, some_tokens(), HEADS_OFF)


def wired(change):
    model = variant("embed_norm")
    change(model)
    return model


def scale_input(model):
    class Scaled(type(model)):
        def forward(self, tokens):
            resid, context = 2 * self.input_resid(tokens), self.context(tokens)
            for block in self.blocks:
                resid = block(resid, context)
            return self.unembed(resid)

    model.__class__ = Scaled


def scale_logits(model):
    class Scaled(type(model)):
        def forward(self, tokens):
            return 1.05 * super().forward(tokens)

    model.__class__ = Scaled


def write_in_place(model):
    block = model.blocks[1]
    forward = block.forward
    block.forward = lambda resid, context: resid.add_(forward(resid.clone(), context))


def between(model):
    block, model.between = model.blocks[0], HookPoint("batch pos d_model")
    forward = block.forward
    block.forward = lambda resid, context: forward(resid, context)
    block.register_forward_hook(lambda module, args, output: model.between(output))
    model.eval()


WIRINGS = {
    "one norm before and after": lambda m: setattr(m, "ln_final", m.ln_embed),
    "one norm inside and after": lambda m: setattr(m, "ln_final", m.blocks[1].ln2),
    "one norm in two blocks": lambda m: setattr(m.blocks[1], "ln1", m.blocks[0].ln1),
    "one block twice": lambda m: m.blocks.__setitem__(1, m.blocks[0]),
    "another input": scale_input,
    "other logits": scale_logits,
    "in place": write_in_place,
    "a point between blocks": between,
}


@pytest.mark.parametrize("wiring", WIRINGS)
def test_blocks_in_any_order_give_the_numbers_of_whole_runs(wiring):
    model = wired(WIRINGS[wiring])
    names = [name for name in HookedRunner(model).points if name != "pos_embed"]
    places = [
        n for n in names if n.endswith(("normalized", "scale", "embed", "between", "mlp_out"))
    ]
    if wiring == "one block twice":
        places = ["embed", "ln_final.normalized"]
    entries = [{name: edits.scale(0.5, pos=n % POS)} for n, name in enumerate(places)]
    same(model, some_tokens(), [*entries, {"blocks.0": lambda x, point: x * 2}])


def test_values_without_rows_are_edited_as_a_whole():
    model, tokens = variant("pre"), some_tokens()
    entries = [{"position_embedding": lambda x, point, n=n: x * n} for n in range(3)]
    same(model, tokens, entries)
    with HookedRunner(model).hooks({"embed": edits.scale(1.0)}):
        same(model, tokens, entries)


def test_edits_and_functions_at_one_point_act_in_order():
    model, tokens, bias = variant("pre"), some_tokens(), torch.arange(10.0).double()
    double, add = edits.scale(2.0, pos=[1, 4]), edits.add(bias, pos=slice(3, None))

    def shift(value, point):
        return value.roll(1, 0)

    orders = [*itertools.permutations((double, add, shift)), (double, add), (add, double)]
    entries = [[("blocks.0.attn_out", hook) for hook in hooks] for hooks in orders]
    same(model, tokens, entries)


def test_features_that_write_into_their_input_change_only_their_own_run():
    class Negated:
        def interchanged(self, value, source):
            return value.neg_()

    model, tokens = variant("pre"), some_tokens()
    source = HookedRunner(model).capture(tokens, names="blocks.0.mlp_out")
    negate = edits.interchange(source, Negated(), pos=2)
    same(model, tokens, [{"blocks.0.mlp_out": negate}, {"blocks.0.mlp_out": edits.scale(1.5)}])


def test_errors_come_before_the_first_edited_run():
    model, tokens, calls = variant("pre"), some_tokens(), []

    def function(value, point):
        calls.append(point)

    wrong = edits.replace(torch.zeros(BATCH, POS, 9))
    entries = [{"blocks.0.attn_out": function}, {"blocks.1.attn_out": wrong}]
    with pytest.raises(EditError, match="size 10"):
        sweep(model, tokens, entries, METRIC)
    assert not calls


def test_pairs_stand_in_place_of_tokens():
    model, pairs = variant("pre"), draw_pairs()
    found = sweep(model, pairs, HEADS_OFF)
    close(found.values, sweep(model, pairs.clean, HEADS_OFF, METRIC).values)
    with pytest.raises(ValueError, match="mask"):
        sweep(model, pairs, HEADS_OFF, attention_mask=torch.ones(BATCH, POS))


def test_a_warning_names_the_edit_with_a_nan_effect():
    model, tokens = variant("pre"), some_tokens()
    entries = [{"blocks.0.attn_out": edits.zero()}, {"ln_final.scale": edits.zero()}]
    with pytest.warns(UserWarning, match="1 of 2 edits .* edit 1"):
        found = sweep(model, tokens, entries, METRIC)
    assert found.values.isnan().any(1).tolist() == [False, True]


@pytest.mark.parametrize("direction", [None, "noising", "denoising"])
def test_a_warning_names_the_direction_if_edits_put_back_the_values_of_their_own_run(direction):
    model, tokens = variant("pre"), some_tokens()
    pairs = Pairs(tokens, tokens.roll(1, 1), metric=METRIC)
    names = [f"blocks.{layer}.mlp_out" for layer in range(2)]
    edited, other = (
        (pairs.corrupted, tokens) if direction == "denoising" else (tokens, pairs.corrupted)
    )
    runner = HookedRunner(model)
    _, own = runner.run_with_cache(edited, names=names)
    _, others = runner.run_with_cache(other, names=names)
    jobs = [{name: edits.replace(own)} for name in names]
    right = "noising" if direction == "denoising" else "denoising"
    with pytest.warns(UserWarning, match=f'all effects are about 0.*direction="{right}"'):
        sweep(model, pairs, jobs, direction=direction)
    # Without other texts, there is no direction.
    with pytest.warns(UserWarning, match="take the values from other texts"):
        sweep(model, edited, [[(name, edits.replace(own, pos=3))] for name in names], METRIC)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Some effects are not 0.
        sweep(model, pairs, [*jobs, {names[0]: edits.replace(others)}], direction=direction)
        # The values come from other texts, and change nothing because of the metric.
        nothing = Pairs(tokens, pairs.corrupted, metric=lambda logits: logits[:, -1, 0] * 0)
        sweep(model, nothing, [{names[0]: edits.replace(others)}], direction=direction)
        # Values of another position of the same run have effects too.
        sweep(
            model, pairs, [{names[0]: edits.replace(own, pos=3, source_pos=2)}], direction=direction
        )
        # Edits of other kinds may have no effect.
        sweep(model, nothing, [{names[0]: edits.resample(own)}], direction=direction)
        sweep(model, nothing, [*jobs, {names[0]: edits.zero()}], direction=direction)
        values = own[names[0]]
        sweep(model, pairs, [{names[0]: edits.replace(values)}], direction=direction)


@pytest.mark.parametrize(("rounding", "warns"), [(2e-5, True), (0.01, False)])
def test_rounding_of_many_layers_does_not_hide_values_put_back_into_their_own_run(rounding, warns):
    model, tokens = variant("pre").float(), some_tokens()
    _, own = HookedRunner(model).run_with_cache(tokens, names="*.mlp_out")
    shifts = iter([0.0, *[rounding] * 9])
    jobs = [{"blocks.1.mlp_out": edits.replace(own)}]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sweep(model, tokens, jobs, lambda logits: 0 * logits[:, -1, 0] + next(shifts))
    assert any("all effects are about 0" in str(each.message) for each in caught) is warns


def test_float32_agrees_to_the_stated_tolerance():
    model, tokens = variant("like llama").float(), some_tokens()
    entries = [
        {f"blocks.{n % 2}.{name}": edits.scale(2.0, pos=n)}
        for n, name in enumerate(("attn.q", "attn_out", "mlp.post", "ln1.scale", "resid_mid"))
    ]
    found, base = sweep(model, tokens, entries, METRIC), alone(model, tokens, {})
    expected = torch.stack([alone(model, tokens, entry) for entry in entries]) - base
    assert (found.values - expected).abs().max() <= 1e-5 * expected.abs().max()


class Bag(nn.Module):
    """A model that cannot be resumed in the middle. Its blocks are LSTMs, which return tuples."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 5)
        self.layers = nn.ModuleList(nn.LSTM(5, 5, batch_first=True) for _ in range(2))
        self.head = nn.Linear(5, VOCAB)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


@pytest.mark.parametrize("budget", [2**30, 40_000])
def test_models_without_steps_share_whole_runs(budget):
    model, tokens = Bag().double().eval(), some_tokens()
    entries = [{"layers.0": lambda x, point, n=n: x * n} for n in range(5)] + [
        {"embedding": torch.zeros_like and (lambda x, point: x[:, :1].expand_as(x))}
    ]
    found = sweep(model, tokens, entries, METRIC, max_bytes=budget)
    base = alone(model, tokens, {})
    for n, entry in enumerate(entries):
        close(found.values[n], alone(model, tokens, entry) - base)


class Outliers(nn.Module):
    """A map like the 8-bit maps of bitsandbytes. It rounds its input, except in columns in which
    any row has a value above a threshold.
    """

    def __init__(self, inner):
        super().__init__()
        self.inner, self.state = inner, SimpleNamespace(threshold=4.0)
        self.weight = inner.weight

    def forward(self, x):
        is_exact = (x.flatten(0, -2).abs() > self.state.threshold).any(0)
        return self.inner(torch.where(is_exact, x, x.round(decimals=1)))


def test_maps_that_find_outliers_in_all_rows_run_each_edit_alone():
    model, tokens = variant("pre"), some_tokens()
    model.blocks[1].mlp.input = Outliers(model.blocks[1].mlp.input).eval()
    entries = [{"blocks.1.ln2.normalized": edits.scale(factor)} for factor in (0.5, 1.0, 8.0)]
    found, base = sweep(model, tokens, entries, METRIC), alone(model, tokens, {})
    for n, entry in enumerate(entries):
        close(found.values[n], alone(model, tokens, entry) - base)


class TimeMajor(nn.Module):
    """A model whose values have the positions as the first axis.

    Its points declare this order of axes, or declare no axes.
    """

    def __init__(self, kind):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 6), nn.Linear(6, VOCAB)
        self.positions = nn.Embedding(40, 6)
        layer = nn.TransformerEncoderLayer(6, 2, 7, dropout=0.0)
        self.inner = nn.GRU(6, 6) if kind == "gru" else nn.TransformerEncoder(layer, 2)
        self.out = HookPoint("pos batch d_model") if kind == "declared" else nn.Identity()

    def forward(self, tokens):
        # As in nanoGPT, these embeddings [pos, d_model] have no axis of texts.
        places = self.positions(torch.arange(tokens.shape[1]))
        x = (self.embedding(tokens) + places).transpose(0, 1)
        x = self.inner(x)
        return self.head(self.out(x[0] if isinstance(x, tuple) else x).transpose(0, 1))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("kind", ["gru", "encoder", "declared"])
@pytest.mark.parametrize(("size", "pos", "runs"), [(2, 10, 5), (5, 10, 2), (6, 6, 3)])
def test_the_batch_is_found_beside_an_axis_of_the_same_size(kind, size, pos, runs):
    """The sweep must find the axis of the batch, also if the number of runs times the number of
    texts equals the number of positions.
    """
    model, tokens, read = TimeMajor(kind).double().eval(), some_tokens(1, (size, pos)), log_prob(3)
    second = torch.tensor([1])
    for name in ("inner", "positions", "out"):
        entries = [{name: lambda x, p, n=n: x.index_fill(0, second, n)} for n in range(runs)]
        if kind == "declared" and name == "out":
            own = [[n % 5, -1] for n in range(size)]
            values = torch.rand(pos, size, 6, dtype=torch.float64)
            kinds = [edits.zero(batch=slice(1, None), pos=own), edits.resample(values)]
            entries = [{name: edit} for edit in kinds for _ in range(runs)]
        found = sweep(model, tokens, entries, read)
        with torch.no_grad():
            base = read(model(tokens))
        for entry, effect in zip(entries, found.values, strict=True):
            close(effect, alone(model, tokens, entry, lambda logits, mask: read(logits)) - base)


@pytest.mark.parametrize("times", [1, 4])
@torch.no_grad()
def test_whole_runs_stay_within_the_bound_too(times):
    model, tokens, metric = Bag().double().eval(), some_tokens(1, (BATCH, 31)), METRICS["all"]
    entries = [{"head": edits.scale(0.1 * n)} for n in range(30)]
    with pytest.raises(ValueError, match="max_bytes must be at least") as refused:
        sweep(model, tokens, entries, metric, max_bytes=1)
    budget = times * int(str(refused.value).split()[5].replace(",", ""))
    with PeakBytes() as first:
        model(tokens)
    with PeakBytes() as memory:
        sweep(model, tokens, entries, metric, max_bytes=budget)
    assert memory.peak <= budget + first.peak


@torch.no_grad()
def test_the_memory_of_the_metric_of_several_runs_is_counted():
    model, tokens = variant("pre", vocab_size=900), some_tokens()
    metric = kl_divergence(model(tokens) / 2, None)
    entries = [{"blocks.1.attn.z": edits.scale(n / 9)} for n in range(17)]
    with PeakBytes() as first:
        model(tokens)
    budget = 5_000_000
    with PeakBytes() as memory:
        sweep(model, tokens, entries, metric, max_bytes=budget)
    assert memory.peak <= budget + first.peak


@torch.no_grad()
def test_memory_stays_within_its_bound():
    model, tokens = variant("pre", n_layers=5, d_model=60, n_ctx=40), some_tokens(1, (BATCH, 31))
    entries = [{f"blocks.{n % 5}.attn.pattern": edits.zero(head=n // 5)} for n in range(30)]
    few = logit_diff(RIGHT, WRONG)
    with PeakBytes() as first:
        model(tokens)
    peaks = {}
    for budget in (2**22, 2**24):
        with PeakBytes() as memory:
            found = sweep(model, tokens, entries, few, max_bytes=budget)
        peaks[budget] = memory.peak
        assert memory.peak <= budget + first.peak
        close(found.values, separately(model, tokens, entries, few))
    assert peaks[2**24] > 2 * peaks[2**22]
    with pytest.raises(ValueError, match=r"max_bytes must be at least [\d,]+ .*got 9,999"):
        sweep(model, tokens, entries, few, max_bytes=9_999)


CLEAN, CORRUPTED = some_tokens(1), some_tokens(2)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (UnknownNameError, "resid_pre", {"site": "resid_per"}),
        (UnknownNameError, "mlp_out", {"site": "mlp_out", "form": "attention only"}),
        (ValueError, r"\[0, 1\].*\[2\]", {"layers": [2]}),
        (ValueError, r"heads.*\[6\]", {"site": "z", "heads": [6]}),
        (ValueError, r"layers.*got 2", {"layers": 2}),
        (ValueError, "neurons.*0", {"site": "mlp.post", "over": ("neuron",), "neurons": 0}),
        (ValueError, "pos.*'head'", {"over": ("layer", "head")}),
        (ValueError, "without repetition", {"over": ("layer", "layer")}),
        (ValueError, "spans", {"over": ("span",)}),
        (ValueError, "not both", {"over": ("span", "pos")}),
        (ValueError, "heads=", {"site": "z", "over": ("layer", "pos"), "heads": [3]}),
        (ValueError, "neurons=", {"neurons": 4}),
        (ValueError, "direction.*'up'", {"direction": "up"}),
        (ValueError, "corrupted", {"corrupted": None}),
        (ValueError, "NaN", {"metric": lambda logits: logits[:, -1, 0] / 0 * 0}),
        (ValueError, r"\[5\].*\[2\]", {"metric": lambda logits: logits[:2, -1, 0]}),
        (ValueError, "clean run.*'noising'", {"edit": edits.zero(), "direction": "noising"}),
        (TypeError, "edit must.*sweep", {"edit": lambda value, point: value}),
        (TypeError, r"edits.zero\(\)", {"edit": edits.zero}),
        (TypeError, "site must.*Pairs", {"site": METRIC}),
        (TypeError, "attach", {"model": nn.Sequential(nn.Linear(3, 5)).eval()}),
        (ValueError, "layers.*embed", {"site": "embed", "layers": 0}),
        (ValueError, "'layer' at embed", {"site": "embed", "over": ("layer",)}),
        (TypeError, "tensor .*Pairs", {"pairs": CLEAN}),
        (TypeError, "HookedRunner's .model", {"model": HookedRunner(variant("pre"))}),
        (EditError, "pos", {"edit": edits.zero(pos=7), "over": ("layer",)}),
        (EditError, "size 5", {"edit": edits.replace(torch.zeros(4, POS, 10))}),
    ],
)
def test_bad_input_is_refused(error, match, options):
    model = variant(options.pop("form", "pre"))
    texts = CLEAN, options.pop("corrupted", CORRUPTED)
    given = {"model": model, "pairs": Pairs(*texts, metric=options.pop("metric", METRIC))}
    with pytest.raises(error, match=match):
        activation_patching(**given | options)


@pytest.mark.usefixtures("unchecked")
def test_sweeps_without_numbers_are_errors():
    model, tokens = variant("pre"), some_tokens()
    for wrong in (HEADS_OFF[0], [edits.zero()], [lambda value, point: value]):
        with pytest.raises(TypeError, match="edits"):
            sweep(model, tokens, wrong, METRIC)
    with pytest.raises(TypeError, match="'logit_diff'"):
        sweep(model, tokens, HEADS_OFF, "logit_diff")
    with pytest.raises(ValueError, match="at least one edit"):
        sweep(model, tokens, [], METRIC)
    with pytest.raises(ModeError):
        sweep(model.train(), tokens, [{"embed": edits.zero()}], METRIC)
    model.unused = HookPoint("batch")
    model.eval()
    measured = []
    for wrong in ({"unused": edits.zero()}, {"embed": edits.replace(torch.zeros(4, POS, 10))}):
        with pytest.raises((NeverFiredError, EditError)):
            sweep(model, tokens, [*HEADS_OFF, wrong], lambda logits: measured.append(1))
    # The errors come before any edited run.
    assert not measured


def test_texts_with_an_edit_get_the_pairs_in_the_error():
    with pytest.raises(TypeError, match=r"Pairs\(texts, metric=cross_entropy\(texts\)\)"):
        activation_patching(variant("pre"), ["a", "b"], "z", edit=edits.zero())
    with pytest.raises(TypeError, match="answers") as error:
        activation_patching(variant("pre"), ["a", "b"], "z")
    assert "cross_entropy" not in str(error.value)


def test_a_mean_over_batch_and_positions_is_described_in_full():
    model, tokens = variant("pre"), some_tokens()
    _, cache = HookedRunner(model).run_with_cache(some_tokens(8))
    mean = edits.mean(cache, across=("batch", "pos"), head=1)
    (word,) = sweep(model, tokens, [{"blocks.1.attn.z": mean}], METRIC).words["edit"]
    assert word == "blocks.1.attn.z: edits.mean(cache, across=('batch', 'pos'), head=1)"


def test_effects_say_what_was_edited():
    def halved(value, point):
        return value / 2

    zero, half = edits.zero(pos=1), edits.scale(0.5, pos=[0, 1])
    several = [("blocks.0.mlp_out", zero), ("*.attn_out", half)]
    swept = sweep(variant("pre"), some_tokens(), [{"embed": halved}, several], METRIC)
    said = "blocks.0.mlp_out: edits.zero(pos=1) and 1 more"
    assert swept.words == {"edit": ["embed: halved", said]}
    assert {entry.words["edit"] for entry in swept.top(2)} == {"embed: halved", said}


@pytest.mark.parametrize("name", ["two MLPs", "blocks.0.mlp_out"])
def test_runs_of_a_sweep_can_have_names(name):
    model, tokens = variant("pre"), some_tokens()
    points = ["blocks.0.mlp_out", "blocks.1.mlp_out"]
    runs = {name: dict.fromkeys(points, edits.zero()), "half": [(points[1], edits.scale(0.5))]}
    swept = sweep(model, tokens, runs, METRIC)
    assert swept.labels["edit"] == (name, "half")
    assert swept.words == {}
    base = brute(model, tokens, [])
    both = brute(model, tokens, [(point, torch.zeros_like) for point in points])
    half = brute(model, tokens, [(points[1], lambda value: value / 2)])
    torch.testing.assert_close(swept.values, torch.stack([both, half]) - base)
    torch.testing.assert_close(swept.select(edit="half").mean(), (half - base).mean())
    with pytest.raises(ValueError, match="at least one"):
        sweep(model, tokens, {}, METRIC)
