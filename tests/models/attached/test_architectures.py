"""Caches, edits, gradients and plans of `HookedRunner` on eight architectures of `transformers`.

The models are not attached. The reference is a copy of each model with PyTorch's own hooks.
"""

import copy
import functools
import random
import types

import pytest
import torch
from torch import nn

from hooks import HookedRunner, HookError, NeverFiredError
from tests import tiny
from tests.zoo import Edit, by_hand, opened, same, same_output

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

ARCHITECTURES = {
    "gpt2": ("GPT2LMHeadModel", dict(n_inner=13)),
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", dict(sliding_window=3)),
    # The kernel of the experts needs sizes of a multiple of 16 bytes.
    "mixtral": ("MixtralForCausalLM", dict(intermediate_size=16, num_local_experts=5)),
    "bert": ("BertForMaskedLM", {}),
    "t5": ("T5ForConditionalGeneration", dict(d_ff=13, decoder_start_token_id=0)),
    "vit": ("ViTForImageClassification", dict(image_size=8, patch_size=4)),
}


@functools.cache
def world(name):
    """Return a model, its copy, their input, and the names of modules, blocks and linear maps."""
    architecture, sizes = ARCHITECTURES[name]
    model = tiny.model(architecture, **sizes, num_hidden_layers=2, pad_token_id=0)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.2)
    tokens = torch.randint(2, 23, (3, 5))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    given = {"input_ids": tokens, "attention_mask": mask}
    if name == "vit":
        given = {"pixel_values": torch.randn(3, 3, 8, 8)}
    elif name != "bert":
        given["use_cache"] = False
    if name == "t5":
        given["decoder_input_ids"] = tokens[:, :3]
    twin, modules = copy.deepcopy(model), {}
    lists = [path for path, module in twin.named_modules() if isinstance(module, nn.ModuleList)]
    for path, module in twin.named_modules(remove_duplicate=False):
        if path and path not in lists:
            modules[path] = module
    return types.SimpleNamespace(
        model=model,
        twin=twin,
        runner=HookedRunner(model),
        modules=modules,
        given=given,
        blocks=[path for path in modules if path.rpartition(".")[0] in lists],
        # Leave out routers: experts read other tensors of their output than the first, so an edit
        # of the first tensor is refused.
        linears=[
            path
            for path, module in modules.items()
            if hasattr(module, "weight") and not path.endswith(".gate")
        ][2:-1:3],
    )


def ran_once(theirs):
    return [name for name, firings in theirs.fired.items() if len(firings) == 1]


def names(w):
    """Check that a run caches every module that ran once, and gives reasons for all others."""
    with torch.no_grad(), by_hand(w, w.given, keep=w.modules) as theirs:
        output, cache = w.runner.run_with_cache(**w.given)
    once = ran_once(theirs)
    same_output(output, theirs.output, "output")
    assert list(cache) == once
    assert set(cache.skipped) == w.modules.keys() - {*once}
    assert all(cache.skipped.values())
    for name in once:
        same(cache[name], theirs.fired[name][0][1], name)
    for name in (name for name, firings in theirs.fired.items() if not firings):
        with pytest.raises(NeverFiredError, match=name):
            w.runner.run_with_cache(**w.given, names=name)


def edits_of(w):
    rng = random.Random(0)
    return [Edit(rng, tuple(chosen), chosen) for chosen in (w.blocks[-1:], w.linears)]


def edits(w):
    changes = edits_of(w)
    with (
        torch.no_grad(),
        by_hand(w, w.given, changes) as theirs,
        w.runner.hooks({changes[0].key: changes[0]}),
    ):
        output = w.runner.run_with_hooks(**w.given, hooks={changes[1].key: changes[1]})
        same_output(output, theirs.output, "output")
    with torch.no_grad(), by_hand(w, w.given) as theirs:
        same_output(w.model(**w.given), theirs.output, "output afterwards")


def capture(w):
    chosen = [*w.linears[:2], w.blocks[0]]
    with torch.no_grad(), by_hand(w, w.given, keep=chosen, stops=True) as theirs:
        cache = w.runner.capture(**w.given, names=chosen)
        for name in chosen:
            same(cache[name], theirs.fired[name][0][1], name)


def gradients(w):
    change = Edit(random.Random(0), w.blocks[0], w.blocks[:1], backward=True)
    chosen = w.blocks + w.linears
    with by_hand(w, w.given, [change], chosen, grads=True) as theirs:
        opened(theirs.output)[0].square().sum().backward()
    with w.runner.hooks(backward={change.key: change}):
        output, cache = w.runner.run_with_cache(**w.given, names=chosen, grads=True)
        opened(output)[0].square().sum().backward()
    for name in theirs.grads:
        same(cache.grads[name], theirs.grads[name], name, exact=False)
    assert list(cache.grads) == [name for name in cache if name in theirs.grads]
    for (name, ours), other in zip(w.model.named_parameters(), w.twin.parameters(), strict=True):
        if other.grad is not None:
            same(ours.grad, other.grad, name, exact=False)
        ours.grad = other.grad = None


def lazy(w):
    with torch.no_grad(), by_hand(w, w.given, keep=w.modules) as theirs:
        output, cache = w.runner.run_with_cache(**w.given, lazy=True)
        w.model(**w.given, output_hidden_states=True)
    same_output(output, theirs.output, "output")
    for name in ran_once(theirs):
        same(cache[name], theirs.fired[name][0][1], name, exact=False)


def generate(w):
    if not w.twin.can_generate():
        assert isinstance(
            w.twin, (transformers.BertForMaskedLM, transformers.ViTForImageClassification)
        )
        return
    given = {key: w.given[key] for key in ("input_ids", "attention_mask")}
    options = dict(
        max_new_tokens=4, do_sample=False, output_scores=True, return_dict_in_generate=True
    )
    changes = edits_of(w)
    theirs_given = given | options
    with by_hand(w, w.given, changes), torch.no_grad():
        theirs = w.twin.generate(**theirs_given)
    with w.runner.hooks({change.key: change for change in changes}), torch.no_grad():
        ours = w.model.generate(**given, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    for one, other in zip(ours.scores, theirs.scores, strict=True):
        same(one, other, "scores")


def plan(w):
    """Check that a plan gives the size of the cache of a run.

    For a mixture of experts, the plan raises an error: PyTorch has no meta version of its products.
    """
    if w.model.config.model_type == "mixtral":
        with pytest.raises(HookError):
            w.runner.plan(**w.given, names=w.blocks)
        return
    before = [value.clone() for value in w.model.state_dict().values()]
    with torch.no_grad(), by_hand(w, w.given) as theirs:
        chosen = w.blocks + w.linears
        planned = w.runner.plan(**w.given, names=chosen)
        assert all(map(torch.equal, w.model.state_dict().values(), before))
        output, cache = w.runner.run_with_cache(**w.given, names=chosen)
        same_output(output, theirs.output, "output")
    assert (planned.nbytes, [*planned.values]) == (cache.nbytes, [*cache])


JOBS = [names, edits, capture, gradients, lazy, generate, plan]


@pytest.mark.sampled(16)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_against_raw_hooks(name, job):
    job(world(name))
