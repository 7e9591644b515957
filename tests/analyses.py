"""A table with one small call of every analysis, for tests that run all of them."""

import torch

import interp
from interp.features import Dictionary, TopK
from tests.reference import POS, SIZES, some_tokens

REAL = torch.arange(POS) >= torch.tensor([3, 0, 1, 0, 0])[:, None]


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
    """Return a function that fits a lens to a model, and returns its weights and its readings."""

    def read(model):
        lens = fit and fit(model, TEXTS, **options)
        found = interp.logit_lens(model, cached(model), lens=lens, targets=CLEAN)
        return [lens and lens.weight, found.probabilities, found.entropy]

    return read


def dictionaries(model, **options):
    """Return a random dictionary for each MLP, on the device of the last block."""
    torch.manual_seed(0)
    sizes = [(SIZES["d_model"], 17), (17, SIZES["d_model"]), (17,), (SIZES["d_model"],)]
    drawn = [[torch.randn(*size, dtype=torch.float64) for size in sizes] for _ in range(2)]
    made = (Dictionary(*weights, TopK(5), **options) for weights in drawn)
    return {f"blocks.{n}.mlp_out": each.to(model.W_U.device) for n, each in enumerate(made)}


def traced(model):
    """Return the effects in an attribution graph, and the change if a feature is set to 0."""
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
        interp.faithfulness(
            model, PAIRS, interp.Circuit(interp.graph.Graph(model), EDGES)
        ).circuit.values
    ),
    "decompose": reading(interp.decompose, neurons=True),
    "logits": reading(interp.direct_logit_attribution, right=3, wrong=CLEAN),
    "accumulated": reading(interp.accumulated_logits, right=3),
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
    "why a head looks there": reading(interp.attention_attribution, head=(1, 2), key=1),
    "why, from a cache on the CPU": lambda model: (
        interp.attention_attribution(model, cached(model, device="cpu"), (0, 2), key=1).values
    ),
    "targets": lambda model: interp.svd_targets(model, cached(model)).avwo,
}
