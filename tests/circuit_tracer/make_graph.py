"""Write circuit_tracer.safetensors: a random model, random transcoders, and circuit-tracer's graph.

It was made with circuit-tracer 0.5.0 and TransformerLens 2.16.1. They cannot be installed together
with the versions that this project supports. Unpack both, and the libraries that they import, into
a folder of their own.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "n_layers": 3,
    "d_model": 12,
    "n_ctx": 8,
    "d_head": 5,
    "n_heads": 4,
    "d_mlp": 17,
    "d_vocab": 19,
    "act_fn": "gelu_new",
    "normalization_type": "LN",
}
TEXT = [3, 1, 4, 1, 5, 9]
FEATURES = 23


class Tokens:
    """A replacement of a tokenizer, whose texts are numbers."""

    vocab_size, padding_side = CONFIG["d_vocab"], "right"
    # If the text did not begin with a special token, circuit-tracer would put one before it.
    all_special_ids = (TEXT[0],)

    def decode(self, tokens):
        """Return the numbers of the tokens as a text."""
        return str(tokens)


def transcoder(layer):
    """Return a random transcoder with a skip connection."""
    from circuit_tracer.transcoder import SingleLayerTranscoder
    from circuit_tracer.transcoder.activation_functions import JumpReLU

    made = SingleLayerTranscoder(
        CONFIG["d_model"],
        FEATURES,
        JumpReLU(torch.rand(FEATURES)),
        layer,
        skip_connection=True,
        dtype=torch.float64,
    )
    for name, weight in made.named_parameters():
        if "threshold" not in name:
            weight.data = torch.randn_like(weight)
    return made


def main():
    """Write the file."""
    from circuit_tracer.attribution.attribute import attribute
    from circuit_tracer.graph import compute_graph_scores, compute_node_influence, prune_graph
    from circuit_tracer.replacement_model.replacement_model_transformerlens import (
        TransformerLensReplacementModel,
    )
    from circuit_tracer.transcoder import TranscoderSet
    from transformer_lens import HookedTransformerConfig

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    layers = {n: transcoder(n) for n in range(CONFIG["n_layers"])}
    placed = TranscoderSet(layers, "mlp.hook_in", "hook_mlp_out", scan="random")
    config = HookedTransformerConfig(**CONFIG, dtype=torch.float64, device="cpu")
    model = TransformerLensReplacementModel.from_config(config, placed)
    for name, weight in model.named_parameters():
        if "transcoders" not in name:
            weight.data = 0.5 * torch.randn_like(weight)
            weight.data += name.endswith(("ln1.w", "ln2.w", "ln_final.w"))
    model.tokenizer = Tokens()
    graph = attribute(torch.tensor(TEXT), model, max_n_logits=4)
    nodes, edges, cumulative = prune_graph(graph, 0.8, 0.98)
    weights = torch.zeros(len(graph.adjacency_matrix))
    weights[-len(graph.logit_targets) :] = graph.logit_probabilities
    tensors = {
        "matrix": graph.adjacency_matrix,
        "influence": compute_node_influence(graph.adjacency_matrix, weights),
        "scores": torch.tensor(compute_graph_scores(graph)),
        "nodes": nodes,
        "edges": edges,
        "cumulative": cumulative,
        "features": graph.active_features,
        "activations": graph.activation_values,
        "logits": graph.logit_token_ids,
        "probabilities": graph.logit_probabilities,
    }
    for name, tensor in model.state_dict().items():
        if "transcoders" not in name and not name.endswith(("mask", "IGNORE")):
            tensors[f"model.{name.replace('old_mlp.', '').replace('old_unembed.', '')}"] = tensor
    for n, made in layers.items():
        tensors |= {f"transcoders.{n}.{name}": tensor for name, tensor in made.state_dict().items()}
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
        Path(__file__).with_name("circuit_tracer.safetensors"),
        {"config": json.dumps(CONFIG), "text": json.dumps(TEXT)},
    )


if __name__ == "__main__":
    main()
