# %% [markdown]
# # Reading a model
#
# Lenses, sums of parts, scores of heads, and readings of weights: what one run or the weights alone say.

# %%
from hooks import HookedRunner
from interp import decompose, direct_logit_attribution, head_scores, logit_lens, ov_circuit
from models import load

model = load("pydoc-4l")
runner = HookedRunner(model)
text = "part ZQXJ-KV81 is sold out; ask for ZQXJ-KV8"
_, cache = runner.run_with_cache(text, lazy=True)  # one run feeds every reading
print(logit_lens(model, cache))
print(decompose(model, cache))  # the stream as a sum
print(direct_logit_attribution(model, cache, right="1", pos=-1).top(3))  # the logit of "1" as a sum
print(head_scores(model, cache, "induction").top(3))
print(ov_circuit(model)[3, 0].svd())  # what a head writes for what it reads, from the weights alone

# %% [markdown]
# `logit_lens(model, cache, lens=...)` reads every lens: the likeliest tokens at each layer and position, the probability and
# rank of targets, the entropy, and KL(final ‖ lens). It unembeds all layers of a few positions at a time: for 50,257 tokens,
# T=1024 and 12 layers of width 768 the process grew by 0.8 GB beyond model and cache. `tuned_lens` fits affine translators
# (Belrose et al. 2023; `TunedLens.from_params` reads published ones), `jacobian_lens` mean Jacobians within `max_bytes`; both
# are saved, and fits of shards are merged. `max_activating` streams texts and keeps the positions where a head, neuron or
# direction is largest.
#
# `decompose(model, cache)` gives the stream before any block as embeddings, heads, MLPs or neurons, and biases, and
# `direct_logit_attribution` what each adds to a logit, a difference of logits or any direction, with the final norm's scale
# as it was; `accumulated` the same of the stream up to each layer. The parts add up, and the gap is in the result.
# `apply_norm` gives what an inner layer reads of such parts, with the scale of its norm in the run.
# `head_scores` gives for each layer, head and text the attention to the token itself, to the one before, to the first, to earlier
# copies, to what followed them, to a span or to a pattern [query, key] of your own, or its entropy and distance.
# `why_attends` says why a head looks at a key: its score as a sum over pairs of parts, one on the query's side and one on the key's;
# `.sum("query_source")` adds them up to what each part does on the key's side.
#
# Readings of weights need no text: `ov_circuit`, `qk_circuit` and, from tokens to tokens, `full_circuits` stay factored
# (`FactoredMatrix`), so spectra and the largest of 50,257² entries never form them. They fold the norms' gains, and the mean that
# LayerNorm takes off, as they go. `composition_scores`, `copying_scores`, `positional_scores` and `singular_tokens` (also of an
# MLP's `W_in` and `W_out`) stand on them. `examples/studies/cyclic.py` looks for cyclic structure in tasks modulo n.
#
# `python examples/reading.py --out out` reads the bundled model: which heads do what, and what each part says about the next
# character.
#
# `python examples/reading.py --lens-steps 250 --lens-rows 50` fits lenses to it and prints, on 32 rows of 128 characters that it
# was not trained on, KL(final ‖ lens) in nats:
#
# | stream entering block | 0 | 1 | 2 | 3 |
# | --- | --- | --- | --- | --- |
# | logit lens | 9.42 | 1.41 | 0.69 | 0.29 |
# | tuned lens, 250 steps of 8 rows | 1.34 | 0.64 | 0.33 | 0.13 |
# | Jacobian lens, 50 rows of 64 characters | 3.68 | 2.16 | 1.31 | 0.41 |
#
# The tuned lens is fitted to this number. The Jacobian lens is not: its directions mean what the last layers make of them on
# average.
