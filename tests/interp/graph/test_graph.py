"""The graph of a model: its nodes, its edges, and the vectors that each writer adds to the
stream.
"""

import copy

import pytest
import torch

from hooks import CacheError, HookedRunner, UnknownNameError
from interp import edits, graph
from models import Transformer, TransformerConfig, attach
from tests import tiny
from tests.streams import FORMS, made

TOKENS = torch.randint(23, (5, 7), generator=torch.Generator().manual_seed(1))


def ran(model, nodes, **options):
    return HookedRunner(model).run_with_cache(TOKENS, names=nodes.needed, **options)[1]


@pytest.mark.parametrize("split_embeddings", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_outputs_of_writers_add_up_to_the_stream(form, split_embeddings):
    model = made(**FORMS[form])
    nodes = graph.Graph(model, split_embeddings)
    for lazy in (False, True):
        cache = ran(model, nodes, lazy=lazy)
        found = nodes.contributions(cache)
        assert len(found) == len(nodes.writers)
        torch.testing.assert_close(found.sum(0), cache["resid_post", -1], rtol=0, atol=1e-12)


def test_a_graph_prints_its_sizes():
    config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=1, n_heads=2, d_model=4)
    nodes = graph.Graph(Transformer(config).eval())
    # The writers are the input, two heads and the MLP. The readers are three for each head, the MLP
    # and the logits.
    sizes = f"4 writers, 8 readers, {6 + 3 + 4} edges"
    assert repr(nodes) == f"Graph of a Transformer: 1 layer, {sizes}"


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_head_writes_its_share_of_the_norm(norm):
    model = made(norm=norm, norm_place="sandwich")
    _, cache = HookedRunner(model).run_with_cache(TOKENS, mode="full")
    nodes, found = graph.Graph(model), graph.writers(model, cache)
    block = model.blocks[1]
    z, weight = cache["z", 1], block.attn.output.weight
    parts = [z[..., h, :] @ weight[:, 4 * h : 4 * h + 4].T for h in range(6)]
    parts.append(block.attn.output.bias.expand_as(parts[0]))
    whole, post = sum(parts), block.ln1_post
    if norm == "layernorm":
        parts = [part - part.mean(-1, keepdim=True) for part in parts]
        scale = (whole.var(-1, correction=0, keepdim=True) + post.eps).sqrt()
    else:
        scale = (whole.square().mean(-1, keepdim=True) + post.eps).sqrt()
    expected = [part / scale * post.weight for part in parts]
    expected[-1] = expected[-1] + getattr(post, "bias", 0)
    for name, part in zip([*(f"a1.h{h}" for h in range(6)), "a1.bias"], expected, strict=True):
        torch.testing.assert_close(found[nodes.writers.index(name)], part)


def test_separate_embeddings_are_divided_by_the_scale_of_their_norm():
    model = made(embed_norm=True)
    nodes = graph.Graph(model, split_embeddings=True)
    found = nodes.contributions(ran(model, nodes))
    token, place = model.W_E[TOKENS], model.W_pos[:7].expand(5, -1, -1)
    scale = ((token + place).var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    assert nodes.writers[:3] == ("embed", "pos_embed", "input.bias")
    for row, part in zip(found[:2], (token, place), strict=True):
        expected = (part - part.mean(-1, keepdim=True)) / scale * model.ln_embed.weight
        torch.testing.assert_close(row, expected)
    torch.testing.assert_close(found[2], model.ln_embed.bias.expand_as(token))


def test_outputs_of_writers_depend_on_the_gain_of_their_norm():
    """The derivative by the gain of the norm equals a finite difference, so weights can be trained
    through a circuit.
    """
    model = made(norm_place="sandwich")
    nodes, gain = graph.Graph(model), model.blocks[1].ln1_post.weight
    with torch.no_grad():
        cache = ran(model, nodes)
    at = {point: cache[name] for point, name in zip(nodes.points, nodes.needed, strict=True)}

    def total():
        return sum(
            part.vectors().square().sum() for part in nodes.layers[1].heads.outputs(at.__getitem__)
        )

    (found,) = torch.autograd.grad(total(), gain)
    with torch.no_grad():
        before = total()
        gain[3] += 1e-6
        torch.testing.assert_close((total() - before) / 1e-6, found[3], rtol=1e-4, atol=0)


def test_edges_of_gpt2_small_are_counted_as_by_mib():
    config = TransformerConfig(vocab_size=2, n_ctx=2, n_layers=12, n_heads=12, d_model=12)
    nodes = graph.Graph(Transformer(config))
    assert (len(nodes.edges), len(nodes.writers), len(nodes.readers)) == (32_491, 157, 445)


def test_a_reader_comes_after_its_writers():
    nodes = graph.Graph(made(n_layers=2, n_heads=2, n_kv_heads=1))
    names = {}
    for edge in nodes.edges:
        writer, reader = edge.split("->")
        names[reader] = " ".join(filter(None, [names.get(reader), writer]))
    first, second = "input", "input a0.h0 a0.h1 m0"
    assert " ".join(nodes.writers) == "input a0.h0 a0.h1 a0.bias m0 a1.h0 a1.h1 a1.bias m1"
    assert names == {
        **dict.fromkeys(["a0.h0<q>", "a0.h1<q>", "a0.h0<k>", "a0.h0<v>"], first),
        "m0": "input a0.h0 a0.h1",
        **dict.fromkeys(["a1.h0<q>", "a1.h1<q>", "a1.h0<k>", "a1.h0<v>"], second),
        "m1": f"{second} a1.h0 a1.h1",
        "logits": f"{second} a1.h0 a1.h1 m1",
    }


def test_the_mlp_of_a_parallel_block_does_not_read_its_heads():
    edges = set(graph.Graph(made(parallel=True, norm_place="sandwich")).edges)
    assert {"a0.h5->m1", "a0.bias->m1", "m0->m1", "a1.h5->logits", "a1.h0->m2"} <= edges
    assert not {"a1.h5->m1", "a1.bias->m1", "m1->m1"} & edges


def test_masks_replace_every_edge_outside_the_circuit():
    nodes = graph.Graph(made())
    kept = ["input->a0.h1<k>", "a0.h1->a2.h2<v>", "m2->logits"]
    mask = nodes.mask(kept)
    assert set(mask.unique().tolist()) == {0, 1}
    assert int(mask.sum()) == len(nodes.edges) - 3
    assert [mask[nodes.index(edge)] for edge in kept] == [0, 0, 0]
    assert mask[nodes.writers.index("a0.h1"), nodes.readers.index("a2.h2<v>")] == 0


@pytest.mark.parametrize(
    ("edge", "error"),
    [
        ("a0.h1->a2.h7<q>", "a2.h5<q>"),
        ("a0.1->logits", "a0.h1"),
        ("a2.h1->a1.h1<q>", "later"),
        ("a0.bias->logits", "bias"),
        ("logits", "source->target"),
    ],
)
def test_wrong_edges_are_refused(edge, error):
    with pytest.raises((ValueError, UnknownNameError), match=error):
        graph.Graph(made()).mask([edge])


def test_means_are_over_real_tokens():
    model, tokens = made(), torch.arange(10).view(2, 5)
    nodes, real = graph.Graph(model), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    _, cache = HookedRunner(model).run_with_cache(tokens, attention_mask=real)
    values, found = nodes.contributions(cache), nodes.mean(cache)
    torch.testing.assert_close(found[:, 0, :3], values[:, :, :3].mean(1))
    torch.testing.assert_close(found[:, 0, 3:], values[:, 0, 3:])
    for wrong in (real.flip(1), torch.tensor([[1, 1, 1, 1, 0]] * 2)):
        with pytest.raises(ValueError, match="mean"):
            nodes.mean(HookedRunner(model).run_with_cache(tokens, attention_mask=wrong)[1])


def test_models_without_a_graph_are_errors():
    with pytest.raises(ValueError, match="post"):
        graph.Graph(made(norm_place="post"))
    with pytest.raises(TypeError, match="models.from_hf"):
        graph.Graph(torch.nn.Linear(3, 5))
    model = made()
    model.blocks[1] = torch.nn.Linear(3, 5)
    with pytest.raises(TypeError, match="branches"):
        graph.Graph(model)


def test_caches_that_do_not_fit_are_refused():
    model = made()
    nodes = graph.Graph(model)
    with pytest.raises(CacheError, match="needed"):
        nodes.contributions(HookedRunner(model).capture(TOKENS, names="*.z"))
    with pytest.raises(CacheError, match="add up"):
        nodes.contributions(ran(made(seed=2), nodes))


def test_contributions_of_an_attached_model_in_float64_add_up_to_its_stream():
    # The norms of transformers compute in float32, so the sum differs by more than float64 rounds.
    model = tiny.redraw(tiny.model("Olmo2ForCausalLM").double(), 0.3)
    tokens = torch.tensor([[3, 7, 9, 2]])
    streams = []
    hooked = copy.deepcopy(model)
    hooked.model.layers[-1].register_forward_hook(lambda module, args, out: streams.append(out))
    hooked(tokens)
    with attach(model):
        nodes = graph.Graph(model)
        runner = HookedRunner(model)
        _, cache = runner.run_with_cache(tokens, names=nodes.needed)
        found = nodes.contributions(cache).sum(0)
        torch.testing.assert_close(found, streams[0], rtol=0, atol=1e-5)
        with runner.hooks({"blocks.0.resid_post": edits.scale(1.01)}):
            _, edited = runner.run_with_cache(tokens, names=nodes.needed)
        with pytest.raises(CacheError, match="add up to the stream of the cache.* was edited"):
            nodes.contributions(edited)
