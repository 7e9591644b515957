# %% [markdown]
# # A tour
#
# Ten minutes with a small model, from a text to a circuit. `pydoc-4l` reads characters; it has four layers of four heads, learned
# Python's documentation, and copies what it has seen before. It comes with the package.

# %%
from hooks import HookedRunner
from models import load

model = load("pydoc-4l")
text = "part ZQXJ-KV81 is sold out; ask for ZQXJ-KV8"
logits = model(text)  # [batch, position, vocabulary]
print(model.to_pieces(logits[0, -1].topk(3).indices))

# %% [markdown]
# The likeliest next character is `1`: the model copies the digit that followed `KV8` before. How?
#
# ## Keep values of a run
#
# A runner keeps what the model computes on the way. Each value has a name, such as `blocks.3.attn.pattern`.

# %%
runner = HookedRunner(model)
logits, cache = runner.run_with_cache(text)
print(cache["pattern", 3].shape)  # of layer 3: [batch, head, query, key]

# %% [markdown]
# ## Look at attention
#
# In a notebook the next line draws all sixteen heads, to click through; `.save("attention.html")` makes a page of it. Here it is
# enough to ask which character the last position looks at most, in each head of the last layer.

# %%
from interp import pictures

view = pictures.patterns(model, cache)
for head in range(4):
    key = int(cache["pattern", 3][0, head, -1].argmax())
    print(f"layer 3, head {head} looks at position {key}, {text[key]!r}, after {text[:key][-8:]!r}")

# %% [markdown]
# All four look at the `1` that followed `KV8`. That is what induction heads do, and there is a score for it.

# %%
from interp import head_scores

print(head_scores(model, cache, "induction").top(3))

# %% [markdown]
# ## Change something
#
# Looking is no proof. Switch the heads of the last layer off, one at a time, and see what is left of the answer.

# %%
from interp import Pairs, edits, measure, sweep

other = "part ZQXJ-KV84 is sold out; ask for ZQXJ-KV8"
pairs = Pairs(
    text, other, ("1", "4")
)  # two texts, with the right answer of the first and the wrong one
metric = pairs.read_by(model).metric  # the logit of "1" less that of "4"
print(measure(metric, logits))
print(sweep(model, pairs, [{"blocks.3.attn.z": edits.zero(head=head)} for head in range(4)]))

# %% [markdown]
# ## Find what carries the answer
#
# Activation patching puts one value of a run into another. The other text has a `4` where this one has a `1`; each head's output
# of the first run goes into the second, and the share of the answer that comes back is measured.

# %%
from interp import activation_patching

patched = activation_patching(model, pairs, site="z").normalized()
print(patched.top(4))
streams = activation_patching(model, pairs, site="resid_pre").normalized()
print(streams.top(4))

# %% [markdown]
# Until it enters the last layer, the stream carries the digit at the digit's own position, 13. The heads of the last layer bring it
# to the end of the text. A lens agrees: there the answer appears only in the final stream.

# %%
from interp import logit_lens

lens = logit_lens(model, cache)
print(lens)

# %% [markdown]
# ## Cut the circuit out
#
# An edge joins a head or an MLP to a later one. All 479 of this model are scored at once, and few of them do most of the work:
# faithfulness 1 would be the whole model, and 0 the model on the other text. Of the 40 edges taken, 5 lead nowhere and are pruned.
# One pair is little; a study takes many, and other ones to measure with ([a study](induction.py), [circuits](circuits.py)).

# %%
from interp import circuits, edge_attribution, faithfulness
from interp.graph import Graph

scores = edge_attribution(model, pairs)
circuit = circuits.greedy(Graph(model), scores, 40)
words = (
    "part QJWX-VW61 is sold out; ask for QJWX-VW6",
    "part QJWX-VW63 is sold out; ask for QJWX-VW6",
)
fresh = Pairs(*words, ("1", "3"))
print(circuit)
print(faithfulness(model, fresh, circuit))

# %% [markdown]
# Next: [recipes](recipes.py) has a line for each thing that you may want to do, and [models of transformers](hugging_face.py) says how
# to do all this with a model of your own.
