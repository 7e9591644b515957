# %% [markdown]
# # Mixtures of experts
#
# In a mixture, a router sends each token to a few of many MLPs. `attach` gives the parts of it names, in any mixture of
# `transformers` whose experts are called with vectors, numbers and weights, as nearly all are:
#
# | point of a block | axes | |
# | --- | --- | --- |
# | `mlp.router` | batch pos expert | the router's logits; an edit of them chooses others |
# | `mlp.routing` | batch pos expert | the weight of each expert, 0 where it was not chosen |
# | `mlp.chosen` | batch pos choice | the numbers of the chosen experts, to read |
# | `mlp.experts` | batch pos choice d_model | what each of them gives, before its weight |
# | `mlp.shared` | batch pos d_model | what an expert that all tokens go to adds, where there is one |
#
# What the MLP adds is the sum of `experts`, each times its weight, and `shared`. Hidden layers of experts have no points.
# `attached.left_out` says which points a model is without, and why. Nothing is normalised again after an edit of weights. One
# that gives a weight to an expert that was not chosen makes it run too.
#
# ## A small mixture
#
# Published mixtures are large. This one learns sums and repeated words in a few seconds, one expert of four for each token.

# %%
import random

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from models import attach, load

draw, tokenizer = random.Random(0), load("pydoc-4l").tokenizer


def line():
    """Return a sum, or a word twice."""
    if draw.random() < 0.5:
        a, b = draw.randrange(10), draw.randrange(10)
        return f"{a}+{b}={(a + b) % 10};"
    word = draw.choice(["cat", "dog", "bird", "fish"])
    return f"{word},{word};"


torch.manual_seed(0)
sizes = dict(vocab_size=103, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
heads = dict(num_attention_heads=4, num_key_value_heads=4)
experts = dict(num_local_experts=4, num_experts_per_tok=1, router_aux_loss_coef=0.02)
config = MixtralConfig(**sizes, **heads, **experts, output_router_logits=True)
model = MixtralForCausalLM(config)
attached = attach(model, tokenizer=tokenizer)
text = attached.to_tokens("".join(line() for _ in range(20_000))).tokens[0]
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for _ in range(150):
    starts = torch.randint(len(text) - 48, (32,)).tolist()
    batch = torch.stack([text[start : start + 48] for start in starts])
    loss = model(input_ids=batch, labels=batch).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
print(attached)

# %% [markdown]
# ## Which expert reads what
#
# `expert_load` says which share of tokens goes to each expert; `over="pos"` says it for each position, and a notebook shows it as a
# map of layers, experts and words.

# %%
from hooks import HookedRunner
from interp import expert_load

sums, words = "3+4=7;8+1=9;2+2=4;5+0=5;", "cat,cat;dog,dog;fish,fish;"
runner = HookedRunner(model)
loads = {}
for name, shown in {"sums": sums, "words": words}.items():
    _, cache = runner.run_with_cache(shown, names="*.routing")
    loads[name] = expert_load(model, cache)
    print(name, loads[name].select(layer=1).mean())
expert_load(model, cache, over="pos")

# %% [markdown]
# ## Cut one
#
# The expert of the last layer that sums go to much more than words do. Without it the loss of sums rises, and that of words
# does not.

# %%
from interp import edits, measure
from interp.metrics import cross_entropy

difference = loads["sums"].values[1, :, 0] - loads["words"].values[1, :, 0]
of_sums = int(difference.argmax())
cut = {"blocks.1.mlp.routing": edits.zero(expert=of_sums)}
losses = {}
for name, shown in {"sums": sums, "words": words}.items():
    tokens = attached.to_tokens(shown).tokens
    with torch.no_grad():
        plain = model(input_ids=tokens).logits
        without = runner.run_with_hooks(tokens, hooks=cut).logits
    metric = cross_entropy(tokens)
    losses[name] = [measure(metric, logits).item() for logits in (plain, without)]
    print(name, losses[name])

# %% [markdown]
# ## Patch one
#
# After a sum or after a word: which expert's weights, taken from the text with the sum, bring its answer back? And, in one run, what
# each expert adds to the logit of the answer.

# %%
from interp import Pairs, activation_patching, direct_logit_attribution

pairs = Pairs("2+2=4;3+4=", "2+2=4;dog,", ("7", "d"))
patched = activation_patching(model, pairs, site="routing")
print(patched.top(3))
_, cache = runner.run_with_cache("2+2=4;3+4=", lazy=True)
parts = direct_logit_attribution(model, cache, right="7", pos=-1, experts=True)
print(parts.by("expert").top(3))

# %% [markdown]
# `attribution_patching(model, pairs, site="routing")` estimates the same for all experts from one backward pass. All experts run there,
# as the slope of one that was not chosen needs what it would give. A `Graph` takes a mixture as one MLP.
