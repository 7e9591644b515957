"""Write page.json and server.json: graphs as circuit-tracer and Neuronpedia's server save them.

- page.json: circuit-tracer 0.5.0 wrote the graph of circuit_tracer.safetensors. Then its page was
  opened in Chromium, from its own server. Six nodes were clicked with Ctrl, two labels were edited,
  two groups were made with `g`, and `Save` was pressed.
- server.json: written by `apps/graph/neuronpedia_graph/format_converter.py` of Neuronpedia (commit
ebb8426), which must be next to this file. This script replaces the modules that it imports. -
anthropic.json: a part of Anthropic's published capital-state-dallas.json, some of its nodes and the
links between them.
"""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from safetensors import safe_open

HERE = Path(__file__).parent
WORDS = [f" {letter}" for letter in "abcdefghijklmnopqrs"]


class Tokens:
    """A replacement of a tokenizer, whose tokens are letters."""

    @classmethod
    def from_pretrained(cls, name):
        """Return the same tokenizer for any name."""
        return cls()

    def decode(self, token):
        """Return the letter of a token."""
        return WORDS[int(token)]


def write_circuit_tracer(folder):
    """Write letters.json, which the page opens, and graph-metadata.json."""
    from circuit_tracer.attribution.targets import LogitTarget
    from circuit_tracer.graph import Graph
    from circuit_tracer.utils.tl_nnsight_mapping import UnifiedConfig

    module = sys.modules["circuit_tracer.utils.create_graph_files"]
    module.AutoTokenizer = Tokens
    torch.set_default_dtype(torch.float64)
    with safe_open(HERE / "circuit_tracer.safetensors", "pt") as file:
        text = json.loads(file.metadata()["text"])
        names = ("features", "matrix", "activations", "logits", "probabilities")
        features, matrix, activations, logits, chances = map(file.get_tensor, names)
    # Make the numbers of features large. A small number could give the name of an error node.
    features[:, 2] += 100
    config = UnifiedConfig(3, 12, 5, 4, 17, 19, "none", "none", "none")
    targets = [LogitTarget(WORDS[token], token) for token in logits.tolist()]
    prompt, tokens = "".join(WORDS[token] for token in text), torch.tensor(text)
    graph = Graph(
        prompt,
        tokens,
        features,
        matrix,
        config,
        torch.arange(len(features)),
        activations,
        targets,
        chances,
        scan="random",
    )
    graph.to = lambda device: None
    module.create_graph_files(graph, "letters", str(folder.resolve()), None, 0.7, 0.8)


class Place:
    """A replacement of the server's class for a node: a hook and its indices."""

    def __init__(self, key, *indices):
        self.key, self.indices = key, torch.tensor([indices])


class Places(list):
    """A replacement of the server's class for several nodes."""

    def __add__(self, others):
        return Places([*self, *others])

    def unique(self):
        """Return the nodes without repetitions."""
        return Places(dict.fromkeys(self))

    def nodes_to_offsets(self, others):
        """Return the index of each of the other nodes in this list."""
        return torch.tensor([self.index(each) for each in others])


def write_server(path):
    """Write server.json."""
    for name in (
        "circuits.attribution",
        "circuits.indexed_tensor",
        "models.lorsa",
        "models.sparse_dictionary",
    ):
        module = sys.modules[f"llamascopium.{name}"] = ModuleType(name)
        for kind in ("AttributionResult", "NodeIndexedMatrix", "LorsaConfig", "SparseDictionary"):
            setattr(module, kind, object)
    import format_converter

    format_converter.pkg_version = lambda name: "0.1.0"
    layers = [f"blocks.{n}.hook_mlp_out" for n in range(3)]
    token = [Place("hook_embed", pos) for pos in range(4)]
    error = {
        place: Place(f"{layers[place[0]]}.error", place[1]) for place in [(0, 1), (1, 2), (1, 3)]
    }
    low, middle, high = (
        Place(f"{layers[layer]}.sae.hook_feature_acts", pos, feature)
        for layer, pos, feature in [(0, 1, 57), (1, 2, 57794), (1, 3, 1203)]
    )
    austin, dallas = Place("logits", 17), Place("logits", 5)
    edges = [
        (token[0], low, 1.5),
        (token[1], low, -0.25),
        (error[0, 1], middle, 0.5),
        (low, middle, 2.0),
        (token[2], middle, 0.75),
        (middle, high, -1.25),
        (low, high, 0.125),
        (error[1, 2], high, 0.375),
        (high, austin, 3.0),
        (middle, austin, -0.5),
        (error[1, 3], austin, 1.0),
        (token[3], austin, 0.25),
        (middle, dallas, 1.0),
        (high, dallas, -2.0),
        (error[1, 2], dallas, 0.0625),
    ]
    sources, targets, weights = zip(*edges, strict=True)
    matrix = SimpleNamespace(
        nonzero=lambda: (torch.tensor(weights), (Places(targets), Places(sources)))
    )

    class Activations:
        def __getitem__(self, nodes):
            return SimpleNamespace(data=torch.arange(1.0, len(nodes) + 1) / 4)

    result = SimpleNamespace(
        logit_token_ids=[17, 5],
        logit_tokens=[" Austin", ' "Dallas"'],
        probs=torch.tensor([0.625, 0.25]),
        prompt_token_ids=[2, 11, 13, 7],
        prompt_tokens=["<bos>", "capital", " of", " Texas"],
        activations=Activations(),
    )
    about = {"slug": "austin", "np_model_id": "qwen3-1.7b", "prompt": "capital of Texas"}
    about |= {"node_threshold": 0.8, "edge_threshold": 0.98, "np_transcoder_source_set": "plt"}
    dictionaries = {name: {"is_lorsa": False, "layer_idx": n} for n, name in enumerate(layers)}
    made = format_converter.convert_to_neuronpedia_graph(result, matrix, dictionaries, **about)
    path.write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    write_circuit_tracer(HERE / "written")
    write_server(HERE / "server.json")
