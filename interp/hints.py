"""Hints for errors: names of other libraries, and calls that create missing objects.

`hooks.base.hints` reads `HINTS` when an error is raised.
"""

from collections.abc import Collection

from hooks import UnknownNameError
from hooks.base import Hints, unknown_name
from interp import transformer_lens

_MAKERS = {
    "Pairs": "Pairs(clean, corrupted, answers) makes them",
    "Graph": "interp.graph.Graph(model) makes one",
    "Circuit": "circuits.top(Graph(model), scores, n) or Circuit(Graph(model), edges) makes one",
    "Claim": "Claim.circuit(model, pairs, circuit, says) makes one",
    "Result": "an analysis such as activation_patching gives one",
    "Dictionary": "load_sae({}) reads one",
    "Crosscoder": "load_crosscoder({}) reads one",
    "Transcoders": "load_transcoders({}) reads them",
    "SVDTargets": "svd_targets(model, cache) gives them",
    "Steps": "Steps(model, prompt, answer) makes them",
    "HarvestConfig": "interp.store.HarvestConfig(context=128) makes one",
    "Direction": "interp.directions.difference_of_means gives one",
}

_OF_A_HARVEST = (
    *("dtype", "context", "pack", "pos", "without", "pool", "column", "batch", "per_file"),
)
"""The fields of `interp.store.HarvestConfig`."""


_IN_A_HARVEST_OF_OTHERS = {
    **dict.fromkeys(("batch_size", "store_batch_size"), "batch"),
    **dict.fromkeys(("context_size", "ctx_len", "max_length", "seq_len"), "context"),
}
"""Keywords of other libraries, each with the field of `HarvestConfig`."""


def _harvest_arguments() -> dict[str, str]:
    """Return the advice for settings of a harvest that are written as keywords."""
    advice = {}
    for name in _OF_A_HARVEST:
        config = f"HarvestConfig({name}=...)"
        advice[f"harvest.{name}"] = advice[f"plan.{name}"] = f"use config={config}"
        advice[f"statistics.{name}"] = (
            f"use harvest(model, texts, names, out, {config}), and then "
            "Activations(out).statistics()"
        )
    for name, ours in _IN_A_HARVEST_OF_OTHERS.items():
        use = f"use config=HarvestConfig({ours}=...)"
        advice[f"harvest.{name}"] = advice[f"plan.{name}"] = use
        advice[f"HarvestConfig.{name}"] = f"use {ours}="
    return advice


def _contrast_arguments() -> dict[str, str]:
    """Return the advice for two kinds of texts that are written as several arguments."""
    advice: dict[str, str] = {}
    for call in ("probe", "difference_of_means", "erasure", "sparse_probes"):
        first = "model, dictionary" if call == "sparse_probes" else "model"
        pair = f"the two kinds of texts are one argument: {call}({first}, (yes, no), ...)"
        advice |= dict.fromkeys([f"{call}.yes", f"{call}.no", f"{call}.*"], pair)
        advice[f"{call}.labels"] = f"use {call}({first}, Contrast(store, labels=...), ...)"
        for name in ("pos", "batch", "groups"):
            advice[f"{call}.{name}"] = f"use {call}({first}, Contrast(yes, no, {name}=...), ...)"
    return advice


def _patching_arguments() -> dict[str, str]:
    """Return the advice for positions that are given to an analysis of every position."""
    advice = (
        "to patch only some positions, give the pairs spans={'end': [[13]] * len(pairs)}, and use "
        "over=['layer', 'span']; or patch each position with over=['layer', 'pos'] and then "
        "result.select(pos=[10, 13]); `sweep` edits several positions together"
    )
    calls = ("activation_patching", "attribution_patching", "integrated_gradients")
    words = ("pos", "position", "positions")
    return {f"{call}.{word}": advice for call in calls for word in words}


_HUB = (
    "load_sae('release/sae_id') takes the release and the id of SAELens as one text; "
    "load_sae('owner/repository/folder') downloads a dictionary from the hub"
)
_OWN = (
    "interp.features.Dictionary(W_enc, W_dec, b_enc, b_dec, activation) for weights of your own, "
    "and interp.load_sae(path) for files"
)
_DIRECTION = (
    "interp.directions.Direction({'blocks.12.resid_post': vector}); difference_of_means(model, "
    "(yes, no), site) finds one"
)
_PROBE = "interp.directions.probe(model, (yes, no), site)"
_STORE = "interp.store.harvest(model, texts, names, folder), then interp.store.Activations(folder)"
_SPLICE = "with interp.splice(model, sae) as runner: runner.run_with_cache(text)"
_ADD = "interp.edits.add(vector, scale=2.0), as a hook: hooks={'blocks.12.resid_post': edit}"
_SIZE = "change it afterwards: figure = result.plot(); figure.set_size_inches(4, 3)"
_LIMIT = "use limit=2.0 for colours from -2 to 2"
_LAYER = "name the layer in site=, such as site='blocks.2.resid_post'"
_LAYERS = "name the layers in site=, such as site=['blocks.1.resid_post', 'blocks.2.resid_post']"
_POSITIONS = (
    "an analysis of a graph runs an attached model as a plain transformer, which counts positions "
    "from attention_mask; activation_patching and attribution_patching accept position_ids"
)
_VECTORS = "a direction has its points: vectors.at(2) has only the vector of layer 2"
# Words of other libraries and of papers for the number that multiplies a steering vector.
_STRENGTHS = (
    "strength",
    "multiplier",
    "coefficient",
    "coeff",
    "coef",
    "alpha",
    "factor",
    "magnitude",
    "weight",
)
_ARGUMENTS = {
    **_harvest_arguments(),
    **_contrast_arguments(),
    **_patching_arguments(),
    "splice.use_error_term": "use error=None to leave the error out; the default adds it",
    **dict.fromkeys(("Dictionary.hook_name", "Dictionary.hook_point"), "use reads= and writes="),
    "Dictionary.point": "use reads= and writes=",
    "Dictionary.k": "use activation=TopK(k)",
    "Dictionary.threshold": "use activation=JumpReLU(threshold)",
    "Dictionary.apply_b_dec_to_input": "use subtracts_b_dec=",
    "steering_curve.layer": _VECTORS,
    "steering_curve.layers": _VECTORS,
    "steering_curve.site": _VECTORS,
    "steering_curve.point": _VECTORS,
    "splice.*": "several dictionaries are one mapping, {point: dictionary}",
    "Result.mean.axis": "mean() is over examples; result.values.mean(dim) is over an axis",
    "Result.mean.dim": "mean() is over examples; result.values.mean(dim) is over an axis",
    "Result.mean.*": "mean() is over examples; result.values.mean(dim) is over an axis",
    "Pairs.*": "answers are one argument: Pairs(clean, corrupted, (right, wrong))",
    "ov_circuit.*": "select afterwards: ov_circuit(model)[layer, head]",
    "qk_circuit.*": "select afterwards: qk_circuit(model)[layer, head]",
    "load_sae.release": _HUB,
    "load_sae.sae_id": _HUB,
    "load_sae.device": "move it afterwards: load_sae(path).to(device)",
    "logit_lens.layers": "the readout has all layers",
    "logit_lens.layer": "the readout has all layers",
    "attention_attribution.layer": "use head=(layer, head)",
    "probe.layer": _LAYER,
    "difference_of_means.layer": _LAYER,
    "erasure.layer": _LAYER,
    **dict.fromkeys(
        (f"{call}.layers" for call in ("probe", "difference_of_means", "erasure")), _LAYERS
    ),
    **dict.fromkeys(
        (
            f"{call} of a {kind}.position_ids"
            for call in ("run_with_cache", "capture")
            for kind in ("Transformer", "PlainView")
        ),
        _POSITIONS,
    ),
    "direct_logit_attribution.by": "direct_logit_attribution(...).by('head') groups the components",
    "direct_logit_attribution.tokens": "use right= and wrong=",
    "direct_logit_attribution.answers": "use right= and wrong=",
    "Result.top.abs": "places are sorted by the absolute value of the mean effect",
    "Result.plot.figsize": _SIZE,
    "Result.plot.size": _SIZE,
    **dict.fromkeys((f"Result.plot.{name}" for name in ("vmax", "vmin", "clim")), _LIMIT),
    "Result.plot.cmap": "change it afterwards: figure.axes[0].images[0].set_cmap('viridis')",
    "Result.top.signed": "use largest=True, or largest=False for the smallest first",
    "faithfulness.connected": "leave it out: all edges of its random circuits are on paths",
    "mean.over": "it is now across=",
    "spectral_gap.at": "it is now k=",
    "harvest.workers": "use executor=Ray(workers=...)",
    **dict.fromkeys(
        (f"PrunedGraph.as_json.{name}" for name in ("slug", "scan", "*")),
        "PrunedGraph.neuronpedia(slug, scan) returns the form of Neuronpedia",
    ),
    **dict.fromkeys(
        (f"Pairs.{name}" for name in ("arguments", "corrupted_arguments", "corrupted_mask")),
        "use a mapping as text, such as the output of a processor: "
        "Pairs({'input_ids': ..., 'attention_mask': ...}, ...)",
    ),
    **{f"add.{name}": "use scale=" for name in _STRENGTHS},
    "noise.std": "use scale=",
    "noise.sigma": "use scale=",
    "mean.reference": "such as edits.mean(cache, across=('batch', 'pos'), head=0)",
    "replace.source": "such as edits.replace(cache, head=0)",
    "add.vector": "such as edits.add(direction, scale=2.0)",
    "patterns.cache": "patterns(model, cache)",
}
_AUROC = "probe.auroc, the area under the ROC curve on held-out texts"
_SCORES = (
    "value @ probe.direction[name] + probe.direction.offsets[name], which is above 0 for `yes`"
)
_VALUE = "edits.replace(value, feature=3), where the value is a tensor"
_SELECT = "result.select(layer=3), or result.values"


def _of_entries() -> dict[str, str]:
    """Return the advice for labels and effects that are read from all entries at once."""
    advice = {}
    for axis in ("layer", "head", "pos", "neuron", "feature", "span"):
        labels = f"[entry.where[{axis!r}] for entry in entries]"
        advice[f"Entries.{axis}"] = advice[f"Entries.{axis}s"] = labels
    for name in ("effect", "effects", "mean", "values"):
        advice[f"Entries.{name}"] = "[entry.effect for entry in entries]"
    return advice


_ATTRIBUTES = {
    **_of_entries(),
    **{
        f"Faithfulness.{name}": f"faithfulness(...).circuit.{name}, or faithfulness(...).random"
        for name in ("mean", "interval", "values", "select", "top", "labels", "groups")
    },
    "Result.dims": "result.axes",
    "Result.ndim": "len(result.axes)",
    "Result.sort": "result.top(k)",
    "Result.max": "result.top(1, largest=True)",
    "Result.argmax": "result.top(1, largest=True)",
    "Result.min": "result.top(1, largest=False)",
    "Result.argmin": "result.top(1, largest=False)",
    "Result.topk": "result.top(k, largest=True)",
    "Result.to_csv": "result.save('x.csv'), or result.to_dataframe().to_csv('x.csv')",
    "Result.to_latex": "result.to_dataframe().to_latex(index=False)",
    "Result.savefig": "result.plot().save('x.pdf')",
    "Result.std": "result.interval(), the 95% interval of the mean",
    "Entries.to_dataframe": "pandas.DataFrame(entry._asdict() for entry in entries), or a table of "
    "all places with result.to_dataframe()",
    "Result.numpy": "result.values.numpy()",
    "Result.tolist": "result.values.tolist()",
    "Result.squeeze": _SELECT,
    "Result.loc": _SELECT,
    "Result.iloc": _SELECT,
    "Result.at": "result.select(layer=2)",
    "load_result": "interp.Result.load(path)",
    **dict.fromkeys(("SteeringVector", "SteeringVectors", "ControlVector"), _DIRECTION),
    **dict.fromkeys(
        ("train_steering_vector", "get_steering_vector", "steering_vector"),
        "interp.directions.difference_of_means(model, (yes, no), site)",
    ),
    **dict.fromkeys(("train_probe", "LinearProbe", "LogisticRegressionProbe"), _PROBE),
    **dict.fromkeys(("ActivationStore", "ActivationsStore", "ActivationBuffer"), _STORE),
    **dict.fromkeys(("SparseAutoencoder", "sae_from_weights", "SparseCoder"), _OWN),
    **dict.fromkeys(
        ("SAE", *(f"{kind}SAE" for kind in ("Standard", "TopK", "BatchTopK", "JumpReLU", "Gated"))),
        _OWN,
    ),
    **dict.fromkeys(("run_with_cache_with_saes", "run_with_hooks_with_saes", "add_sae"), _SPLICE),
    "add_vector": _ADD,
    "add_steering_vector": _ADD,
    "Pairs.load": "Pairs(clean, corrupted, answers); files of pairs are for other programs",
    "Direction.shape": "direction[name].shape; direction[name] is the vector at a point",
    "Direction.norm": "direction[name].norm(); direction.unit() has vectors of length 1",
    "Direction.vector": "direction[name], the vector at a point",
    **dict.fromkeys((f"Probe.{name}" for name in ("accuracy", "score", "scores", "auc")), _AUROC),
    **dict.fromkeys(
        (f"Probe.{name}" for name in ("predict", "predict_proba", "decision_function")), _SCORES
    ),
    "Probe.coef_": "probe.direction[name], the direction at a point",
    "Probe.weight": "probe.direction[name], the direction at a point",
    "Probe.intercept_": "probe.direction.offsets[name]",
    "Dictionary.load": "load_sae(folder)",
    "Dictionary.load_from_disk": "load_sae(folder)",
    "Dictionary.from_pretrained": "load_sae(path)",
    "Dictionary.save_model": "sae.save(folder)",
    "Dictionary.save_pretrained": "sae.save(folder)",
    "Dictionary.cfg": "the dictionary itself: sae.reads, sae.d_in, sae.n_features, sae.activation",
    "Dictionary.point": "sae.reads, the point that the dictionary reads",
    "Dictionary.run_with_cache": (
        "with interp.splice(model, sae) as runner: runner.run_with_cache(text)"
    ),
    "Dictionary.hook_name": "sae.reads, the point that the dictionary reads",
    "edits.set": _VALUE,
    "edits.clamp": _VALUE,
    "AttributionGraph.inputs": "graph.pruned().inputs(node)",
    "Circuit.edges": "list(circuit)",
    "LayerChange.other_texts": "next_text",
    "Text.mask": "text.attention_mask",
    "Graph.nodes": "graph.writers and graph.readers",
    "Activations.shape": "len(store), the number of rows, and store.names",
}


def _features_hint(name: str, known: Collection[str], what: str) -> UnknownNameError | None:
    """Return the error for the name of features; None for other names.

    Features exist only while a dictionary is spliced into the model.
    """
    if not name.endswith("features"):
        return None
    if spliced := [other for other in known if other.endswith("features")]:
        return unknown_name(name, spliced, what)
    error = unknown_name(name, known, what)
    hint = "features of a dictionary are there inside `with interp.splice(model, sae)`"
    error.args = (f"{error.args[0]} ({hint})",)
    return error


_HEAD = "the value of each head before the output projection is z, with the axis head"
_SITES = {
    # From functions of TransformerLens, such as `get_act_patch_attn_head_out_all_pos`.
    "attn": "attention adds attn_out to the stream; pattern has its weights, and z its heads",
    "attn_head_out": _HEAD,
    "head_out": _HEAD,
    "head_output": _HEAD,
    # Components of pyvene.
    "attention_value_output": _HEAD,
    "head_attention_value_output": _HEAD,
    "block_input": "the stream that enters a block is resid_pre",
    "block_output": "the stream that leaves a block is resid_post",
    "mlp_activation": "the value after the nonlinearity of the MLP is mlp.post",
}
"""Names of kinds of values in other libraries, with a sentence that contains our name."""


def _site_hint(name: str, known: Collection[str], what: str) -> UnknownNameError | None:
    """Return the error for a name whose last part is in `_SITES`; None for any other name."""
    explanation = _SITES.get(name.rpartition(".")[2])
    if explanation is None:
        return None
    return UnknownNameError(f"no {what} is named {name!r}: {explanation}", name)


HINTS = Hints(
    names=(transformer_lens.name_hint, _features_hint, _site_hint),
    makers=_MAKERS,
    attributes=_ATTRIBUTES,
    arguments=_ARGUMENTS,
)
