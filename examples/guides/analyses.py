# %% [markdown]
# # Analyses: what a value does
#
# Patching, sweeps, attribution and edits, on a text whose answer the bundled model copies.

# %%
import torch

from hooks import HookedRunner
from interp import edits
from models import load

model = load("pydoc-4l")
runner = HookedRunner(model)

from interp import (
    Pairs,
    activation_patching,
    attribution_patching,
    compare,
    head_scores,
    log_prob,
    logit_lens,
    sweep,
)

text, other = (f"part ZQXJ-KV8{digit} is sold out; ask for ZQXJ-KV8" for digit in "14")
_, cache = runner.run_with_cache(text, lazy=True)
lens = logit_lens(model, cache)  # the five likeliest next tokens at each layer and position
print(lens)
print(head_scores(model, cache).top(1))  # which head attends most to the token before?

# what does each head's output bring back of the answer, when it is put into a run on the other text?
pairs = Pairs(text, other, ("1", "4"))  # with the right answer and the wrong one
patched = activation_patching(model, pairs, site="z")
# shares of the difference between the runs; with four pairs or more also intervals
print(patched.normalized().top(3))

# an estimate of the same from two forward passes and one backward pass, and how far to trust it
estimated = attribution_patching(model, pairs, site="z")
print(compare(patched, estimated))

# the effect of any edits, each as if it had a run of its own
deletions = [{f"blocks.{layer}.mlp_out": edits.zero(pos=-1)} for layer in range(4)]
deleted = sweep(model, text, deletions, log_prob("1"))
print(deleted.mean())  # [edit], in nats

# %% [markdown]
# Analyses that read take `(model, cache)` and run nothing, so one lazy run feeds them all. Those that intervene take `Pairs`, and run
# the model themselves; a sweep takes texts, edits and a metric. `Pairs` hold texts, masks, other arguments of the run, answers,
# metric and spans.
#
# `metric=` of `Pairs` says what is measured in place of the logit difference of the answers: `log_prob("1")`, `kl_divergence(...)`, or any
# function from logits [batch, pos, vocab] to a number for each example. With an attribute `last` (how many of the last positions it reads)
# fewer logits are computed, and `unit` is printed.


# %%
def margin(logits):
    """By how much the likeliest token leads, in logits."""
    first, second = logits[:, -1].topk(2).values.unbind(1)
    return first - second


margin.last, margin.unit = 1, "logits"
led = activation_patching(model, Pairs(text, other, metric=margin), site="mlp_out")
print(led.top(2))

# %% [markdown]
# **Which run is edited.** Denoising puts values of the clean run into the corrupted one, and shows what suffices to bring the answer back.
# Noising puts values of the corrupted run into the clean one, and shows what the answer cannot do without. Where two parts do the same
# thing, each suffices and neither is needed, so the two disagree; and of two parts that need each other it is the other way round. Each
# analysis begins with what its authors used: patching and attribution of values denoise; paths, edges and circuits noise, as a circuit
# is what stays when everything else is corrupted. `direction=` is there in all of them, and each `Result` says it in `about`.

# %%
noised = activation_patching(model, pairs, site="z", direction="noising")
print(patched.normalized().top(2), noised.normalized().top(2), sep="\n")

# %% [markdown]
# All analyses return a `Result`: effects by named axes, for every example.
#
# - `mean()`, `interval()`, `normalized()`, `top(k)`, `plot()`, `to_dataframe()` and `save(path)` do what they say.
# - `a - b` subtracts two of them. `by("head")` puts components under [layer, head]. `plot(facet="pos")` draws a map for each position.
# - Positions are labelled with the text's words: `select(pos=" Mary")` finds one. `select(component="a3.*")` takes a pattern.
# - Intervals are Student's, of ratios Fieller's, widened towards the long tail of skewed examples. Simulated, 88 to 97 % of the 95 %
#   intervals hold the mean, from 3 to 20 normal or log-normal examples (`tests/interp/results/test_result.py`). Below three examples there are none,
#   and of ratios none below four. Examples of one text count once (`Result.groups`).
#   Accuracies, shares of attention and AUROCs have score intervals (Wilson's, Newcombe's), inside 0 to 1.
#
# | edit | what it does |
# | --- | --- |
# | `edits.zero(head=3, pos=slice(4, None))` | sets to zero what the axis names select: integers, slices, lists, masks, `edits.all_but(7, 9)`, or columns of each example's own |
# | `edits.mean(cache)`, `edits.resample(cache, seed=0)` | the mean of reference runs at each position; another row's value |
# | `edits.replace(cache, pos=5, source_pos=2)` | values of another run; from another layer, position or model |
# | `edits.add(vector)`, `edits.scale(0.5)`, `edits.noise(3.0, seed=0)` | steering, damping, the noise of causal tracing |
# | `edits.project_out(directions)`, `edits.interchange(cache, subspace)` | without a direction; a subspace of another run |
# | `edits.knockout(query=-1, key=[2, 3])` | no attention from these queries to these keys |
#
# **Texts.** `Pairs` of strings are read by the model's tokenizer when an analysis runs, or by `pairs.read_by(model)`. Answers are
# tokens of the text: after `"... gave it to"`, `"Mary"` is `" Mary"` where the text has that word, and an error where it may be
# either. `spans={"subject": ("Anne", "Mark")}` are the tokens that these parts touch, in the clean and the corrupted text. Texts
# of unequal length need spans.
#
# **Edits.** An edit is a hook function. It works in `run_with_hooks`, cached and lazy runs, generation and sweeps. Several at one point
# act in order. `with runner.hooks(changes, receipts=True) as context` counts what each one changed: `context.receipts`.
#
# **Positions.** `pos=-1` is the last real token of each text in edits, metrics, spans and readings, whatever the padding. From 0 on
# positions count columns, and a column of padding is an error. Readings are NaN at padding. Every function gives for a padded batch
# what it gives for each text alone (`tests/test_padding.py`). An edit writes nothing at padded keys. `edits.replace(cache, pos=-1)`
# takes the last real token of each text of the source, and `edits.mean(cache, pos=-1)` the mean over last tokens; other values of
# padding are an error. A function of your own sees the whole value: `hooks.token_mask()` says what is padding. A metric that you call yourself takes the mask too. Boolean masks
# are masks and integers are columns. Numbers 0 and 1 that look like a mask of the text are refused.
#
# **Patching.** `activation_patching` covers any point by name, in each layer (`resid_pre`, `z`, `q`, `scores`, `mlp.pre`,
# `ln1.normalized` …) or alone (`embed`). Its places are layers, positions, named spans, heads, groups of neurons, queries and keys.
# It denoises or noises, and with `edit=` it ablates place by place. It is a sweep: the stream, keys and values of the unedited run
# are kept, and each edited run begins at the first block and position that it changes. Runs are rows of the same forward
# passes, within `max_bytes`. Models that cannot be resumed share whole passes.
#
# `path_patching` is that of Wang et al. 2022, with MLPs recomputed or frozen; `edge_patching` patches what one reader sees of one
# writer.
#
# `attribution_patching` estimates activation patching from gradients, with the two corrections of AtP\* on request.
# `integrated_gradients` follows the path between the runs until the effects add up, and says by how much they do not.
# `top_attributions` finds the largest neurons and directions. `patch_top_k` patches the largest estimates exactly, and a
# random sample of all others, which bounds what the estimate missed. On the bundled model, `python examples/attribution.py`
# compares estimate and truth.
#
# `python examples/ioi.py` runs the published sequence on indirect objects (Wang et al. 2022) on any model given by name, with
# figures where `--out` says; on the bundled model it asks what copies a part number.
