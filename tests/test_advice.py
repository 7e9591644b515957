"""Errors say what to do: if a step is missing, arguments are swapped or an option is renamed."""

import pytest
import torch

from hooks import CacheError, EditError, HookedRunner, UnknownNameError
from interp import (
    Pairs,
    activation_patching,
    direct_logit_attribution,
    edge_attribution,
    edits,
    faithfulness,
    head_scores,
    load_sae,
    log_prob,
    logit_lens,
    plots,
    splice,
)
from models import attach, load
from tests import tiny
from tests.shipped import pydoc

TEXT, OTHER = "part KV81 and KV8", "part KV84 and KV8"


@pytest.fixture(scope="module")
def model():
    return pydoc()


@pytest.fixture(scope="module")
def cache(model):
    return HookedRunner(model).run_with_cache(TEXT)[1]


@pytest.mark.parametrize(
    "asked", [{"names": "blocks.0.attn.z"}, {"names": "*.z"}, {"mode": "residual"}]
)
def test_a_model_of_transformers_is_attached_first(asked):
    bare = tiny.model("GPT2LMHeadModel")
    with pytest.raises(UnknownNameError, match=r"models.attach\(model\) gives"):
        HookedRunner(bare).run_with_cache(torch.tensor([[1, 2]]), **asked)
    with pytest.raises(UnknownNameError, match=r"models.attach\(model\) gives"):
        splice(bare, load_sae("pydoc-4l/resid_post")).__enter__()


def test_features_are_points_inside_a_splice(model, cache):
    for key in (("features", 2), "blocks.2.resid_post.features"):
        with pytest.raises(UnknownNameError, match=r"inside `with interp.splice\(model, sae\)`"):
            cache[key]


@pytest.mark.parametrize(
    ("name", "ours"),
    [("attn_head_out", "z"), ("block_output", "resid_post"), ("mlp_activation", "mlp.post")],
)
def test_kinds_of_values_of_other_libraries_have_our_name(model, name, ours):
    pairs = Pairs("def __ini", "def __nam", ("t", "e"))
    with pytest.raises(UnknownNameError, match=f" is {ours}\\b"):
        activation_patching(model, pairs, name)
    with pytest.raises(UnknownNameError, match=f" is {ours}\\b"):
        HookedRunner(model).capture("def", names=f"blocks.1.{name}")
    # Our name is a site of the model.
    assert activation_patching(model, pairs, ours, layers=1).about["site"] == ours


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_model_is_told_so(model, cache):
    with pytest.raises(TypeError, match="HookedRunner's .model"):
        logit_lens(HookedRunner(model), cache)
    with pytest.raises(TypeError, match="HookedRunner's .model"):
        HookedRunner(HookedRunner(model))
    for swapped in (
        lambda: logit_lens(cache, model),
        lambda: direct_logit_attribution(cache, model, right="a"),
        lambda: head_scores(cache, model, "induction"),
    ):
        with pytest.raises(TypeError, match="ActivationCache.*cache comes after"):
            swapped()
    with pytest.raises(TypeError, match="got an ActivationCache"):
        plots.patterns(cache, model)


def test_a_partial_cache_is_told_what_is_needed(model):
    partial = HookedRunner(model).run_with_cache(TEXT, names="*.resid_post")[1]
    with pytest.raises(CacheError, match=r"need names='\*.pattern'"):
        head_scores(model, partial, "previous_token")


def test_a_result_has_no_items(model):
    result = activation_patching(model, Pairs(TEXT, OTHER, ("1", "4")), site="z")
    with pytest.raises(TypeError, match=r"with the axes layer"):
        result[0]


def test_a_mean_of_another_length_may_go_over_positions(model):
    runner, reference = HookedRunner(model), HookedRunner(model).run_with_cache([TEXT, OTHER])[1]
    with pytest.raises(EditError, match=r"got 17 .*across=\('batch', 'pos'\)"):
        runner.run_with_hooks("def", hooks={"blocks.1.mlp_out": edits.mean(reference)})


def test_a_cache_of_other_weights_says_to_run_again(cache):
    other = load("pydoc-4l")
    other.blocks[0].mlp.output.bias.data += 1
    with pytest.raises(CacheError, match="run this model again"):
        logit_lens(other, cache)


@pytest.mark.parametrize("analysis", [activation_patching, edge_attribution, faithfulness])
def test_a_metric_goes_into_the_pairs(model, analysis):
    with pytest.raises(TypeError, match=rf"{analysis.__name__} .*Pairs\(.*metric="):
        analysis(model, Pairs(TEXT, OTHER), metric=log_prob(3))


def test_graphs_of_an_attached_model_say_that_they_count_positions():
    tokens = torch.tensor([[3, 1, 4], [1, 5, 9]])
    texts = [
        {"input_ids": each, "position_ids": torch.arange(3)[None]}
        for each in (tokens, tokens.flip(1))
    ]
    pairs = Pairs(*texts, torch.tensor([[2, 6], [5, 3]]))
    with attach(tiny.model("LlamaForCausalLM")) as attached:
        activation_patching(attached, pairs)
        with pytest.raises(TypeError, match="position_ids=; .*counts positions.*attribution_patch"):
            edge_attribution(attached, pairs)
