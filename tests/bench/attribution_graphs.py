"""Measure attribution graphs beside circuit-tracer.

    python tests/bench/attribution_graphs.py [--rounds 3] [--batch 64]

The model has the shape of GPT-2 small, with 64 tokens, 10 targets and 500 features. There are 12
transcoders of 4,096 features, and 48 features are active at a token. Without circuit-tracer, only
hookscope is measured. circuit-tracer needs an environment of its own: see
tests/circuit_tracer/make_graph.py.
"""

import argparse
import importlib.util
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# When this file runs as a script, Python searches this folder for modules, and not the project.
sys.path.insert(0, str(Path(__file__).parents[2]))

from interp import attribution_graph
from interp.features import Dictionary, TopK
from models import Transformer, TransformerConfig, from_transformer_lens
from tests.bench import timing

LAYERS, D_MODEL, VOCAB, POS, FEATURES, ACTIVE, TARGETS, TRACED = (
    12,
    768,
    50257,
    64,
    4096,
    48,
    10,
    500,
)
_PAGE = 4096


def theirs() -> Any:
    """Return circuit-tracer's model with random weights and random transcoders."""
    from circuit_tracer.replacement_model.replacement_model_transformerlens import (
        TransformerLensReplacementModel,
    )
    from circuit_tracer.transcoder import SingleLayerTranscoder, TranscoderSet
    from circuit_tracer.transcoder.activation_functions import TopK as TheirTopK
    from transformer_lens import HookedTransformerConfig

    layers = {}
    for n in range(LAYERS):
        layers[n] = SingleLayerTranscoder(
            D_MODEL, FEATURES, TheirTopK(ACTIVE), n, dtype=torch.float32
        )
        for weight in (layers[n].W_enc, layers[n].W_dec):
            weight.data = torch.randn(weight.shape) / D_MODEL**0.5
    config = HookedTransformerConfig(
        n_layers=LAYERS,
        d_model=D_MODEL,
        n_ctx=POS,
        d_head=64,
        n_heads=12,
        d_mlp=4 * D_MODEL,
        d_vocab=VOCAB,
        act_fn="gelu_new",
        normalization_type="LN",
        device="cpu",
    )
    placed = TranscoderSet(layers, "mlp.hook_in", "hook_mlp_out", scan="random")
    model = TransformerLensReplacementModel.from_config(config, placed)
    model.tokenizer = type(
        "Tokens",
        (),
        {"vocab_size": VOCAB, "padding_side": "right", "all_special_ids": (0,), "decode": str},
    )
    return model


def ours(peer: Any) -> tuple[Transformer, dict[str, Dictionary]]:
    """Return our model and transcoders with the weights of circuit-tracer's model.

    Without circuit-tracer, the weights are random.
    """
    dictionaries = {}
    for n in range(LAYERS):
        if peer is None:
            W_enc, W_dec = (
                torch.randn(*size) / D_MODEL**0.5
                for size in ((D_MODEL, FEATURES), (FEATURES, D_MODEL))
            )
        else:
            W_enc, W_dec = peer.transcoders[n].W_enc.data.T, peer.transcoders[n].W_dec.data
        zeros = torch.zeros(FEATURES), torch.zeros(D_MODEL)
        activation = TopK(ACTIVE, relu=False)
        dictionaries[f"blocks.{n}.mlp_out"] = Dictionary(
            W_enc, W_dec, *zeros, activation, reads="ln2.normalized"
        )
    if peer is None:
        config = TransformerConfig(
            vocab_size=VOCAB, n_ctx=POS, n_layers=LAYERS, n_heads=12, d_model=D_MODEL
        )
        return Transformer(config).eval(), dictionaries
    weights = {
        name.replace("old_mlp.", "").replace("old_unembed.", ""): weight
        for name, weight in peer.state_dict().items()
        if "transcoders" not in name and not name.endswith(("mask", "IGNORE"))
    }
    return from_transformer_lens(weights, peer.cfg.to_dict()).eval(), dictionaries


def measured(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of a call, and the GiB that it added to the memory at its peak."""

    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE

    before = most = held()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.01):
            most = max(most, held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    timing.seconds(call)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    return seconds, (most - before) / 2**30


def main() -> None:
    """Run both libraries in turn, and print the medians of all rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="of circuit-tracer")
    parser.add_argument("--device", default="cpu", help="elsewhere, hookscope alone is measured")
    options = parser.parse_args()
    torch.manual_seed(0)
    on_cpu, has_peer = options.device == "cpu", importlib.util.find_spec("circuit_tracer")
    peer = theirs() if has_peer and on_cpu else None
    model, dictionaries = ours(peer)
    model.to(options.device)
    dictionaries = {name: one.to(options.device) for name, one in dictionaries.items()}
    tokens = torch.randint(1, VOCAB, (POS,))
    tokens[0] = 0
    calls: dict[str, Callable[[], Any]] = {
        "hookscope": lambda: attribution_graph(
            model, tokens[None], dictionaries, targets=TARGETS, max_features=TRACED, first=1
        )
    }
    if peer is not None:
        from circuit_tracer.attribution.attribute import attribute

        calls["circuit-tracer"] = lambda: attribute(
            tokens, peer, max_n_logits=TARGETS, max_feature_nodes=TRACED, batch_size=options.batch
        )
    rounds = [{name: measured(call) for name, call in calls.items()} for _ in range(options.rounds)]
    for name in calls:
        seconds, memory = zip(*(each[name] for each in rounds), strict=True)
        print(f"{name:16} {statistics.median(seconds):8.2f} s {max(memory):6.2f} GiB")


if __name__ == "__main__":
    main()
