"""Padding changes no number.

Every function runs on a batch of texts of unequal length. The result must equal the results of the
texts alone.
"""

import functools

import pytest
import torch

import interp
import models
from hooks import ActivationCache, CacheError, EditError, HookedRunner, SelectionError, token_mask
from interp import Pairs, directions, edits, features, protocol, store
from interp.inputs.cached import text_of
from interp.measuring import measure
from tests import tiny
from tests.streams import made

ROWS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8], [11, 7, 11, 7]]
OTHERS = [[3, 2, 4, 1, 5], [9, 2, 7, 5, 3, 5, 8], [11, 9, 11, 7]]
ANSWERS = torch.tensor([[13, 14], [15, 16], [17, 18]])
RIGHT, WRONG = ANSWERS.T


@functools.cache
def model_of(kind):
    """Return a model in float64, the same object at each call."""
    if kind != "attached gpt2":
        more = {"learned": {}, "rotary": dict(positions="rotary", norm="rmsnorm", window=4)}[kind]
        return made(**more)
    from models import attach

    model = tiny.model("GPT2LMHeadModel", num_hidden_layers=2, num_attention_heads=3).double()
    attach(model)
    return model


def readout(model, batch, read):
    """Run the texts with a lazy cache, and return a reading of the cache."""
    return read(interp.run_with_cache(model, batch, lazy=True)[1])


def on_pairs(function, **options):
    def run(model, clean, other, n):
        pairs = Pairs(clean, other, ANSWERS[n])
        return function(model, pairs, **options).values

    return run


def on_cache(read):
    return lambda model, clean, other, n: readout(model, clean, lambda cache: read(model, cache, n))


def measured(metric):
    def run(model, clean, other, n):
        tokens, mask = clean.tokens, clean.attention_mask
        logits = interp.protocol.logits_of(interp.run_with_cache(model, clean, names="embed")[0])
        return measure(metric(n, tokens, mask, logits), logits, mask)

    return run


def circuit(model, clean, other, n):
    graph = interp.graph.Graph(model)
    kept = torch.arange(len(graph.edges)) % 3 > 0
    logits = interp.run_circuit(
        model,
        Pairs(clean, other, ANSWERS[n]),
        [e for e, k in zip(graph.edges, kept, strict=True) if k],
    )
    return measure(interp.logit_diff(RIGHT[n], WRONG[n]), logits, clean.attention_mask)


def lensed(model, cache, n):
    """Return the entropy and the largest probability of the lens at the last token of each text."""
    found = interp.logit_lens(model, cache, top_k=3)
    seen = ~found.entropy.isnan()
    last = seen[0].cumsum(1).argmax(1)
    rows = torch.arange(len(last))
    return torch.cat([found.entropy[:, rows, last], found.probabilities[:, rows, last, 0]])


def strongest(model, clean, other, n):
    places = interp.max_activating(
        model, [ROWS[i] for i in n], "blocks.1.resid_post", k=99, batch=3
    )
    best = {}
    for place in places:
        best.setdefault(place.text, place.value)
    return torch.tensor([[best[text] for text in sorted(best)]])


def shares(function):
    """Return a function that measures a circuit, with a share for each example.

    The values of `function` are shares of the mean difference over all examples, which is another
    number for a text alone. `target` is the difference of each example in the same unit, so the
    quotient is the share of the example's own difference.
    """

    def run(model, clean, other, n):
        graph = interp.graph.Graph(model)
        kept = interp.Circuit(graph, [edge for k, edge in enumerate(graph.edges) if k % 3])
        result = function(model, Pairs(clean, other, ANSWERS[n]), kept)
        return result.values / result.target

    return run


def last_of(values):
    """Return the vectors at the last token of each text, [component, d_model, batch].

    `values` [component batch pos d_model] are NaN at padding.
    """
    last = (~values[0, ..., 0].isnan()).cumsum(1).argmax(1)
    return values[:, range(len(last)), last].movedim(1, -1)


def generated(model, clean, other, n):
    """Return the new tokens of each text, as numbers [token, text]."""
    if not isinstance(model, models.Transformer):
        tokens, mask = clean
        if mask is not None and not mask[:, -1].all():
            pytest.skip("transformers generates after padding on the left only")
        made = model.generate(
            tokens, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0
        )
        return made[:, -3:].T.double()
    rows = models.generate(model, clean, max_new_tokens=3, stop=())
    return torch.tensor([row[-3:] for row in rows]).T.double()


LAYERS = dict(over=["layer"])
READ = {
    "logit_diff": measured(lambda n, *_: interp.logit_diff(RIGHT[n], WRONG[n])),
    "log_prob two back": measured(lambda n, *_: interp.log_prob(RIGHT[n], pos=-2)),
    "rank": measured(lambda n, *_: interp.rank(RIGHT[n])),
    "cross_entropy": measured(lambda n, t, mask, _: interp.cross_entropy(t, attention_mask=mask)),
    "kl_divergence": measured(
        lambda n, t, mask, logits: interp.kl_divergence(
            logits.roll(1, -1), None, attention_mask=mask
        )
    ),
    "logit_lens": on_cache(lensed),
    "direct_logit_attribution": on_cache(
        lambda model, cache, n: (
            interp.direct_logit_attribution(
                model, cache, right=RIGHT[n], wrong=WRONG[n], pos=-1
            ).values
        )
    ),
    "accumulated": on_cache(
        lambda model, cache, n: (
            interp.accumulated_logits(model, cache, right=RIGHT[n], pos=-2).values
        )
    ),
    "previous_token": on_cache(lambda model, cache, n: interp.head_scores(model, cache).values),
    "induction": on_cache(
        lambda model, cache, n: interp.head_scores(model, cache, "induction").values
    ),
    "distance": on_cache(
        lambda model, cache, n: interp.head_scores(model, cache, "distance").values
    ),
    "spectra": on_cache(
        lambda model, cache, n: (
            interp.svd_spectra(interp.svd_targets(model, cache))["qkt"].s[..., :3].movedim(0, -1)
        )
    ),
    "max_activating": strongest,
    "decompose": on_cache(lambda model, cache, n: last_of(interp.decompose(model, cache).values)),
    "generate": generated,
    "sweep": lambda model, clean, other, n: (
        interp.sweep(
            model,
            clean,
            [{"blocks.1.resid_pre": edits.zero(pos=-2)}, {"blocks.*.attn.z": edits.zero(head=1)}],
            interp.log_prob(RIGHT[n]),
        ).values
    ),
    "patching": on_pairs(interp.activation_patching, site="z"),
    "patching last": on_pairs(interp.activation_patching, site="resid_post", **LAYERS),
    "ablation": on_pairs(interp.activation_patching, site="z", edit=edits.zero()),
    "attribution": on_pairs(interp.attribution_patching, site="z"),
    "ablation estimated": on_pairs(interp.attribution_patching, site="z", edit=edits.zero()),
    "integrated": on_pairs(interp.integrated_gradients, site="z", steps=32),
    "path_patching": on_pairs(interp.path_patching),
    "edge_patching": on_pairs(
        interp.edge_patching, edges=["input->a0.h1<q>", "a0.h2->m1", "m0->logits"]
    ),
    "faithfulness": shares(lambda *args: interp.faithfulness(*args).circuit),
    "completeness": shares(lambda *args: interp.evaluate_circuit(*args).completeness),
    "minimality": shares(lambda *args: interp.evaluate_circuit(*args).minimality),
    "edge_attribution": on_pairs(interp.edge_attribution),
    "circuit": circuit,
}
KINDS = (("learned", "left"), ("rotary", "right"), ("attached gpt2", "left"))


# Only one of the slow cases runs at a time.
SLOW = {*"integrated faithfulness completeness minimality path_patching edge_attribution".split()}
CASES = [
    (name, *case)
    for n, name in enumerate(READ)
    for case in (KINDS[n % 3 :][:1] if name in SLOW else KINDS)
]


@pytest.mark.sampled(32)
@pytest.mark.parametrize(("name", "kind", "side"), CASES)
def test_a_batch_of_unequal_texts_gives_what_each_gives_alone(name, kind, side):
    model, function = model_of(kind), READ[name]
    to_tokens = interp.protocol.of(model).to_tokens
    every = list(range(len(ROWS)))
    batch = (to_tokens([rows[i] for i in every], side=side) for rows in (ROWS, OTHERS))
    found = function(model, *batch, every)
    alone = [function(model, to_tokens(ROWS[i]), to_tokens(OTHERS[i]), [i]) for i in every]
    torch.testing.assert_close(found, torch.cat(alone, -1), rtol=1e-6, atol=1e-9)
    assert found.abs().max() > 0


LONG_ANSWERS = [
    (torch.tensor(right), torch.tensor(wrong))
    for right, wrong in (([3, 5], [7]), ([2], [9, 1, 4]), ([8, 6], [5, 3]))
]


@pytest.mark.parametrize("answers", [ANSWERS, LONG_ANSWERS], ids=["one token", "several tokens"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("function", "options"),
    [
        (interp.activation_patching, {"over": ("layer", "pos")}),
        (interp.activation_patching, {"site": "pattern", "over": ("query", "key"), "layers": 1}),
        (interp.attribution_patching, {"site": "z", "over": ("pos", "head"), "layers": 1}),
        (interp.attribution_patching, {"over": ("layer", "pos"), "edit": edits.zero()}),
        (interp.edge_attribution, {"over": "pos"}),
    ],
    ids=["patching", "pattern", "attribution", "attribution of an edit", "edges"],
)
def test_means_over_texts_leave_out_padded_positions(function, options, side, answers):
    model = model_of("learned")
    batch = (model.to_tokens(rows, side=side) for rows in (ROWS, OTHERS))
    found = function(model, Pairs(*batch, answers), **options)
    columns = max(map(len, ROWS))
    sizes = [
        columns if axis in ("pos", "query", "key") else size
        for axis, size in zip(found.axes[:-1], found.shape, strict=False)
    ]
    total, count = torch.zeros(sizes, dtype=found.values.dtype), torch.zeros(sizes)
    for n, (row, other) in enumerate(zip(ROWS, OTHERS, strict=True)):
        pairs = Pairs(model.to_tokens(row), model.to_tokens(other), answers[n : n + 1])
        alone = function(model, pairs, **options)
        first = columns - len(row) if side == "left" else 0
        at = tuple(
            slice(first, first + len(row)) if axis in ("pos", "query", "key") else slice(None)
            for axis in found.axes[:-1]
        )
        assert alone.exists is None
        total[at] += alone.values[..., 0]
        count[at] += 1
    torch.testing.assert_close(found.mean(), total / count, rtol=1e-6, atol=1e-9, equal_nan=True)
    torch.testing.assert_close(found.values.sum(-1), total, rtol=1e-6, atol=1e-9)
    # The interval of a position that only one text has is unknown.
    few = count < 3
    assert found.interval().low[few].isnan().all()
    assert found.interval().low[~few].isfinite().all()


def directed(model, yes, pos):
    """Return the difference of means between texts and one other text at a position."""
    no = [[2, 4, 3, 1]]
    if isinstance(yes, ActivationCache):
        _, no = interp.run_with_cache(model, no)
    contrast = directions.Contrast(yes, no, pos=pos)
    return directions.difference_of_means(model, contrast, POINT)[POINT]


POINT = "blocks.0.resid_post"
# Each function gets the model, the texts, and a cache of the texts.
IN_COLUMNS = {
    "run": lambda model, texts, cache: HookedRunner(model).run_with_cache(texts, pos=[0]),
    "cache": lambda model, texts, cache: cache.at(pos=[0]),
    "edit": lambda model, texts, cache: HookedRunner(model).run_with_hooks(
        texts, hooks={POINT: edits.zero(pos=0)}
    ),
    "log_prob": lambda model, texts, cache: measure(interp.log_prob(3, pos=0), model(texts), texts),
    "cross_entropy": lambda model, texts, cache: measure(
        interp.cross_entropy(texts, pos=0), model(texts), texts
    ),
    "reading": lambda model, texts, cache: interp.direct_logit_attribution(
        model, cache, right=3, pos=0
    ),
    "pairs": lambda model, texts, cache: Pairs(texts, texts, ANSWERS, pos=0).metric(model(texts)),
    "contrast of a cache": lambda model, texts, cache: directed(model, cache, 0),
    "steering_curve": lambda model, texts, cache: directions.steering_curve(
        model,
        directions.Direction({POINT: torch.ones(model.config.d_model)}),
        texts,
        [1.0],
        interp.log_prob(3),
        pos=0,
    ),
}


@pytest.mark.parametrize("name", IN_COLUMNS)
def test_the_first_position_is_a_column_of_the_batch(name):
    """Texts with padding on the left have no such column."""
    model, function = model_of("rotary"), IN_COLUMNS[name]
    for side in ("right", "left"):
        texts = model.to_tokens(ROWS, side=side)
        _, cache = interp.run_with_cache(model, texts)
        if side == "right":
            function(model, texts, cache)
        else:
            with pytest.raises(SelectionError, match="must be a real token; got padding at col"):
                function(model, texts, cache)


@functools.cache
def relu_dictionary(d_model):
    """Return a dictionary with random weights in float64."""
    generator = torch.Generator().manual_seed(5)
    W_enc = torch.randn(d_model, 11, generator=generator).double()
    zeros = torch.zeros(11).double(), torch.zeros(d_model).double()
    return features.Dictionary(W_enc, W_enc.T.contiguous(), *zeros, torch.nn.ReLU())


def spliced(model, texts, pos):
    dictionary = relu_dictionary(model.config.d_model)
    with features.splice(model, {POINT: dictionary}, pos=pos) as runner:
        logits = runner.run_with_hooks(texts)
    return [row[real] for row, real in zip(logits, texts.real, strict=True)]


def strongest_at(model, texts, pos):
    vector = torch.ones(model.config.d_model).double()
    places = interp.max_activating(model, texts, POINT, vector=vector, k=9, pos=pos)
    return [torch.tensor(place.value) for place in sorted(places, key=lambda place: place.text)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("function", [spliced, strongest_at])
@pytest.mark.parametrize("pos", [0, 2])
def test_the_first_position_is_the_first_real_token(function, pos, side):
    """The expected values are of the texts alone, which have no padding."""
    model = model_of("rotary")
    found = function(model, model.to_tokens(ROWS, side=side), pos)
    alone = [function(model, model.to_tokens([row]), pos)[0] for row in ROWS]
    torch.testing.assert_close(found, alone, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_contrast_of_texts_counts_real_tokens_and_a_store_counts_tokens_of_pieces(side, tmp_path):
    model = model_of("rotary")
    texts = model.to_tokens(ROWS, side=side)
    alone = [interp.run_with_cache(model, [row])[1][POINT][0] for row in ROWS]
    first = torch.stack([values[1] for values in alone])
    _, other = interp.run_with_cache(model, [[2, 4, 3, 1]])
    expected = first.mean(0) - other[POINT][0, 1]
    torch.testing.assert_close(directed(model, texts, 1).double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(SelectionError, match="must be a real token"):
        directed(model, texts, 6)
    config = store.HarvestConfig(pos=1, context=3)
    rows = store.harvest(model, ROWS, POINT, tmp_path / "store", config)
    ((values,),) = rows.batches(99, seed=None)
    # The texts of 5, 7 and 4 tokens have pieces of 3 and 2, of 3, 3 and 1, and of 3 and 1.
    torch.testing.assert_close(values[[0, 2, 4]], first.to(values.dtype))
    assert len(values) == 2 + 2 + 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_readings_are_nan_at_padding(side):
    model = model_of("learned")
    batch = model.to_tokens(ROWS, side=side)
    mask = batch.attention_mask
    _, cache = interp.run_with_cache(model, batch)
    lens = interp.logit_lens(model, cache)
    parts = interp.decompose(model, cache).values[..., 0]
    added = interp.direct_logit_attribution(model, cache, right=3).values.permute(2, 1, 0)
    norms = interp.residual_stream(cache, mask).norms[..., 0]
    for numbers in (lens.kl[1], lens.probabilities[0, ..., 1], parts[2], added[..., 3], norms):
        assert torch.equal(numbers.isnan(), ~mask)
    with pytest.raises(ValueError, match="real token"):
        interp.residual_stream(cache, torch.ones_like(mask))
    # The mean of a position is over the texts that have it.
    for read in (interp.direct_logit_attribution, interp.accumulated_logits):
        result = read(model, cache, right=3)
        torch.testing.assert_close(result.mean(), result.values.nanmean(-1))
        assert result.mean().isfinite().all()


def test_the_loss_of_padded_texts_leaves_padding_out():
    from models import next_token_loss

    model = model_of("learned")
    for side in ("left", "right"):
        tokens, mask = model.to_tokens(ROWS, side=side)
        losses = next_token_loss(model(tokens, attention_mask=mask), tokens, mask)
        for row, found in zip(ROWS, losses, strict=True):
            alone = -model(row)[0, :-1].log_softmax(-1)[range(len(row) - 1), row[1:]]
            torch.testing.assert_close(found[~found.isnan()], alone)


# The calls that select positions of a cache, after the run or during it.
CUTS = {
    "at": lambda runner, batch, chosen: runner.run_with_cache(batch)[1].at(pos=chosen),
    "at, lazily": lambda runner, batch, chosen: runner.run_with_cache(batch, lazy=True)[1].at(
        pos=chosen
    ),
    "run": lambda runner, batch, chosen: runner.run_with_cache(batch, pos=chosen)[1],
    "lazy run": lambda runner, batch, chosen: runner.run_with_cache(batch, pos=chosen, lazy=True)[
        1
    ],
    "capture": lambda runner, batch, chosen: runner.capture(batch, names="blocks.1.*", pos=chosen),
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["learned", "rotary", "attached gpt2"])
def test_negative_positions_of_a_cache_count_real_tokens(kind, side, cut):
    model = model_of(kind)
    runner, batch = HookedRunner(model), protocol.of(model).to_tokens(ROWS, side=side)
    alone = [runner.run_with_cache(torch.tensor([row]))[1] for row in ROWS]
    one_each = [[-2, 1 - len(ROWS[0])], [-3, -1], [1 - len(ROWS[2]), -1]]
    for chosen in ([-1], slice(-1, None), slice(-3, -1), [-1, -4], one_each):
        cache = CUTS[cut](runner, batch, chosen)
        for name in ("blocks.1.resid_post", "blocks.1.attn.z"):
            for n, text in enumerate(alone):
                row = chosen[n] if chosen is one_each else chosen
                torch.testing.assert_close(cache[name][n], text[name][0][row])
        assert cache.real().all()
    if cut.startswith("at"):
        last = CUTS[cut](runner, batch, -1)["resid_post", 1]
        wanted = torch.stack([text["resid_post", 1][0, -1] for text in alone])
        torch.testing.assert_close(last, wanted)
    for chosen in (slice(2, -1), slice(None, -1), [[-2], [-1, -3], [-1]]):
        with pytest.raises(SelectionError, match="the same number in each text"):
            CUTS[cut](runner, batch, chosen)
    padding = [-5] if side == "right" else [0]
    with pytest.raises(SelectionError, match="of example [02]"):
        CUTS[cut](runner, batch, padding)


def test_a_cache_knows_its_padding_after_it_was_cut(tmp_path):
    model = model_of("learned")
    runner, batch = HookedRunner(model), model.to_tokens(ROWS, side="left")
    _, whole = runner.run_with_cache(batch)
    whole.save(tmp_path / "cache")
    alone = [runner.run_with_cache(torch.tensor([row]))[1]["resid_mid", 0][0] for row in ROWS]
    for cache in (whole, ActivationCache.load(tmp_path / "cache"), whole.to("cpu")):
        turned = cache.at(batch=[2, 0])
        torch.testing.assert_close(turned.at(pos=-4)["resid_mid", 0][1], alone[0][-4])
        torch.testing.assert_close(turned.at(pos=-4)["resid_mid", 0][0], alone[2][0])
        torch.testing.assert_close(cache.at(batch=2, pos=-4)["resid_mid", 0], alone[2][0])
        # With padding on the left, columns 1 to 3 of the batch are tokens of the longest text. In
        # the shortest text, they are two columns of padding and then the first token.
        part = cache.at(pos=slice(1, 4))
        assert part.real().int().tolist() == [[0, 1, 1], [1, 1, 1], [0, 0, 1]]
        torch.testing.assert_close(part.at(batch=2, pos=-1)["resid_mid", 0], alone[2][0])
        turned = cache.at(pos=[6, 5, 4]).at(pos=-1)["resid_mid", 0]
        torch.testing.assert_close(turned, torch.stack([row[-3] for row in alone]))
        keys = cache.at(batch=[0, 2]).at(query=-1).at(key=-4)["pattern", 1]
        torch.testing.assert_close(keys[1], whole["pattern", 1][2, :, -1, -4])
        # A lens that reads a part of the cache knows which columns of its texts are padding.
        found = interp.logit_lens(model, cache.at(batch=[1, 2])).entropy
        assert found.isnan().any(0).int().sum(1).tolist() == [0, 3]


def test_gradients_at_the_last_token_of_each_text():
    model = model_of("rotary")
    runner = HookedRunner(model)
    batch = model.to_tokens(ROWS, side="right")
    logits, cache = runner.run_with_cache(batch, names="embed", pos=[-1], grads=True)
    logits[batch.attention_mask].square().sum().backward()
    for n, row in enumerate(ROWS):
        alone, whole = runner.run_with_cache(torch.tensor([row]), names="embed", grads=True)
        alone.square().sum().backward()
        torch.testing.assert_close(cache.grads["embed"][n, 0], whole.grads["embed"][0, -1])


def test_places_from_the_end_of_a_tensor_beside_padding_are_refused():
    model = model_of("learned")
    runner, batch = HookedRunner(model), model.to_tokens(ROWS)
    _, cache = runner.run_with_cache(batch)
    values, name = cache["resid_post", 0], "blocks.0.resid_post"
    for chosen in (-1, slice(-1, None), [-1], [[-1], [-2], [-1]]):
        hooks = {name: edits.replace(values, source_pos=chosen, pos=1)}
        with pytest.raises(EditError, match="needs the attention_mask"):
            runner.run_with_hooks(batch, hooks=hooks)
        unpadded = torch.tensor(ROWS[1:2] * 3)
        # The call is allowed, because nothing is padding.
        runner.run_with_hooks(unpadded, hooks=hooks)
    hooks = {name: edits.replace(cache, source_pos=-1, pos=1)}
    with runner.hooks(hooks):
        _, edited = runner.run_with_cache(batch, names=name)
    wanted = torch.stack([values[n, len(row) - 1] for n, row in enumerate(ROWS)])
    assert torch.equal(edited[name][:, 1], wanted)
    # If the source has only one text, every row takes its values. The positions of the source count
    # the real tokens of this text, not of the row.
    _, one = runner.run_with_cache(model.to_tokens(ROWS, side="left"))
    one = one.at(batch=[2])
    hooks = {name: edits.replace(one, source_pos=-4, pos=1)}
    with runner.hooks(hooks):
        _, edited = runner.run_with_cache(batch, names=name)
    assert torch.equal(edited[name][:, 1], one["resid_post", 0][:, 3].expand(3, -1))


def test_positions_of_a_later_piece_and_of_a_generation():
    model = model_of("learned")
    runner = HookedRunner(model)
    tokens, mask = model.to_tokens(ROWS, side="left")
    # The model reads two columns first, and then the others. One text has padding in the first
    # columns, and another text has padding in the last column.
    mask = mask & (torch.arange(7) < torch.tensor([[7], [6], [7]]))
    alone = [runner.run_with_cache(t[real][None])[1] for t, real in zip(tokens, mask, strict=True)]
    wanted = torch.stack([text["resid_post", 1][0, -1] for text in alone])
    with torch.no_grad():
        held = models.KVCache(max_context=9)
        model(tokens[:, :2], attention_mask=mask[:, :2], kv_cache=held)
        given = dict(attention_mask=mask, kv_cache=held)
        _, whole = runner.run_with_cache(tokens[:, 2:], **given)
        held = models.KVCache(max_context=9)
        model(tokens[:, :2], attention_mask=mask[:, :2], kv_cache=held)
        given = dict(attention_mask=mask, kv_cache=held)
        _, cut = runner.run_with_cache(tokens[:, 2:], **given, pos=[-1])
    assert whole.real().tolist() == mask[:, 2:].tolist()
    # The mask that the model received also has the first two columns.
    assert torch.equal(text_of(whole).attention_mask, mask[:, 2:])
    torch.testing.assert_close(whole.at(pos=-1)["resid_post", 1], wanted)
    torch.testing.assert_close(cut["resid_post", 1][:, 0], wanted)
    run = functools.partial(models.generate, model, max_new_tokens=3)
    _, joined = runner.run_with_cache(ROWS, run=run, names="embed")
    assert joined.real().int().sum(1).tolist() == [7, 9, 6]


class Untold(torch.nn.Module):
    """A model that does not report its mask."""

    def __init__(self, model):
        super().__init__()
        self.blocks, self.config, self.unembed = model.blocks, model.config, model.unembed
        vars(self)["inner"] = model

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            return self.inner(tokens)
        seen = attention_mask[:, None].bool() & torch.ones(7, 7).tril().bool()
        return self.inner(tokens, query_key_mask=seen)


def test_a_cache_that_does_not_know_its_padding_is_an_error_where_padding_counts():
    model = Untold(model_of("learned")).eval()
    tokens, mask = model_of("learned").to_tokens(ROWS)
    _, cache = interp.run_with_cache(model, tokens, attention_mask=mask)
    assert cache.real() is None
    whole = interp.logit_lens(model, cache)
    # The lens uses the mask of the run.
    assert torch.equal(whole.entropy[0].isnan(), ~mask)
    with pytest.raises(CacheError, match=r"\[2, 7\].*\[3, 7\]"):
        interp.logit_lens(model, cache.at(batch=[1, 0]))
    _, unpadded = interp.run_with_cache(model, tokens, attention_mask=torch.ones(3, 7))
    assert not interp.logit_lens(model, unpadded.at(batch=[1, 0])).entropy.isnan().any()


def test_gradients_are_cut_as_values_are():
    model = model_of("learned")
    logits, cache = HookedRunner(model).run_with_cache(ROWS, names="embed", grads=True)
    logits.square().sum().backward()
    grads = cache.grads["embed"]
    wanted = torch.stack([grads[n, len(row) - 1] for n, row in enumerate(ROWS)])
    assert torch.equal(cache.grads.at(pos=-1)["embed"], wanted)


def pattern_edits(after):
    """Return edits of attention patterns that would write at keys that are padding."""
    return {
        "add": edits.add(torch.tensor(0.1).double(), **after),
        "replace": edits.replace(torch.tensor(0.2).double(), **after),
        "noise": edits.noise(0.1, seed=1, **after),
    }


PLACES = {"all": {}, "last query": {"query": -1}, "a slice of keys": {"key": slice(0, None)}}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["learned", "rotary", "attached gpt2"])
def test_an_edit_writes_nothing_at_padded_keys(kind, side, place):
    model = model_of(kind)
    runner, batch = HookedRunner(model), protocol.of(model).to_tokens(ROWS, side=side)
    name, mask = "blocks.1.attn.pattern", batch.attention_mask
    for what, edit in pattern_edits(PLACES[place]).items():
        with runner.hooks({name: edit}, receipts=True) as context:
            output, cache = runner.run_with_cache(batch, names=name)
        assert context.receipts[0].rows == 3
        # Look only at queries that are real tokens. Queries that are padding may attend anywhere.
        at_padding = cache[name].masked_select(mask[:, None, :, None] & ~mask[:, None, None])
        assert at_padding.numel()
        assert not at_padding.any()
        logits = protocol.logits_of(output)
        for n, row in enumerate(ROWS):
            # The noise depends on the row and the column of the batch. Only the first text has the
            # same row and columns when it is alone, and only with padding on the right.
            if what != "noise" or (side == "right" and n == 0):
                alone = protocol.logits_of(
                    runner.run_with_hooks(torch.tensor([row]), hooks={name: edit})
                )
                torch.testing.assert_close(logits[n][mask[n]], alone[0])
                plain = protocol.logits_of(model(torch.tensor([row])))
                assert (alone - plain).abs().max() > 1e-6


def test_an_edit_is_the_same_beside_other_hooks():
    """A second edit in the sweep makes attached models use another attention kernel.

    Kernels may leave different values in queries that are padding, and the result must not change.
    """
    model = model_of("attached gpt2")
    batch = protocol.of(model).to_tokens(ROWS, side="left")
    noise = {"blocks.1.attn.pattern": edits.noise(0.1, 1)}
    other = {"blocks.0.attn.pattern": edits.zero(head=1)}
    metric = interp.log_prob(RIGHT)
    alone = interp.sweep(model, batch, [noise], metric).values
    beside = interp.sweep(model, batch, [noise, other], metric).values
    torch.testing.assert_close(beside[:1], alone)


@pytest.mark.parametrize("kind", ["learned", "rotary"])
def test_a_padded_generation_is_edited_as_each_text_is(kind):
    """The rotary model has a window, so it drops the first keys during the generation."""
    model = model_of(kind)
    hooks = {"blocks.*.attn.pattern": edits.add(torch.tensor(0.3).double())}
    with HookedRunner(model).hooks(hooks):
        together = models.generate(model, ROWS, max_new_tokens=5, stop=())
        alone = [models.generate(model, [row], max_new_tokens=5, stop=())[0] for row in ROWS]
    assert together == alone
    assert together != models.generate(model, ROWS, max_new_tokens=5, stop=())


@pytest.mark.parametrize("kind", ["learned", "rotary", "attached gpt2"])
def test_a_function_can_leave_padded_keys_as_they_are(kind):
    model = model_of(kind)
    runner, batch = HookedRunner(model), protocol.of(model).to_tokens(ROWS, side="left")
    name, seen = "blocks.1.attn.pattern", []

    def add(value, point):
        seen.append(token_mask())
        return value + (0.3 if seen[-1] is None else 0.3 * seen[-1][:, None, None].to(value))

    logits = protocol.logits_of(runner.run_with_hooks(batch, hooks={name: add}))
    assert torch.equal(seen[0], batch.attention_mask)
    hooks = {name: edits.add(torch.tensor(0.3).double())}
    expected = protocol.logits_of(runner.run_with_hooks(batch, hooks=hooks))
    real = batch.attention_mask
    torch.testing.assert_close(logits[real], expected[real])
    tokens = torch.tensor(ROWS[:1])
    runner.run_with_hooks(tokens, hooks={name: add})
    runner.run_with_hooks(tokens, attention_mask=torch.ones_like(tokens), hooks={name: add})
    assert seen[1] is seen[2] is None
    assert token_mask() is None


@functools.cache
def encoder_decoder():
    from models import attach

    sizes = dict(num_hidden_layers=2, num_attention_heads=3, d_ff=17, decoder_start_token_id=0)
    model = tiny.model("T5ForConditionalGeneration", **sizes).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.4)
    attach(model)
    return model


@pytest.mark.parametrize("kind", ["T5ForConditionalGeneration", "BartForConditionalGeneration"])
def test_a_decoder_that_counts_padding_refuses_padding_on_the_left(kind):
    """T5 has relative positions, and BART has absolute positions."""
    from models import attach

    if kind.startswith("T5"):
        model = encoder_decoder()
    else:
        sizes = dict(d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=3)
        sizes |= dict(decoder_attention_heads=3, encoder_ffn_dim=17, decoder_ffn_dim=13)
        model = tiny.model(kind, **sizes).double()
        attach(model)
    runner, encoded = HookedRunner(model), torch.tensor([[5, 9, 4], [7, 8, 6]])

    def run(rows, mask):
        given = dict(decoder_input_ids=torch.tensor(rows))
        given["decoder_attention_mask"] = torch.tensor(mask)
        return runner.run_with_hooks(input_ids=encoded, **given).logits

    alone = model(input_ids=encoded[1:], decoder_input_ids=torch.tensor([[2, 6]])).logits[0]
    right = run([[2, 5, 3, 4], [2, 6, 1, 1]], [[1, 1, 1, 1], [1, 1, 0, 0]])
    torch.testing.assert_close(right[1, :2], alone)
    rows, mask = [[2, 5, 3, 4], [1, 1, 2, 6]], [[1, 1, 1, 1], [0, 0, 1, 1]]
    if kind.startswith("T5"):
        torch.testing.assert_close(run(rows, mask)[1, 2:], alone)
    else:
        with pytest.raises(ValueError, match="the decoder of a BartFor.* counts padding"):
            run(rows, mask)


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_edit_writes_nothing_at_padding_of_an_encoder(side):
    model = encoder_decoder()
    runner, language = HookedRunner(model), protocol.of(model)
    tokens, mask = language.to_tokens(ROWS, side=side)
    decoded = torch.tensor([[0, 3, 8]] * 3)
    name = "decoder.blocks.1.cross.pattern"
    given = dict(decoder_input_ids=decoded)
    for where in ({}, {"query": -1}, {"encoder_pos": slice(0, None)}, {"encoder_pos": -1}):
        hooks = {name: edits.add(torch.tensor(0.3).double(), **where)}
        together = runner.run_with_hooks(
            input_ids=tokens, attention_mask=mask, hooks=hooks, **given
        ).logits
        for n, row in enumerate(ROWS):
            alone = {"input_ids": torch.tensor([row]), "decoder_input_ids": decoded[:1]}
            edited = runner.run_with_hooks(hooks=hooks, **alone).logits
            torch.testing.assert_close(together[n], edited[0])
            assert (edited - model(**alone).logits).abs().max() > 1e-4
    # A cache knows the padding of the encoder, so the last column differs between texts.
    _, cache = runner.run_with_cache(input_ids=tokens, attention_mask=mask, **given)
    assert torch.equal(cache.real("encoder_pos", name), mask)
    last = cache.at(encoder_pos=-1)["decoder.blocks.1.cross.v"]
    for n, row in enumerate(ROWS):
        alone = runner.run_with_cache(input_ids=torch.tensor([row]), decoder_input_ids=decoded[:1])
        torch.testing.assert_close(last[n], alone[1]["decoder.blocks.1.cross.v"][0, -1])
    turned = cache.at(batch=[2, 1, 0])
    with pytest.raises(EditError, match="encoder_pos"):
        runner.run_with_hooks(
            input_ids=tokens,
            attention_mask=mask,
            hooks={"decoder.blocks.1.cross.v": edits.replace(turned)},
            **given,
        )


SOURCES = [[8, 1, 6, 2, 7, 4, 9], [12, 3, 5, 1], [2, 2, 6, 7, 1, 3]]
"""Texts with 7, 4 and 6 tokens. The texts in `ROWS` have 5, 7 and 4 tokens."""


@pytest.mark.parametrize("source_side", ["left", "right"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["learned", "rotary", "attached gpt2"])
def test_positions_from_the_end_count_in_the_texts_of_a_source(kind, side, source_side):
    model = model_of(kind)
    runner, to_tokens = HookedRunner(model), protocol.of(model).to_tokens
    batch = to_tokens(ROWS, side=side)
    _, source = runner.run_with_cache(to_tokens(SOURCES, side=source_side))
    last = runner.run_with_cache(to_tokens(SOURCES, side=source_side), pos=[-1])[1]
    name = "blocks.1.resid_post"
    alone = [runner.run_with_cache(torch.tensor([row]))[1][name][0] for row in SOURCES]
    plain = [runner.run_with_cache(torch.tensor([row]))[1][name][0] for row in ROWS]
    vector = torch.linspace(-1, 2, alone[0].shape[1]).double()
    onto = torch.outer(vector, vector) / vector.square().sum()

    def edited(edit, pos):
        with runner.hooks({name: edit}):
            return runner.run_with_cache(batch, names=name)[1].at(pos=pos)[name]

    pairs = [*zip(plain, alone, strict=True)]
    for given in (source, last):
        expected = torch.stack([theirs[-1] for theirs in alone])
        torch.testing.assert_close(edited(edits.replace(given, pos=-1), -1), expected)
    expected = torch.stack([theirs[-3:-1] for theirs in alone])
    chosen = slice(-3, -1)
    torch.testing.assert_close(edited(edits.replace(source, pos=chosen), chosen), expected)
    torch.testing.assert_close(edited(edits.replace(source, pos=[-3, -2]), chosen), expected)
    expected = torch.stack([ours[-2] + theirs[-2] for ours, theirs in pairs])
    torch.testing.assert_close(edited(edits.add(source, pos=-2), -2), expected)
    expected = torch.stack([ours[-1] + onto @ (theirs[-1] - ours[-1]) for ours, theirs in pairs])
    torch.testing.assert_close(edited(edits.interchange(source, vector, pos=-1), -1), expected)
    # The mean at pos=-1 is the mean over the last tokens of all texts, also of unequal length.
    for given in (source, last):
        expected = torch.stack([theirs[-1] for theirs in alone]).mean(0).expand(3, -1)
        torch.testing.assert_close(edited(edits.mean(given, pos=-1), -1), expected)
    expected = torch.stack([theirs[-3:-1] for theirs in alone]).mean(0).expand(3, -1, -1)
    torch.testing.assert_close(edited(edits.mean(source, pos=chosen), chosen), expected)


def test_columns_of_one_padded_source_may_differ_by_text():
    model = model_of("rotary")
    runner, name = HookedRunner(model), "blocks.1.resid_post"
    padded = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1]])}
    _, source = runner.run_with_cache(torch.tensor([[0, 0, 8, 1, 6]]), **padded)
    edit = edits.replace(source, pos=3, source_pos=[[-1], [-2]])
    with runner.hooks({name: edit}):
        changed = runner.run_with_cache(torch.tensor(SOURCES[:1] * 2), names=name)[1][name]
    torch.testing.assert_close(changed[:, 3], source[name][0, [4, 3]])


def test_a_mean_over_last_tokens_has_one_position_for_all_texts():
    """The sources have no padding, but the edited texts end in different columns."""
    model = model_of("rotary")
    runner, name = HookedRunner(model), "blocks.1.resid_post"
    _, source = runner.run_with_cache(torch.tensor([SOURCES[0], SOURCES[0][::-1]]))
    edit = edits.mean(source, pos=[[-1], [-2]])
    with runner.hooks({name: edit}), pytest.raises(EditError, match="one pos for all texts"):
        runner.run_with_cache(model.to_tokens(ROWS[:2]))


def test_padding_of_a_source_is_never_copied():
    model = model_of("learned")
    runner = HookedRunner(model)
    name, batch = "blocks.1.resid_post", model.to_tokens(ROWS[1:2] * 3)
    for side, columns in (
        ("right", ("4 of text 1", "6 of text 2")),
        ("left", ("0 of text 1", "0 of text 2")),
    ):
        _, source = runner.run_with_cache(model.to_tokens(SOURCES, side=side))
        for edit in (
            edits.replace(source),
            edits.add(source, pos=slice(0, 7)),
            edits.interchange(source, torch.ones(source[name].shape[-1]).double()),
            edits.replace(source, pos=[4, 0], batch=[0, 1]),
        ):
            with pytest.raises(EditError, match=f"pos {columns[0]}.*source_pos=-1"):
                runner.run_with_hooks(batch, hooks={name: edit})
        with pytest.raises(EditError, match=columns[1]):
            runner.run_with_hooks(batch, hooks={name: edits.replace(source, batch=[0, 2])})
        with pytest.raises(EditError, match="resample.*text 1"):
            runner.run_with_hooks(batch, hooks={name: edits.resample(source, pos=-1)})
        # The only donor has padding in the same columns, so its values there would be padding.
        alike = model.to_tokens([SOURCES[1]] * 2 + [SOURCES[0]] * 2, side=side)
        _, donors = runner.run_with_cache(alike)
        longer = model.to_tokens(ROWS[1:2] * 4)
        with pytest.raises(EditError, match=f"pos {columns[0].replace('text 1', 'text 0')}"):
            runner.run_with_hooks(longer, hooks={name: edits.resample(donors)})
        # These edits are allowed. Either the source is the first text, which has no padding. Or
        # the edited texts have padding in the same columns as the source, so that padding is copied
        # only to padding.
        runner.run_with_hooks(batch, hooks={name: edits.replace(source, batch=0)})
        alike = model.to_tokens(SOURCES, side=side)
        for edit in (edits.replace(source), edits.add(source, pos=slice(1, 6))):
            runner.run_with_hooks(alike, hooks={name: edit})
        # A pattern of another text has weights for the keys of that text. In this text, some of
        # these keys are padding or do not exist, so the pattern would give weight to padding, or
        # its weights would add up to less than 1.
        pattern = "blocks.1.attn.pattern"
        for where in ({"query": -1}, {"query": 3, "key": slice(0, 7)}, {"key": -1, "query": 3}):
            with pytest.raises(EditError, match=r"key [0456] of text [012]"):
                runner.run_with_hooks(batch, hooks={pattern: edits.replace(source, **where)})
        shared = slice(0, 4) if side == "right" else slice(3, 7)
        hooks = {pattern: edits.replace(source, query=3, key=shared)}
        runner.run_with_hooks(batch, hooks=hooks)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_pattern_of_unpadded_texts_does_not_fit_padded_ones(side):
    model = model_of("learned")
    runner, batch = HookedRunner(model), model.to_tokens(ROWS, side=side)
    _, source = runner.run_with_cache(torch.tensor(SOURCES[:1] * 3))
    hooks = {"blocks.0.attn.pattern": edits.replace(source, query=slice(4, 7))}
    if side == "left":
        with pytest.raises(EditError, match="key 0 of text 0"):
            runner.run_with_hooks(batch, hooks=hooks)
        return
    # With padding on the right, the keys that are padding come after all real queries, so their
    # weight is 0.
    hooks = {"blocks.0.attn.pattern": edits.replace(source, query=slice(0, 4))}
    with runner.hooks(hooks):
        cache = runner.run_with_cache(batch, names="*.pattern")[1]
    rows = cache["pattern", 0][:, :, :4].sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows))
