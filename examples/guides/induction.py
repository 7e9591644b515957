# %% [markdown]
# # Induction heads, from behaviour to a verified circuit
#
# A study from start to end: what the model does, which heads do it, through which edges, and how much of the behaviour a small
# circuit keeps on texts that it was not found on. It takes twenty seconds.
#
# ## The behaviour
#
# The model names a part again, up to its last digit. In the corrupted text another part is named first, so nothing is there to
# be copied. Pairs that the model does not solve are left out.

# %%
import random

from interp import Pairs, measure
from models import load

model, draw = load("pydoc-4l"), random.Random(0)
clean, corrupted, answers = [], [], []
for _ in range(24):
    letters = "".join(draw.sample("BCDFGHJKLMNPQRSTVWXZ", 12))
    part, other = (f"{x[:4]}-{x[4:]}{draw.randrange(10)}" for x in (letters[:6], letters[6:]))
    right, wrong = draw.sample("0123456789", 2)
    clean.append(f"The part {part}{right} is sold out; please ask for {part}")
    corrupted.append(f"The part {other}{wrong} is sold out; please ask for {part}")
    answers.append((right, wrong))
pairs = Pairs(clean, corrupted, answers).solved(model)
search, fresh = pairs.split(seed=0)  # a circuit is found on some, and measured on the others
print(pairs, len(search), len(fresh))
# The logit of the right digit less that of the wrong one, after either text:
for texts in pairs.read_by(model).texts("noising"):
    print(measure(pairs.metric, model(texts.tokens)).mean())

# %% [markdown]
# ## The heads
#
# Heads that attend to what followed an earlier copy of the current character are induction heads; they need heads that attend to the
# character before.

# %%
from hooks import HookedRunner
from interp import activation_patching, head_scores

_, cache = HookedRunner(model).run_with_cache(clean, lazy=True)
induction, previous = (head_scores(model, cache, kind) for kind in ("induction", "previous_token"))
print(induction.top(4))
print(previous.top(2))

# %% [markdown]
# Attention is no proof. Put each head's output in the corrupted run into the clean one, and see how much of the answer is lost.

# %%
patched = activation_patching(model, search, site="z", direction="noising").normalized()
print(patched.top(5))

# %% [markdown]
# The answer needs head 3 of the first layer, which looks one character back, and heads of the last layer that look at what followed
# an earlier copy: the two steps of an induction circuit.
#
# ## The edges
#
# Each edge, from a head or an MLP to a later reader, is patched. Gradients would estimate all of them at once; `compare` says what that
# would have missed: what the last heads look for, `m0->a3.h0<k>`.

# %%
from interp import circuits, compare, edge_attribution, edge_patching, faithfulness
from interp.graph import Graph

graph = Graph(model)
scores = edge_patching(model, search)
print(scores.top(6))
print(compare(scores, edge_attribution(model, search)))

# %% [markdown]
# ## The circuit, verified
#
# Keep the edges with the largest scores, and put values of the corrupted text in place of all others. Faithfulness 1 is the whole
# model, 0 the model on the corrupted text; beside it stand as many random edges.

# %%
for n in (20, 40, 80):
    circuit = circuits.greedy(graph, scores, n, signed=True)
    print(f"{circuit}\n{faithfulness(model, fresh, circuit)}")

# %% [markdown]
# Of forty edges taken, 37 are connected. They keep nine tenths of the behaviour, eighty all of it, and as many random ones
# nothing. Which of its nodes does a circuit need most?

# %%
from interp import minimality, pictures

print(minimality(model, fresh, circuit).top(5))  # what the circuit loses without one of its nodes
view = pictures.circuit(circuit)  # a notebook draws it; .save("circuit.html") writes a page
