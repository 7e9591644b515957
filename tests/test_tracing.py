"""Attribution graphs: rows add up, and are what changes in a run whose norms and patterns cannot react."""

import pytest
import torch
from torch import nn

from hooks import HookedRunner
from interp.features import CrossLayerTranscoder, Dictionary, TopK
from interp.tracing.frozen import FrozenRun
from models import Transformer, TransformerConfig

FORMS = {
    "plain": {},
    "rms": {"norm": "rmsnorm", "positions": "rotary", "n_kv_heads": 2, "mlp": "gated"},
    "output": {"norm_place": "output"},
    "sandwich": {"norm_place": "sandwich", "norm": "rmsnorm", "logit_cap": 5.0},
    "parallel": {"parallel": True},
    "embedding norm": {"embed_norm": True},
    "both ways": {"causal": False, "mlp_norm": True},
    "window": {"window": 2, "attn_cap": 3.0, "mlp_bias": False},
}
TEXT = torch.tensor([[3, 1, 4, 1, 5]])
SIZES = {"vocab_size": 7, "n_ctx": 11, "n_layers": 3, "n_heads": 4, "d_model": 8, "d_mlp": 13}


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def model_of(form):
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**SIZES, **FORMS[form])).double().eval()
    for weight in model.parameters():  # gains and biases too
        weight.data += 0.3 * torch.randn_like(weight)
    return model


def transcoder(features=17, skip=False, reads="ln2.normalized", **more):
    W_skip = drawn(8, 8) if skip else None
    weights = drawn(8, features), drawn(features, 8), drawn(features), drawn(8)
    return Dictionary(*weights, TopK(5), W_skip=W_skip, reads=reads, transcodes=True, **more)


def across(reads):
    return CrossLayerTranscoder(
        [drawn(8, 17 + n) for n in range(3)],
        [drawn(17 + n, 3 - n, 8) for n in range(3)],
        [drawn(17 + n) for n in range(3)],
        drawn(3, 8),
        [TopK(5), TopK(4), nn.ReLU()],
        reads=reads,
    )


def transcoders(kind, reads):
    if kind == "across":
        return across(reads)
    return {
        "blocks.0.mlp_out": transcoder(
            skip=reads != "resid_mid", subtracts_b_dec=True, reads=reads
        ),
        "blocks.2.mlp_out": transcoder(19, reads=reads),
    }


def moved(model, dictionaries, vectors):
    """What vectors, added at points, change in all reads and logits, with patterns, scales and MLPs frozen."""
    runner = HookedRunner(model)
    cache = runner.run_with_cache(TEXT, mode="full")[1]
    seen = {}

    def freeze(value, at):
        return cache[at.name]

    def see(value, at):
        seen[at.name] = value.detach().clone()

    def write(value, at):
        written = cache[at.name]
        reads = at.name.replace("mlp_out", "ln2.normalized")
        if isinstance(dictionaries, dict) and reads in seen and at.name in dictionaries:
            skip = dictionaries[at.name].W_skip
            written = written if skip is None else written + (seen[reads] - cache[reads]) @ skip
        return written

    def add(value, at):
        return value + vectors[at.name]

    points = [("*.scale", freeze), ("*.pattern", freeze), ("*.mlp_out", write)]
    reads = [f"blocks.{n}.{name}" for n in range(3) for name in ("ln2.normalized", "resid_mid")]
    runner.run_with_hooks(TEXT, hooks=[
        *points,
        *((name, see) for name in (*reads, "ln_final.normalized") if name in cache),
        *((name, add) for name in vectors),
    ])  # fmt: skip
    return {name: (value - cache[name])[0] for name, value in seen.items()}


CASES = [(form, "layer") for form in FORMS] + [("rms", "across"), ("sandwich", "across")]


@pytest.mark.parametrize(("form", "kind"), CASES)
def test_rows_add_up_and_are_what_a_frozen_run_changes(form, kind):
    model = model_of(form)
    reads = "resid_mid" if kind == "across" or form == "output" else "ln2.normalized"
    dictionaries = transcoders(kind, reads)
    run = FrozenRun(model, TEXT, dictionaries)
    features = [*zip(*(each.tolist() for each in (run.layer, run.pos, run.feature)), strict=True)]
    targets = run.of_features(torch.arange(len(features))), run.of_logits(torch.eye(7)[[2, 5]])
    rows = [run.rows(each) for each in targets]
    for row, target in zip(rows, targets, strict=True):
        torch.testing.assert_close(row.sum(1), target.total, rtol=1e-10, atol=1e-10)
    cache = HookedRunner(model).run_with_cache(TEXT, mode="full")[1]
    before_cap = model.unembedding(cache["ln_final.normalized"])[0, -1]
    expected = before_cap[[2, 5]] - before_cap.mean()
    torch.testing.assert_close(targets[1].total, expected, rtol=1e-10, atol=1e-10)

    def decoders(layer, feature):
        if kind == "across":
            return {
                f"blocks.{layer + n}.mlp_out": dictionaries.W_dec[layer][feature, n]
                for n in range(3 - layer)
            }
        return {(name := f"blocks.{layer}.mlp_out"): dictionaries[name].W_dec[feature]}

    def encoder(layer, feature):
        one = dictionaries if kind == "across" else dictionaries[f"blocks.{layer}.mlp_out"]
        return (one.W_enc[layer] if kind == "across" else one.W_enc)[:, feature]

    def at(pos, value):
        return torch.zeros(1, 5, 8).double().index_fill(1, torch.tensor(pos), 1) * value

    sources = {
        n: {
            name: at(pos, run.activation[n] * row) for name, row in decoders(layer, feature).items()
        }
        for n, (layer, pos, feature) in [*enumerate(features)][::3]
    }
    sources[len(features) + 5 + 2] = {"blocks.1.mlp_out": at(2, run.errors[1])}
    if not FORMS[form].get("embed_norm"):
        sources[len(features) + 3 * 5 + 1] = {"embed": at(1, cache["embed"])}
    W_U = (model.W_U - model.W_U.mean(1, keepdim=True))[:, [2, 5]]
    for source, vectors in sources.items():
        changes = moved(model, dictionaries, vectors)
        first = min(vectors)
        for other, (layer, pos, feature) in enumerate(features):
            read = changes[f"blocks.{layer}.{reads}"][pos] @ encoder(layer, feature)
            # A run has its own value there, not what it would be made of.
            later = f"blocks.{layer}.mlp_out" > first or first == "embed"
            assert rows[0][other, source] == pytest.approx(float(read) if later else 0, abs=1e-9)
        change = changes["ln_final.normalized"][-1] @ W_U
        torch.testing.assert_close(rows[1][:, source], change, rtol=0, atol=1e-9)
