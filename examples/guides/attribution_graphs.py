# %% [markdown]
# # Attribution graphs
#
# Which features make the next token, and what makes them? An attribution graph (Ameisen et al. 2025, "Circuit Tracing") answers with
# exact numbers for one text. MLPs are replaced by transcoders and by their errors, and attention patterns and the scales of norms are
# held as they were. What is left of the model is linear. So every feature and every logit is a sum of what others add to it, and
# nothing is left out: features, errors, tokens, positions and one node for all constants.

# %%
from interp import attribution_graph, load_sae
from models import load

model, transcoders = load("pydoc-4l"), load_sae("pydoc-4l/transcoders")
text = "part ZQXJ-KV81 is sold out; ask for ZQXJ-KV8"
graph = attribution_graph(model, text, transcoders)
print(graph)

# %% [markdown]
# - `gap` is how far rows are from adding up, as a share of the sizes of their parts. It is about 1e-6 in float32, 1e-15 in float64.
# - `replacement` is the share of influence that begins in tokens, positions and constants, and not in errors.
# - `completeness` is the share of the inputs of all nodes, weighted by their influence, that are no errors.
#
# `targets=` takes tokens, pairs of tokens for the difference of their logits, and features as (layer, feature, position). By default
# they are the likeliest tokens, until their probabilities add up to 0.95, at most 10. The most influential features are explained
# first; those beyond `max_features` stay as sources, so rows still add up.
#
# Transcoders may read the stream or the norm, have skip connections, or write to all later layers. A layer without one has errors
# alone. The model is plain or attached: `attribution_graph(attached, ...)`. Inside `with splice(model, transcoders, error=None):` the
# graph is that of the model with transcoders in place of its MLPs, and both scores are 1.
#
# ## What acts on a node

# %%
graph = attribution_graph(model, text, transcoders, targets=[("1", "4")])
difference = graph.logits[0].id
pruned = graph.pruned(
    node=0.8, edge=0.98
)  # what carries 0.8 of the influence, and 0.98 of the edges' scores
print(pruned)
for name, effect in pruned.inputs(difference)[:5]:
    node = pruned[name]
    print(f"{effect:+.3f}  {name:10} {node.kind:8} {node.label or ' '.join(node.raises)!r}")

# %% [markdown]
# A feature is named `layer_feature_position`, an error `layer_-1_position`, a token `E_token_position`. `raises` are the tokens whose
# logits a feature's decoder raises most. `graph.effect(source, target)` is one number, before any pruning.
#
# Attention is frozen, but not hidden: `heads` cuts one head after another out of the paths between two nodes. The first "1" is at
# position 13, and the heads of layer 3 carry most of what it adds to the answer.

# %%
token = next(node.id for node in pruned.nodes if node.kind == "token" and node.pos == 13)
print(graph.effect(token, difference))
print(graph.heads(token, difference).top(4))

# %% [markdown]
# ## Why a head looks there
#
# A score of attention, before a cap and the mask, is a query times a key. With norms held, both are sums of what acts on them, so the
# score is a sum over pairs of sources (Anthropic's "QK attributions", 2025). Take head 3 of layer 3, which looks from the last
# character back at the "1" of the first copy, and ask why there rather than at the first character.

# %%
pairs = graph.attention((3, 3), query=-1, key=13, against=0)
print(pairs.about)
print(pairs.top(6))

# %% [markdown]
# The pairs add up to the score, 15.8, but their sizes add up to 223: most of them cancel. So the table keeps the sources of the `k`
# largest pairs and adds up all others as `rest`. Summed over the query's sources, it says what each source does on the key's side. The
# head needs to know which character is before the key, and of all tokens it is that one, the "8" at position 12, which does most there:

# %%
on_key = graph.attention((3, 3), query=-1, key=13, against=0, k=20_000).sum("query_source")
key_tokens = on_key.select(key_source="E_*").top(3)
print(key_tokens)

# %% [markdown]
# `against="mean"` compares with all keys, as the pattern weighs them.
#
# `through="writers"` shows heads and MLPs as sources in place of features and tokens. It needs no dictionary, and `why_attends` does it
# for any run of any model that has a graph:

# %%
from interp import run_with_cache, why_attends

_, cache = run_with_cache(model, text, lazy=True)
print(why_attends(model, cache, (3, 3), query=-1, key=13, against=0).top(4))

# %% [markdown]
# In SmolLM2, on repeated random tokens, the keys of the strongest induction heads are made by a head that looks at the previous token: of a
# score of 15.8 above another key's, head 0 of layer 16 gives 8.5, and its score as a previous-token head is 0.92.
#
# ## Attention that moves
#
# So far patterns are held. `attention=True` adds an estimate to first order of what each source does by moving them: a change of a
# score is worth `P (A - mean)` to a target, where A is what the value at that key adds to it, and a score moves with its query and its key.
# These effects stand apart, in `by_attention`; rows, influence and pruning are as before. Each of their rows adds up to the
# gradient of scores times scores, for queries and for keys, which is checked (`attention_gap`).

# %%
more = {"attention": True, "max_features": 1000}  # of which the inputs are traced; 4,096 by default
moving = attribution_graph(model, text, transcoders, targets=[("1", "4")], **more)
print(moving.attention_gap < 1e-4)
feature = next(node.id for node in moving.nodes if node.layer == 0 and node.pos == 13)
print(moving.effect(feature, difference), moving.effect(feature, difference, by_attention=True))
for cell in moving.cells(k=3):  # the scores through which most is decided
    print(cell.layer, cell.head, cell.query, cell.key, round(cell.weight, 3))

# %% [markdown]
# On the page these cells are triangles: a click shows where the head looks, and the pairs that make its score. Files have none, as
# other pages expect links that add up.
#
# ## The page, and files
#
# In a notebook `graph` shows itself: layers upward, tokens across. A click on a node draws its links and lists them; nodes can be
# pinned, and pinned ones put in groups. `pictures.attribution(pruned, cards)` shows dashboards of `feature_cards` beside the nodes.

# %%
from interp import pictures
from interp.tracing import PrunedGraph

pruned.pins = [difference, token]
view = pictures.attribution(pruned)  # view.save("graph.html")
print(pruned.subgraph_scores())  # of the pinned nodes alone: what they replace and complete
# pruned.to_neuronpedia("out", slug="digit", scan="pydoc-4l") writes out/digit.json and out/graph-metadata.json, which open in
# circuit-tracer's page and fit Neuronpedia's schema. PrunedGraph.from_neuronpedia("out/digit.json") reads it, what circuit-tracer's page
# saves (pins, groups, edited labels), and the files of Neuronpedia's server and of Anthropic.

# %% [markdown]
# `hookscope trace --prompt "..." --out graphs` writes the page and the file; with `--attention` the page has the triangles too.
#
# ## Is it true?
#
# The graph is exact about the frozen run. The model is not frozen: a changed feature also moves patterns and norms. `intervene` sets
# features to values, and puts side by side what the graph predicts and what the model does, also with patterns held.

# %%
feature = next(
    name
    for name, _ in pruned.inputs(difference)
    if name.startswith("3_") and pruned[name].kind == "feature"
)
result = moving.intervene({feature: 0.0})
print(result.predicted[0], result.by_attention[0], result.true[0], result.patterns_held[0])

# %% [markdown]
# `direct` holds all other features; `predicted` lets the change pass through them with their gates as they were, and `by_attention` is
# the part of it that moving attention has. `true` is the model, `patterns_held` the model with patterns as they were, and `scales_held`
# with patterns and the scales of norms as they were.
#
# `python examples/attribution_graph.py --texts 10` sets the 60 most influential features of this text to 0, one at a time, and does the
# same in ten texts with other parts. The correlations over the features of a layer, with the median of the ten texts in brackets:
#
# | layer | through values, with the true change | through values and attention | attention's part, with its true part | true with patterns held, with true | true with scales held too, with patterns held | through values, with that |
# | --- | --- | --- | --- | --- | --- | --- |
# | 0 | -0.07 (0.31) | 0.67 (0.73) | 0.84 (0.77) | 0.76 (0.77) | 0.71 (0.69) | 0.51 (0.87) |
# | 1 | 0.83 (0.44) | 0.74 (0.62) | 0.10 (0.76) | 0.96 (0.80) | 0.86 (0.78) | 0.83 (0.95) |
# | 2 | -0.01 (0.30) | 0.09 (0.54) | 0.46 (0.68) | 0.96 (0.93) | -0.51 (0.72) | 0.58 (0.95) |
# | 3 | 0.95 (0.94) | 0.95 (0.94) | none | 1 (1) | 0.95 (0.94) | 1 (1) |
# | all | 0.11 (0.40) | 0.67 (0.71) | 0.84 (0.74) | 0.79 (0.77) | 0.67 (0.70) | 0.67 (0.90) |
#
# The last three columns say what is lost where: by patterns that are held, by scales that are held, and by gates and errors that are
# held. Of layer 0, patterns and scales take most, and the estimate of attention's part brings back its half. Of layer 2 of this text the
# scales take all: with patterns held but norms and MLPs live the model does nearly what it does (0.96). To set a feature to 0 is a large
# step, and the estimate is of first order: it may also make a layer worse, as layer 1 here. Look before you believe a path.
#
# ## How it was checked
#
# - Effects, influence, pruning and both scores are those of circuit-tracer 0.5 to 1e-9, where both define them, on a random model
#   with skip transcoders (`tests/tracing/make_graph.py`). circuit-tracer leaves out biases, positions, and errors of the first token
#   (`first=1` does so with the features of that token).
# - Every kind of source is compared with a run in which patterns, scales and MLPs are replaced by hooks, for norms in all places
#   but `post`, rotary and grouped heads, windows, caps, parallel blocks and cross-layer transcoders. A gap above 0.05 is an error.
# - Rows add up to 1e-5 in 25 attached architectures of `transformers`; pairs of sources add up to the scores of these.
# - Effects by attention are the derivatives of a run in which norms (also of queries and keys) and MLPs are held, by autograd, to
#   1e-8, for the same forms. Pairs of a text of RMSNorm, grouped heads, norms of queries and rotation are those written out in numpy.
# - GPT-2-small shape, 64 tokens, 12 transcoders of 4,096 features, 10 logits and 500 features, on two CPU cores: 4.1 seconds and
#   0.43 GiB beyond the weights. circuit-tracer 0.5 takes 24 seconds and 0.93 GiB in batches of 16, its best of four sizes tried, and
#   145 seconds and 7.7 GiB in its own of 512 (`python tests/bench/tracing.py --batch 16`). With `attention=True` ours takes 3.5 times as long.
