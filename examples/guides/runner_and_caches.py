# %% [markdown]
# # Runs and caches
#
# What a `HookedRunner` does with a model, what it keeps and what it changes, and the points of the bundled model.

# %%
from hooks import HookedRunner
from interp import edits
from models import load

model = load("pydoc-4l")
runner = HookedRunner(model)
text = "part ZQXJ-KV81 is sold out; ask for ZQXJ-KV8"
logits, cache = runner.run_with_cache(text, names=["blocks.*.attn.pattern", "ln_final.scale"])
print(cache["pattern", 2].shape, cache["ln_final.scale"].shape)
print(runner.plan(text, mode="full"))  # how many bytes a cache of everything would take
changes = {"blocks.1.mlp_out": edits.scale(0.5), "blocks.2.attn.z": lambda z, point: z * 0}
with runner.hooks(changes, receipts=True) as context:
    changed = runner.capture(
        text, names="blocks.3.resid_post"
    )  # stops after the last point asked for
print(context.receipts)

# %% [markdown]
# - **A model written to be read.** `models/transformer.py` is the forward pass, with block, attention and norm in files
#   beside it. Its values are named by identity modules, `HookPoint("batch pos head d_head")`, and it has no branch for extraction.
# - **Real models.** `load("gpt2")`, `load("path")`: Hugging Face directories of eleven families and GGUF files of 22 architectures, as one
#   `Transformer` with one config. Logits equal the reference's. If a file asks for what the config cannot express, loading
#   fails, names it, and says how to go on (`ignore=["key"]`).
# - **Words in, words out.** Wherever tokens are taken, a string, a list of strings or of tokens, a tensor, or what a tokenizer of
#   `transformers` gave (`input_ids` and `attention_mask`) is taken too; padding changes no number; results and lenses print words.
# - **Generation** from a KV cache that hooks see into, from text to text or token by token. It stops at the end of the text.
# - **A runner that listens.** `HookedRunner(model)` keeps what you ask for by name, glob, predicate or mode, and edits
#   it, with ordinary PyTorch forward hooks. It works on any `nn.Module`: a submodule's name is its output.
# - **Nothing until used.** A layer's attention runs `scaled_dot_product_attention`, and its norms their kernel, until one of
#   its `scores`, `pattern` or `scale` points is hooked. With no hooks the output is bitwise that of the model without points.
# - **Lazy caches.** `run_with_cache(tokens, lazy=True)` keeps what enters each block, and runs a block again, with the
#   edits of that run, when you ask for something inside it: that value is computed and kept, and no other. `cache.read(...)` gives
#   several of one run of the block, and `cache.layers("pattern")` those of all layers one after the other; both keep nothing, as
#   do the readings of `interp`. `cache.at(...)` of a lazy cache is lazy. If the block no longer gives what it gave in the run, because a
#   weight, an adapter or an attribute changed, that is an error.
# - **Copies where they matter.** A hook function is given its own copy of the value: it may write into it, or return
#   another. If it runs a model itself, hooks are off during that run. A cache's values are its own: later writes into inputs,
#   outputs, weights or buffers do not reach them (with `detach=False` they belong to the graph). They are copies, but for models that say
#   `overwrites_values = False`, as ours do: there they are kept as they are while no hook acts, and are not yours to write into. `plan` runs a
#   copy.
# - **Loud.** An unknown name or keyword lists close matches; a point that never fired, an edit of the wrong shape, an edit inside
#   activation checkpointing: each is one clear error. A run that draws random numbers in training mode warns once.
# - **Confined.** Hooks act in the thread that entered their `with`, and in asyncio tasks that start inside it. They are gone
#   when it ends, whatever was raised inside. In a notebook, `handle = runner.add(changes)` edits every run of this thread until
#   `handle.remove()`; `print(runner)` and `runner.handles` show what was added.
# - **Any module.** Without `HookPoint`s, `full`, globs and predicates leave out modules that did not run, ran twice or gave no
#   tensor; `cache.skipped` says why. An exact name still raises. Of a module that returns several tensors an edit changes the first;
#   its receipt says so, and where the model reads another, as of a router, it is refused.
# - **Any causal model of `transformers`** under the same names: `attach(model)` puts the points into that instance, and takes
#   them out without a trace.
# - **Analyses**: lenses, scores of heads, the stream and the logits as sums of parts, singular values and subspaces, read from
#   one cache; readings of weights; ready-made edits, activation and path patching and ablation at every site, sweeps of
#   any edits at a quarter of a forward pass each, attribution that is checked; circuits, found and measured; and a report.
#
# | kept by a run | how |
# | --- | --- |
# | everything | `run_with_cache(tokens)` or `mode="full"` |
# | scores, patterns and values; also the residual stream | `mode="svd_targets"`; `mode="residual"` |
# | some points | `names="blocks.*.attn.pattern"`, a predicate, or a list of these |
# | and nothing after the last of them is computed | `capture(tokens, names=...)` |
# | some positions; on another device; in another dtype | `positions=[-1]`, a mask, or a list for each text; `device="cpu"`; `dtype=torch.bfloat16` |
# | no more than so many bytes, else an error that says what would fit | `max_bytes=10**9`; by default 0.9 of the memory that is free |
# | gradients, after your `backward()`; the autograd graph. Other cached runs are without gradients | `grads=True`, then `cache.grads`; `detach=False` |
# | sizes only, exact to the byte, before running (a lazy plan of a `transformers` model also counts masks that a run omits) | `plan(tokens, names=...)` |
#
# `cache["pattern", 3]` is `cache["blocks.3.attn.pattern"]`; `cache.stack("resid_post")` is `[layer, batch, pos, d_model]`;
# `cache.at(pos=slice(5, None), batch=0)` slices by axis name, queries of patterns included, as `positions=` does. Positions are those of edits: from 0 on they count columns, and negative
# ones the real tokens of each text, so `positions=[-1]` and `cache.at(pos=-1)` of unequal texts are the last token of each; a slice
# that takes more of one text than of another, such as `slice(2, -1)`, is refused. `cache.save(path)` and `ActivationCache.load(path)` keep names,
# axes and gradients. `cache.inputs` is what the run was given, masks included; of `run=` the tokens of all runs are joined. Readings refuse a model of other weights than the
# cache's.
#
#
# ## torch.compile
#
# `torch.compile(model)` works with all points of a plain model, and its names stay the same. A compiled model runs the code that the
# compiler made at its first call, so the order of calls matters:
#
# | what you want | when to call what |
# | --- | --- |
# | run without hooks | `compiled = torch.compile(model)`, at any time |
# | the same edits in many runs | set them first (`with runner.hooks(...)` or `runner.add(...)`), then call `compiled`: they become part of its code |
# | add or change edits of a model that was called | `torch.compiler.reset()` after `runner.add(...)`; the next run compiles again. Without it the run warns |
# | a cached run | `HookedRunner(compiled).run_with_cache(...)` before the first plain call of `compiled`, or after a reset |
# | patching, sweeps, attribution, generation | give the model itself, not the compiled one: other hooks act in each run. A compiled one is an error |
# | an attached model | `attach` first, then `torch.compile` |
#
# Compiled code does not know which columns are padding. So compile edits for texts of one length, or give positions from 0 on:
# `pos=-1` is the last column there.
#
# ```python
# compiled = torch.compile(model)
# with runner.hooks({"blocks.1.mlp_out": edits.zero()}):
#     logits = compiled(tokens)  # the edit is a part of the compiled code
# ```
#
#
# ## Hook points
#
#
# `python -m interp points` prints this table for a model; names are module paths.
#
# ```
# embed                      batch pos d_model         token embeddings
# pos_embed                  batch pos d_model         additive position encodings
# blocks.0-3.resid_pre       batch pos d_model         residual stream entering the block
# blocks.0-3.ln1.scale       batch pos 1               what the norm divides by
# blocks.0-3.ln1.normalized  batch pos d_model         what the sublayer reads: the norm's output, gain and bias applied
# blocks.0-3.attn.q          batch pos head d_head     queries as they enter the dot product
# blocks.0-3.attn.k          batch pos kv_head d_head  keys as they enter the dot product
# blocks.0-3.attn.v          batch pos kv_head d_head  values
# blocks.0-3.attn.scores     batch head query key      q·k·scale before the mask: not zero above the diagonal
# blocks.0-3.attn.pattern    batch head query key      softmax of the masked scores over keys
# blocks.0-3.attn.z          batch pos head d_head     pattern·v, before the output projection
# blocks.0-3.attn_out        batch pos d_model         what attention adds to the residual stream
# blocks.0-3.resid_mid       batch pos d_model         residual stream between the two sublayers
# blocks.0-3.ln2.scale       batch pos 1               what the norm divides by
# blocks.0-3.ln2.normalized  batch pos d_model         what the sublayer reads: the norm's output, gain and bias applied
# blocks.0-3.mlp.pre         batch pos d_mlp           before the nonlinearity
# blocks.0-3.mlp.post        batch pos d_mlp           after the nonlinearity
# blocks.0-3.mlp_out         batch pos d_model         what the MLP adds to the residual stream
# blocks.0-3.resid_post      batch pos d_model         residual stream leaving the block
# ln_final.scale             batch pos 1               what the norm divides by
# ln_final.normalized        batch pos d_model         what the unembedding reads
# ```
#
#
# ## The report
#
#
# `python -m interp report [--model M] [--prompt TEXT] [--corrupted TEXT] [--out report.html]` needs no argument. It writes
# one page that works offline: the text with its loss, attention patterns, a logit lens, head scores and patching. If the
# tokenizer cannot encode the default prompt, the model writes one.
#
# `pydoc-4l` is a character model of 4 layers, 4 heads and width 128, trained on the text of Python's own documentation
# and on repeated random characters (`examples/train_pydoc.py`; its losses are in `models/bundled/pydoc-4l/training.json`).
