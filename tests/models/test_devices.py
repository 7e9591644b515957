"""A model on several devices: what moves between them, and that its numbers are those of one device."""

import copy

import pytest
import torch
from torch.utils._pytree import tree_map

import interp
from hooks import HookedRunner
from interp import edits, logit_diff, sweep
from interp.features import Dictionary, TopK
from models import KVCache, Transformer, TransformerConfig, attach
from tests.pretended import DEVICE, SECOND, Devices, split
from tests.reference import BATCH, POS, SIZES, VARIANTS, VOCAB, separately, some_tokens, variant


@pytest.fixture
def devices():
    with Devices() as devices:
        yield devices


@torch.no_grad()
def moves(name, layers, cache, *places):
    """What moves in a pass over a padded text, then, with a cache, in a step after it."""
    config = TransformerConfig(**SIZES | VARIANTS[name] | dict(n_layers=layers))
    with Devices() as devices:
        model, found = split(Transformer(config).eval(), *places), []
        tokens = torch.zeros(BATCH, POS, dtype=torch.long, device=DEVICE)
        mask, cache = torch.ones(BATCH, POS, dtype=torch.bool, device=DEVICE), cache and cache()
        for piece, given in ((tokens, mask), (tokens[:, :1], None))[: 1 + (cache is not None)]:
            devices.moves.clear()
            logits, values = HookedRunner(model).run_with_cache(
                piece, attention_mask=given, kv_cache=cache, names="*.resid_post"
            )
            found.append([move for move in devices.moves if move[1].type != "cpu"])
            assert (logits.shape, logits.device) == ((*piece.shape, VOCAB), DEVICE)
            for layer in range(layers):
                assert values["resid_post", layer].device == places[layer * len(places) // layers]
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["pre", "like llama", "like gemma 2", "window of one layer", "sinusoidal"])  # fmt: skip
@pytest.mark.parametrize("cache", [None, KVCache])
def test_stream_and_context_move_once_per_change_of_device(name, cache):
    assert not any(moves(name, 2, cache, DEVICE))
    found = moves(name, 2, cache, DEVICE, SECOND)
    assert found == moves(name, 5, cache, DEVICE, SECOND)
    for moved, width in zip(found, (POS, 1), strict=False):
        streams = [place for shape, place in moved if shape == (BATCH, width, SIZES["d_model"])]
        assert streams == [SECOND, DEVICE]
        assert all(place == SECOND for _, place in moved[:-1])


def noted(model):
    """The rows and the positions of each call of a block, in order."""
    calls = []
    for layer, block in enumerate(model.blocks):

        def forward(resid, context, layer=layer, block=block):
            calls.append((layer, *resid.shape[:2]))
            return type(block).forward(block, resid, context)

        block.forward = forward
    return calls


REAL = torch.arange(POS) >= torch.tensor([3, 0, 1, 0, 0])[:, None]


APART = dict.fromkeys(("token_embedding", "position_embedding"), SECOND)


@pytest.mark.parametrize(
    ("name", "mask", "apart"),
    [("pre", {}, {}), ("like gemma 2", {"attention_mask": REAL}, {}), ("untied", {}, APART)],
)
def test_a_sweep_resumes_as_on_one_device(devices, name, mask, apart):
    model, there = (variant(name, n_layers=5) for _ in range(2))
    split(there, DEVICE, SECOND, DEVICE, **apart)
    tokens, metric = some_tokens(), logit_diff(3, 1)
    at = ["embed", "blocks.0.attn.z", "blocks.1.resid_pre", "blocks.3.mlp_out", "blocks.4.attn.v"]
    given = [{point: edits.scale(0.3, pos=[4, 6])} for point in at]
    alone = [separately(model, tokens, [edit], metric, **mask) for edit in given]
    with torch.no_grad():
        there(tokens, **mask)
    once, calls = [*devices.moves], noted(there)
    devices.moves.clear()
    found = sweep(there, tokens, given, metric, **mask).values
    # The unedited run, a measurement of memory, and rows that begin at the first change.
    rows = zip(range(5), (10, 15, 15, 20, 25), strict=True)
    assert calls == [
        *((n, BATCH, POS) for n in range(5)),
        (0, BATCH, POS),
        *((*row, 3) for row in rows),
    ]
    assert devices.moves[: len(once)] == once
    resumed = [(*shape, place) for shape, place in devices.moves[len(once) :]]
    width = SIZES["d_model"]
    assert resumed[-2:] == [(15, 3, width, SECOND), (20, 3, width, DEVICE)]
    # Before that, what a block gave is compared with what the next one got.
    assert apart or resumed[:-2] == [(BATCH, POS, width, place) for place in (DEVICE, SECOND)]
    torch.testing.assert_close(found.cpu(), torch.cat(alone))


def test_what_is_read_of_all_layers_is_where_the_first_is(devices):
    there = split(variant("pre", n_layers=3), SECOND, DEVICE, SECOND)
    cache = HookedRunner(there).run_with_cache(some_tokens(), names="*.z")[1]
    assert there.W_Q.device == there.b_out.device == cache.stack("z").device == SECOND


CLEAN, CORRUPTED = (some_tokens(seed, (2, POS)) for seed in (1, 2))
ANSWERS, SPANS = torch.tensor([[3, 1], [2, 5]]), {"a": [[3, 4]] * 2, "b": [[6]] * 2}
PAIRS = interp.Pairs(CLEAN, CORRUPTED, ANSWERS, attention_mask=REAL[:2], spans=SPANS)
TEXTS = some_tokens(3).tolist()
EDGES = ["input->a0.h2<v>", "a0.h2->m0", "m0->a1.h3<q>", "input->a1.h3<q>", "a1.h3->logits"]


def cached(model, **options):
    return interp.run_with_cache(model, CLEAN, **options)[1]


def effects(analysis, **options):
    return lambda model: analysis(model, PAIRS, **options).values


def reading(analysis, **options):
    return lambda model: analysis(model, cached(model), **options).values


def through(fit, **options):
    """The numbers of a lens that is fitted, and of what it reads."""

    def read(model):
        lens = fit and fit(model, TEXTS, **options)
        found = interp.logit_lens(model, cached(model), lens=lens, targets=CLEAN)
        return [lens and lens.weight, found.probabilities, found.entropy]

    return read


def dictionaries(model, **options):
    """One of each MLP, on the device of the last block."""
    torch.manual_seed(0)
    sizes = [(SIZES["d_model"], 17), (17, SIZES["d_model"]), (17,), (SIZES["d_model"],)]
    drawn = [[torch.randn(*size, dtype=torch.float64) for size in sizes] for _ in range(2)]
    made = (Dictionary(*weights, TopK(5), **options) for weights in drawn)
    return {f"blocks.{n}.mlp_out": each.to(model.W_U.device) for n, each in enumerate(made)}


def traced(model):
    """An attribution graph, and what happens if a feature is set to 0."""
    features = dictionaries(model, reads="ln2.normalized", transcodes=True)
    graph = interp.attribution_graph(model, CLEAN[:1], features, targets=[3], attention=True)
    name = next(node.id for node in graph.nodes if node.kind == "feature")
    order = graph.column.argsort(stable=True)
    return [graph.rows[order], graph.by_attention[order], graph.intervene({name: 0.0}).true]


def spliced(model):
    name = "blocks.1.mlp_out"
    features = {name: dictionaries(model)[name].to(model.blocks[1].mlp.output.weight.device)}
    scores = interp.evaluate_sae(model, features, TEXTS)
    with interp.splice(model, features) as runner:
        return [runner.run_with_cache(CLEAN)[0], scores.losses]


def gradient_of_the_mask(model):
    mask = interp.graph.Graph(model).mask(EDGES).requires_grad_()
    return torch.autograd.grad(interp.run_circuit(model, PAIRS, mask).square().sum(), mask)


ANALYSES = {
    "patching": effects(interp.activation_patching, site="z"),
    "attribution": effects(interp.attribution_patching, site="z", grad_drop=True),
    "of queries": effects(interp.attribution_patching, site="q", qk_correction=True),
    "integrated": effects(interp.integrated_gradients, site="mlp_out", steps=2),
    "top": effects(interp.top_attributions, k=7),
    "edges": effects(interp.edge_attribution, over="pos"),
    "edges of inputs": effects(interp.edge_attribution, method="eap_ig_inputs", steps=1),
    "edges of writers": effects(
        interp.edge_attribution, method="eap_ig_activations", over="span", steps=1
    ),
    "edge patching": effects(interp.edge_patching, edges=EDGES),
    "path patching": effects(interp.path_patching, receivers=["a1.h3<q>", "m1"]),
    "paths to logits": effects(interp.path_patching, senders=["a0.h2", "m0"]),
    "circuit": lambda model: interp.run_circuit(model, PAIRS, EDGES),
    "source elsewhere": lambda model: interp.run_circuit(
        model, interp.Pairs(CLEAN), EDGES, cached(model, device="cpu")
    ),
    "gradient": gradient_of_the_mask,
    "faithfulness": lambda model: (
        interp.faithfulness(model, PAIRS, interp.Circuit(interp.graph.Graph(model), EDGES)).values
    ),
    "decompose": reading(interp.decompose, neurons=True),
    "logits": reading(interp.direct_logit_attribution, right=3, wrong=CLEAN),
    "accumulated": reading(interp.accumulated, right=3),
    "logit lens": through(None),
    "tuned lens": through(interp.tuned_lens, steps=2),
    "jacobian lens": through(interp.jacobian_lens, skip=1),
    "heads": reading(interp.head_scores, kind="previous_token"),
    "maxima": lambda model: [
        one.value for one in interp.max_activating(model, TEXTS, "blocks.1.resid_post")
    ],
    "composition": lambda model: interp.composition_scores(model, "K", distance=1, draws=2).values,
    "copying": lambda model: interp.copying_scores(model).values,
    "positions": lambda model: interp.positional_scores(model, n_pos=5).values,
    "full circuits": lambda model: [
        circuit.form() for circuit in interp.full_circuits(model, 1, 3, distance=1)
    ],
    "attribution graph": traced,
    "dictionaries": spliced,
    "why a head looks there": reading(interp.why_attends, head=(1, 2), key=1),
    "why, from a cache on the CPU": lambda model: (
        interp.why_attends(model, cached(model, device="cpu"), (0, 2), key=1).values
    ),
    "targets": lambda model: interp.svd_targets(model, cached(model)).avwo,
}


@pytest.mark.sampled(16)
@pytest.mark.filterwarnings("ignore:.* should add up")
@pytest.mark.parametrize("analysis", ANALYSES.values(), ids=ANALYSES)
def test_an_analysis_gives_the_numbers_of_one_device(devices, analysis):
    changes = dict(n_layers=2, n_kv_heads=3, positions="rotary", tied_unembed=False)
    model, there = (variant("sandwich", **changes) for _ in range(2))
    split(there, DEVICE, SECOND, token_embedding=SECOND)
    expected, found = analysis(model), analysis(there)
    found = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, found)
    torch.testing.assert_close(found, expected, equal_nan=True)


# Analyses of attached models, and those that also need weights under our names.
OF_POINTS = ["attribution", "logit lens", "heads"]
OF_WEIGHTS = ["edges", "paths to logits", "logits", "why, from a cache on the CPU"]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        *((kind, OF_POINTS + OF_WEIGHTS) for kind in ("llama", "gpt2", "cohere2", "qwen3_moe")),
        ("gemma2", OF_POINTS + OF_WEIGHTS[:2]),
        ("gpt_oss", [*OF_POINTS, "edges", "logits"]),
        ("deepseek_v3", OF_POINTS),
    ],
)
def test_an_attached_model_gives_the_numbers_of_the_cpu(devices, kind, names):
    made = pytest.importorskip("tests.attachable", reason="needs the extra hf").made
    model = made(kind)
    there, plain = (copy.deepcopy(model).to(DEVICE) for _ in range(2))
    attach(model)
    attach(there)
    assert torch.equal(there(CLEAN).logits.cpu(), plain(CLEAN.to(DEVICE)).logits.cpu())
    _, cache = interp.run_with_cache(there, CLEAN)
    expected = dict(cached(model).items())
    torch.testing.assert_close({n: v.cpu() for n, v in cache.items()}, expected)
    for name in names:
        found = tree_map(lambda x: x.cpu() if torch.is_tensor(x) else x, ANALYSES[name](there))
        torch.testing.assert_close(found, ANALYSES[name](model), equal_nan=True)
