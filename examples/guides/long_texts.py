# %% [markdown]
# # Long texts and real sizes
#
# Scores and patterns grow with the square of a text's length, all else with the length. On SmolLM2-135M (30 layers of 9 heads) all
# values of 4,000 tokens are 39 GB, of which 35 are scores and patterns; the lazy cache of the same run is 0.3 GB.

# %%
from hooks import HookedRunner, MemoryLimitError
from interp import head_scores, logit_lens, pictures, svd_targets
from models import KVCache, load

model = load("pydoc-4l")
text = "Return the position of the first byte, or raise an error. " * 4
runner = HookedRunner(model)

# %% [markdown]
# ## What it would cost
#
# `plan` says it before anything runs. A run that would keep more than 0.9 of the memory that is free, in the control group too, ends
# with an error once a layer shows it: it says the bytes, and a selection that would fit. `max_bytes=` is a bound of your own. Attention whose scores do not fit is refused before they are made.

# %%
print(runner.plan(text, mode="full").nbytes)
try:
    runner.run_with_cache(text, mode="full", max_bytes=5_000_000)
except MemoryLimitError as error:
    print(error)

# %% [markdown]
# ## Read, and keep nothing
#
# A lazy cache keeps what enters each block. `cache["pattern", 3]` computes that value and keeps it until `cache.drop()`; `cache.read` and
# `cache.layers` keep nothing. Readings of `interp` and pictures go over layers one at a time, so they need at
# most one and a half times what all values of one layer take, and a lens some 0.3 GiB besides; `cache.save` writes one block's values at a time. `cache.at(...)` stays lazy.

# %%
_, cache = runner.run_with_cache(text, lazy=True)
entropy = [
    pattern.clamp(min=1e-9).log().mul(-pattern).sum(-1).mean()
    for pattern in cache.layers("pattern")
]
print(head_scores(model, cache, "induction").top(1))
last = cache.at(pos=slice(-10, None))
print(logit_lens(model, last).entropy.shape)  # [layer, batch, pos]: of ten positions only
targets = svd_targets(model, cache, layers=[2])
picture = pictures.patterns(model, cache, queries=slice(-40, None), heads=[(0, 3), (2, 1)])

# %% [markdown]
# ## Bars
#
# Analyses, `harvest` and `load` show a progress bar on a terminal and in a notebook. It appears
# after two seconds, even during one long step, and goes away at the end or at an error. If one
# analysis calls another, only the outer one counts. Files, pipes and logs get nothing.
# `progress=False` switches off the bar of one call, and the environment variable `TQDM_DISABLE=1`
# switches off all bars. No number depends on it.
#
#
# ## One layer of 8,000 tokens on a laptop
#
# Read what has no pair of positions as it is: `names="blocks.3.mlp.post"`, or a few of them, take 50 MB each. Of patterns one layer
# of SmolLM2 is 2.3 GB, and three times that while it is made. Of a few queries it is little: give the text but for its end to a
# `kv_cache`, with fused attention, and read the end. Its queries see all keys.

# %%
tokens, past = model.to_tokens(text).tokens, KVCache()
model(tokens[:, :-16], kv_cache=past)
_, end = runner.run_with_cache(tokens[:, -16:], kv_cache=past, names="blocks.3.attn.pattern")
print(end["pattern", 3].shape)  # [batch, head, query, key]: 16 queries, all keys

# %% [markdown]
# What grows how, on 4 and 16 layers at 128, 512 and 2,048 tokens, is in the table of [speed](speed.py); `python
# tests/bench/growth.py` measures it. Whole corpora go to [stores](stores.py).
