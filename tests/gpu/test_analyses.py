"""Analyses on a GPU give the numbers of the CPU.

Attached models in half precision give the same numbers as before `attach`.
"""

import copy

import pytest
import torch
from torch.utils._pytree import tree_map

import interp
from hooks import HookedRunner
from models import attach
from tests.analyses import ANALYSES, PAIRS
from tests.gpu.kinds import gap
from tests.interp.attribution_graphs.transcoders import TEXT, model_of, transcoders
from tests.reference import variant

PLAIN = dict(n_layers=2, n_kv_heads=3, positions="rotary", tied_unembed=False)
FAMILIES = ["llama", "gemma2", "gpt_neox", "gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3"]
# Angles are computed in float32, and a GPU rounds them differently.
CLOSE = dict(rtol=1e-4, atol=1e-6, equal_nan=True)

if not torch.cuda.is_available():
    pytest.skip(
        "the CPU is what a GPU is compared with, and PyTorch finds none", allow_module_level=True
    )


@pytest.mark.parametrize("split", [False, True], ids=["whole", "one block on the CPU"])
@pytest.mark.parametrize("analysis", ANALYSES.values(), ids=ANALYSES)
def test_an_analysis_gives_the_numbers_of_the_cpu(analysis, split):
    model = variant("sandwich", **PLAIN)
    there = copy.deepcopy(model).to("cuda")
    if split:
        there.blocks[1].cpu()
    values = tree_map(lambda leaf: leaf.cpu() if torch.is_tensor(leaf) else leaf, analysis(there))
    torch.testing.assert_close(values, analysis(model), **CLOSE)


@pytest.mark.parametrize("kind", ["layer", "across"])
def test_an_attribution_graph_matches_the_cpu(kind):
    model, read = model_of("rms"), "ln2.normalized"
    dictionaries = transcoders(kind, read)
    graphs, changes = [], []
    for device in ("cpu", "cuda"):
        model.to(device)
        if kind == "layer":
            moved = {name: one.to(device) for name, one in dictionaries.items()}
        else:
            moved = dictionaries.to(device)
        graph = interp.attribution_graph(model, TEXT, moved, targets=[3], attention=True)
        feature = next(node.id for node in graph.nodes if "feature" in node.kind)
        graphs.append(graph)
        changes.append(graph.intervene({feature: 0.0}).true.cpu())
    ours, there = graphs
    assert [node.id for node in there.nodes] == [node.id for node in ours.nodes]
    # Rows are sorted by influence, and rounding decides the order of rows with equal influence.
    orders = [graph.column.cpu().argsort(stable=True) for graph in graphs]
    for name in ("rows", "by_attention"):
        rows = [
            getattr(graph, name).cpu()[order] for graph, order in zip(graphs, orders, strict=True)
        ]
        torch.testing.assert_close(*rows, **CLOSE)
    torch.testing.assert_close(*changes, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_attached_models(kind, dtype):
    there = pytest.importorskip("tests.attachable", reason="needs the extra hf")
    config = there.config_of(kind)
    for size in {"intermediate_size", "moe_intermediate_size"} & {*vars(config)}:
        setattr(config, size, 16)  # kernels of experts in half precision need multiples of 8
    model, tokens = there.made(kind, config=config).to("cuda", dtype), PAIRS.clean.to("cuda")
    twin = copy.deepcopy(model)
    attach(model)
    expected = twin(tokens).logits
    assert torch.equal(model(tokens).logits, expected)
    logits, cache = HookedRunner(model).run_with_cache(tokens, names="*.resid_post")
    assert torch.equal(logits.logits, expected)
    if dtype is torch.float32:
        on_cpu = there.made(kind, config=config)
        attach(on_cpu)
        cache = HookedRunner(model).run_with_cache(tokens)[1]
        for name, value in HookedRunner(on_cpu).run_with_cache(PAIRS.clean)[1].items():
            assert gap(cache[name], value) < 1e-4, name
        effects = [
            interp.activation_patching(each, PAIRS, "resid_post").values for each in (model, on_cpu)
        ]
        assert gap(*effects) < 1e-3
