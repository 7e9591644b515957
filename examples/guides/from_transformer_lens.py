# %% [markdown]
# # Coming from TransformerLens
#
# You know `HookedTransformer`. This page says what your lines are called here. On the left of each table is a
# line of TransformerLens 2.16, on the right the line that does the same. A test runs both columns: the left one gave
# its numbers to a file once, and the right one must give the same.
#
# Four things are different on purpose.
#
# - **The model and the listener are two objects.** `model` is a plain `nn.Module`. `HookedRunner(model)` keeps and edits
#   its values.
# - **Weights are not processed** when a model is loaded. Logits are those of the original. `fold_norms` and `center` do
#   it when you ask. Analyses need neither: they fold norms while they read.
# - **Hooks end** with the call or the `with` that set them, or with the handle that `runner.add` returned.
# - **Names have no `hook_`.** `hooks_name("blocks.1.attn.hook_z")` gives ours. If no value here is the same, the error
#   says how to get it. A runner that is given one of their names says the same.
#
# Your own weights open with `load("model.pt")`, or `from_transformer_lens(model)` and
# `from_transformer_lens(state_dict, config)`. A published model opens with `load("gpt2")`.

# %%
# the lines of the tables use what is imported
import torch

from hooks import HookedRunner
from interp import (
    FactoredMatrix,
    Pairs,
    accumulated,
    activation_patching,
    apply_norm,
    composition_scores,
    cross_entropy,
    decompose,
    direct_logit_attribution,
    edits,
    head_scores,
    hooks_name,
    logit_diff,
    measure,
    ov_circuit,
    path_patching,
    qk_circuit,
    rank,
    repeated_tokens,
    singular_tokens,
    token_directions,
)
from models import (
    KVCache,
    causal_mask,
    center,
    evaluate,
    fold_norms,
    generate,
    generate_text,
    load,
    next_token_loss,
)

model = load("pydoc-4l")
runner = HookedRunner(model)
text, other = "ZQXJ-KV81 or ZQXJ-KV8", "ZQXJ-KV84 or ZQXJ-KV8"
right, wrong = model.to_id("1"), model.to_id("4")
tokens, n = model.to_tokens(text).tokens, len(text)


def halve(value, hook):
    """Works in both libraries: here the second argument is the point."""
    return value * 0.5


# %% [markdown]
# ## Running
#
# | TransformerLens | here | |
# | --- | --- | --- |
# | `model(tokens)` | `model(tokens)` | strings work too |
# | `model(tokens, return_type="loss")` | `next_token_loss(model(tokens), tokens).mean()` | |
# | `model(tokens, return_type="loss", loss_per_token=True)` | `next_token_loss(model(tokens), tokens)` | |
# | `logits, cache = model.run_with_cache(tokens)` | `logits, cache = runner.run_with_cache(tokens)` | `lazy=True` keeps little and computes the rest when you ask |
# | `model(tokens, stop_at_layer=2)` | `runner.capture(tokens, names="blocks.2.resid_pre")["resid_pre", 2]` | nothing after it is computed |
# | `model(cache["resid_pre", 2], start_at_layer=2)` | `model(cache["resid_pre", 2], starting_at_layer=2)` | |
# | `model.run_with_cache(tokens, names_filter=lambda name: name.endswith("pattern"))[1]["pattern", 1]` | `runner.run_with_cache(tokens, names="*.pattern")[1]["pattern", 1]` | or a list, or a predicate on a point |
# | `model.run_with_cache(tokens, pos_slice=-1)[1]["resid_post", 1]` | `runner.run_with_cache(tokens, positions=[-1])[1]["resid_post", 1]` | the axis stays |
# | `model.run_with_cache(tokens, remove_batch_dim=True)[1]["v", 0]` | `runner.run_with_cache(tokens)[1].at(batch=0)["v", 0]` | |
# | `model.run_with_cache(tokens, incl_bwd=True, return_type="loss")[1]["blocks.1.hook_resid_pre_grad"]` | `logits, graded = runner.run_with_cache(tokens, grads=True); next_token_loss(logits, tokens).mean().backward(); graded.grads["resid_pre", 1]` | you choose the loss |
# | `model.generate(tokens, max_new_tokens=5, do_sample=False, stop_at_eos=False, verbose=False)` | `generate(model, tokens, max_new_tokens=5, stop=())` | greedy by default |
# | `model.generate(text, max_new_tokens=5, do_sample=False, stop_at_eos=False, verbose=False)` | `generate_text(model, text, max_new_tokens=5, stop=())` | |
# | `HookedTransformerKeyValueCache.init_cache(model.cfg, "cpu", 1)` | `KVCache(max_context=64)` | `model(tokens, kv_cache=...)` |
# | `evals.evaluate(model)` | `evaluate(model, repeated_tokens(model.config.vocab_size, 150))` | on your own tokens |
#
# ## Texts
#
# | TransformerLens | here | |
# | --- | --- | --- |
# | `model.to_tokens(text)` | `model.to_tokens(text).tokens` | with its mask, to give to any function; `bos=True` or `False` for `prepend_bos=` |
# | `model.to_str_tokens(text)` | `model.to_pieces(tokens[0])` | |
# | `model.to_string(tokens[0])` | `model.to_text(tokens[0])` | |
# | `model.to_single_token("1")` | `model.to_id("1")` | |
# | `utils.test_prompt(text, "1", model, prepend_space_to_answer=False)` | `measure(rank(right), model(text))` | |
#
# ## Hooks
#
# | TransformerLens | here | |
# | --- | --- | --- |
# | `model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_z", halve)])` | `runner.run_with_hooks(tokens, hooks={"blocks.1.attn.z": halve})` | or `edits.scale(0.5)` |
# | `model.run_with_hooks(tokens, fwd_hooks=[(lambda name: name.endswith("mlp_out"), halve)])` | `runner.run_with_hooks(tokens, hooks={"*.mlp_out": halve})` | |
# | `with model.hooks(fwd_hooks=[("blocks.1.attn.hook_z", halve)]): logits = model(tokens)` | `with runner.hooks({"blocks.1.attn.z": halve}): logits = model(tokens)` | |
# | `model.add_hook("blocks.1.attn.hook_z", halve); model(tokens)` | `handle = runner.add({"blocks.1.attn.z": halve}); model(tokens)` | |
# | `model.reset_hooks(); model(tokens)` | `handle.remove(); model(tokens)` | nobody else's hooks go with yours |
# | `model.add_perma_hook("blocks.1.attn.hook_z", halve); model(tokens)` | `runner.add({"blocks.1.attn.z": halve}); model(tokens)` | every handle stays until it is removed |
# | `model.reset_hooks(including_permanent=True); model(tokens)` | `[handle.remove() for handle in runner.handles]; model(tokens)` | |
# | `utils.get_act_name("pattern", 1)` | `hooks_name("pattern", 1)` | `blocks.1.attn.pattern` |
# | `model.hook_dict` | `runner.points` | `print(runner.table())` |
#
# ## The cache
#
# | TransformerLens | here | |
# | --- | --- | --- |
# | `cache["blocks.1.hook_resid_mid"]` | `cache["blocks.1.resid_mid"]` | |
# | `cache["pattern", 1]` | `cache["pattern", 1]` | |
# | `cache["scale", 0, "ln1"]` | `cache["ln1.scale", 0]` | |
# | `cache["normalized"]` | `cache["ln_final.normalized"]` | |
# | `cache["q", 1]` | `cache["q", 1]` | ours are after rotation and QK-norm, as their `rot_q` |
# | `cache["attn_scores", 1]` | `cache["scores", 1].masked_fill(~causal_mask(n), -torch.inf)` | ours are before the mask |
# | `cache.compute_head_results(); cache["result", 1]` | `torch.einsum("bphd,hdm->bphm", cache["z", 1], model.blocks[1].attn.W_O)` | |
# | `cache.stack_activation("mlp_out")` | `cache.stack("mlp_out")` | |
# | `cache.accumulated_resid()` | `torch.stack([*cache.stack("resid_pre"), cache["resid_post", -1]])` | |
# | `cache.decompose_resid(2).sum(0)` | `decompose(model, cache, before=2).values.sum(0)` | by heads, and with the biases, so that the sum is the stream |
# | `cache.stack_head_results(2)[7]` | `decompose(model, cache, before=2)["a1.h3"]` | |
# | `cache.stack_neuron_results(2)[517]` | `decompose(model, cache, before=2, neurons=True)["m1.n5"]` | |
# | `cache.get_full_resid_decomposition(2, expand_neurons=False).sum(0)` | `cache["resid_pre", 2]` | |
# | `folded_cache.apply_ln_to_stack(cache.stack_activation("mlp_out"), layer=2)` | `apply_norm(model, cache, cache.stack("mlp_out"), layer=2)` | with the gain, which they fold into weights |
# | `folded_cache.logit_attrs(folded_cache.stack_head_results(pos_slice=-1), tokens=right, incorrect_tokens=wrong, pos_slice=-1)` | `direct_logit_attribution(model, cache, right=right, wrong=wrong).by("head").values[:, :, -1]` | |
# | `folded_cache.logit_attrs(folded_cache.accumulated_resid(incl_mid=True, pos_slice=-1), tokens=right, incorrect_tokens=wrong, pos_slice=-1) + folded.b_U[right] - folded.b_U[wrong]` | `accumulated(model, cache, right=right, wrong=wrong).values[:, -1]` | with the bias |
#
# ## Weights
#
# | TransformerLens | here | |
# | --- | --- | --- |
# | `model.cfg.n_layers` | `model.config.n_layers` | |
# | `model.W_Q` | `model.W_Q` | and so on |
# | `model.OV[1, 3].norm()` | `ov_circuit(model, fold=False)[1, 3].norm()` | `fold=True` also folds the norms |
# | `model.QK[1, 3].norm()` | `qk_circuit(model, fold=False)[1, 3].norm()` | |
# | `FactoredMatrix(model.W_E[:5], model.W_U).AB` | `FactoredMatrix(model.W_E[:5], model.W_U).form()` | |
# | `model.all_composition_scores("K")` | `composition_scores(model, "K", fold=False).values[..., 0].nan_to_num(0)` | |
# | `model.tokens_to_residual_directions(right)` | `token_directions(model, "1", fold=False)` | |
# | `SVDInterpreter(model).get_singular_vectors("OV", 1, 3, 2)` | `singular_tokens(model, 1, 2, k=3)` | |
# | `folded(tokens).log_softmax(-1)` | `fold_norms(center(model))(tokens).log_softmax(-1)` | their `fold_layer_norm`, `center_writing_weights`, `center_unembed` |
#
# ## Analyses
#
# `pairs` holds both texts and the answers. A `Result` has effects: the metric less that of the run that is edited, with
# named axes.
#
# | TransformerLens | here | |
# | --- | --- | --- |
# | `patching.get_act_patch_resid_pre(model, corrupted, cache, metric)` | `patched = activation_patching(model, pairs, "resid_pre"); patched.values[..., 0] + patched.base` | |
# | `patching.get_act_patch_mlp_out(model, corrupted, cache, metric)` | `patched = activation_patching(model, pairs, "mlp_out"); patched.values[..., 0] + patched.base` | |
# | `patching.get_act_patch_attn_head_out_all_pos(model, corrupted, cache, metric)` | `patched = activation_patching(model, pairs, "z"); patched.values[..., 0] + patched.base` | |
# | `patching.get_act_patch_attn_head_out_by_pos(model, corrupted, cache, metric)` | `patched = activation_patching(model, pairs, "z", over=["layer", "pos", "head"]); patched.values[..., 0] + patched.base` | |
# | `patching.get_act_patch_attn_head_pattern_all_pos(model, corrupted, cache, metric)` | `patched = activation_patching(model, pairs, "pattern"); patched.values[..., 0] + patched.base` | |
# | `metric(model(tokens))` | `measure(logit_diff(right, wrong), model(tokens))` | one number for each text |
# | `get_path_patch_head_to_heads(..., receiver_heads=[(3, 2)], receiver_input="k")` | `path_patching(model, pairs, receivers="a3.h2<k>")` | of the course's library |
# | `detect_head(model, text, "induction_head")` | `head_scores(model, cache, "induction").mean()` | a share of the queries that can have one |
# | `evals.induction_loss(model)` | `repeated = repeated_tokens(model.config.vocab_size, 20); measure(cross_entropy(repeated), model(repeated))` | |
#
# There is no shim that imitates their interface: a line that means something else should not run.

# %%
logits, cache = runner.run_with_cache(tokens)
pairs = Pairs(text, other, ("1", "4"))
print(activation_patching(model, pairs, "z").top(3))

# %% [markdown]
# ## Names
#
# `hooks_name` reads full names, those with `*` for the layer, and short ones as `get_act_name` does. Some answers depend
# on the model: queries are ours after rotation, and norms after their gain. So give `model=` where you have one.
# `version=4` is for the names of `TransformerBridge`, whose `hook_normalized` is before gain and bias.

# %%
for theirs in (
    "blocks.1.hook_resid_pre",
    "blocks.*.attn.hook_pattern",
    ("scale", 0, "ln1"),
    "blocks.1.attn.hook_q",
    "blocks.1.attn.hook_attn_scores",
    "blocks.1.hook_mlp_in",
):
    try:
        print(f"{theirs!s:32} {hooks_name(theirs, model=model)}")
    except KeyError as error:
        print(error)

# %% [markdown]
# A runner or a cache that is given such a name says ours.

# %%
try:
    runner.capture(tokens, names="blocks.1.hook_resid_pre")
except KeyError as error:
    print(error)

# %% [markdown]
# ## What is not here
#
# Data sets and evaluations on them (`evals.ioi_eval`, `make_wiki_data_loader`) are yours to bring. `examples/ioi.py` runs
# the published sequence on indirect objects, and `examples/from_transformer_lens.py` is an exercise of the course, ported.
#
# Not read are mixtures of experts, ALiBi, and encoders of `HookedEncoder`: `attach` puts points into the models of
# `transformers` themselves.
