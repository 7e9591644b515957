# %% [markdown]
# # Circuits
#
# The edges of a model, their effects, and circuits that are found and measured.

# %%
import torch

from hooks import HookedRunner
from interp import Pairs
from models import load

model = load("pydoc-4l")
runner = HookedRunner(model)
text, other = (f"part ZQXJ-KV8{digit} is sold out; ask for ZQXJ-KV8" for digit in "14")
pairs = Pairs(text, other, ("1", "4"))

from interp import circuits, edge_attribution, faithfulness, graph

whole = graph.Graph(model)  # 479 edges: a0.h1->a2.h3<k>, m0->logits, ...
scores = edge_attribution(model, pairs)  # the effect of every edge, from one backward pass
circuit = circuits.greedy(whole, scores, n=20)
# on another text than that of the scores
text, other = (f"part BTKW-MD5{digit} is sold out; ask for BTKW-MD5" for digit in "28")
others = Pairs(text, other, ("2", "8"))
print(circuit, faithfulness(model, others, circuit).mean())  # the circuit's, and random edges'

# %% [markdown]
# - **The graph.** A `Graph` names what writes to the stream (`input`, `a0.h1`, `m0`) and what reads it (`a2.h3<q>`, `m2`, `logits`). It
#   takes them from the model's points and the form of its blocks. GPT-2 small has 32,491 edges, as the MIB benchmark counts them.
# - **Scores.** `edge_attribution` estimates the effect of all edges at once, by `eap`, `eap_ig_inputs` or `eap_ig_activations`. It
#   reports the sums that must hold. Gradients pass norms with their whole derivative. `edge_patching` patches each edge instead.
# - **Choice.** `circuits.above`, `.top` and `.greedy` choose edges by their scores. `graph.mib.read_mib` and `.write_mib` exchange circuits with
#   the MIB benchmark, as JSON or `.pt`, with scores of nodes and neurons.
# - **ACDC.** `acdc(model, pairs, thresholds)` leaves out edges one by one while the predictions stay near the model's, 479 edges in a
#   second (Conmy et al. 2023). It needs no scores and no answers.
# - **Nodes.** `node_effects` gives the total and the direct effect of each node, and their difference: what later nodes do about it.
# - **Runs.** `run_circuit` runs a circuit of any number of edges in one forward pass. It takes the edges to keep, or a mask of those to
#   replace, which may be differentiated. An edge that is replaced has the paired text's value, another run's, a mean, or zero.
# - **Measures.** `faithfulness`, `completeness`, `minimality` and `curve` (CPR and CMD) measure a circuit, with intervals, beside
#   random edges. They warn if the texts are those that the circuit was found on. `auroc` compares scores with a known circuit.
#
# A hypothesis is scrubbed (Chan et al. 2022) by runs whose other edges carry a shuffled batch:
# `run_circuit(model, Pairs(texts), circuit, source=runner.capture(shuffled, names=whole.needed))`.

# %%
from interp import acdc, node_effects

found = acdc(model, pairs, [0.1, 0.3])
print(found[0.1], found[0.3])
print(node_effects(model, pairs).select(effect="later").top(3))  # what others repair, or follow

# %% [markdown]
# [A study](induction.py) goes from a behaviour to a verified circuit of what copies a part number in the bundled model: 37 of 479
# edges keep 90% of it on other texts [73%, 108%], and as many random ones nothing.
