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
# `hookscope trace --prompt "..." --out graphs` writes the page and the file.
#
# ## Is it true?
#
# The graph is exact about the frozen run. The model is not frozen: a changed feature also moves patterns and norms. `intervene` sets
# features to values, and puts side by side what the graph predicts and what the model does.

# %%
feature = next(
    name
    for name, _ in pruned.inputs(difference)
    if name.startswith("3_") and pruned[name].kind == "feature"
)
result = graph.intervene({feature: 0.0})
print(result.predicted[0], result.true[0])

# %% [markdown]
# `direct` holds all other features, `predicted` lets the change pass through them with their gates as they were, and `true` is the
# model. `python examples/attribution_graph.py` does this for the 60 most influential features of this text, one at a time. The
# correlation of predicted and true changes of the answer is 0.95 over those of layer 3, 0.83 over those of layer 1, and 0 over those
# of layers 0 and 2. That is no failure of the sums: this model copies by attention, so features below the last block also decide
# where heads look, and that is what the graph holds. Look at it before you believe a path.
#
# ## How it was checked
#
# - Effects, influence, pruning and both scores are those of circuit-tracer 0.5 to 1e-9, where both define them, on a random model
#   with skip transcoders (`tests/tracing/make_graph.py`). circuit-tracer leaves out biases, positions, and errors of the first token
#   (`first=1` does so with the features of that token).
# - Every kind of source is compared with a run in which patterns, scales and MLPs are replaced by hooks, for norms in all places
#   but `post`, rotary and grouped heads, windows, caps, parallel blocks and cross-layer transcoders. A gap above 0.05 is an error.
# - Rows add up to 1e-5 in 25 attached architectures of `transformers`.
# - GPT-2-small shape, 64 tokens, 12 transcoders of 4,096 features, 10 logits and 500 features, on two CPU cores: 4.1 seconds and
#   0.43 GiB beyond the weights. circuit-tracer 0.5 takes 24 seconds and 0.93 GiB in batches of 16, its best of four sizes tried, and
#   145 seconds and 7.7 GiB in its own of 512 (`python tests/bench/tracing.py --batch 16`).
