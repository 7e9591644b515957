# %% [markdown]
# # Recipes
#
# "I want to ...": one line each. Every line runs, here with the bundled model and these names.

# %%
import tempfile
from pathlib import Path

from hooks import HookedRunner
from models import generate_text, load

model = load("pydoc-4l")
runner = HookedRunner(model)
folder = Path(tempfile.mkdtemp())
text, other = (f"part ZQXJ-KV8{digit} is sold out; ask for ZQXJ-KV8" for digit in "14")

# %% [markdown]
# ## Look

# %%
model.to_pieces(text)  # see how a text is split into tokens
model.to_pieces(model(text)[0, -1].topk(5).indices)  # see the likeliest next tokens
print(runner.table())  # list every value that has a name
logits, cache = runner.run_with_cache(text)  # keep all values of a run
cache["pattern", 2]  # read a head's attention: [batch, head, query, key]
cache["resid_post", -1]  # read the stream after the last block
_, lazy = runner.run_with_cache(text, lazy=True)  # keep little, compute the rest when it is read
runner.capture(text, names="blocks.1.resid_post")  # stop as soon as one value is known
runner.capture(text, names="*.attn.z", positions=slice(-3, None))  # keep the last positions alone
runner.run_with_cache([text, "a short one"], mode="residual")  # run unequal texts together
runner.plan(text, mode="full")  # know what a cache would take, without running
cache.save(folder / "cache.safetensors")  # keep a cache on disk

# %% [markdown]
# ## Change

# %%
from interp import edits

head_3 = {"blocks.*.attn.z": edits.zero(head=3)}
runner.run_with_hooks(text, hooks=head_3)  # switch a head off in every layer
half = {"blocks.2.mlp_out": edits.scale(0.5, pos=-1)}  # halve what an MLP adds at the last position
mean = {"blocks.1.attn.z": edits.mean(cache, over="pos", head=0)}  # put its mean in place of a head
cut = {"blocks.1.attn.scores": edits.knockout(query=-1, key=3)}  # cut attention between positions
own = {"blocks.0.resid_post": lambda value, point: value * 1.1}  # change a value by a function
for change in (half, mean, cut, own):
    runner.run_with_hooks(text, hooks=change)
handle = runner.add(head_3)  # keep an edit over the cells of a notebook
handle.remove()  # take it away
with runner.hooks(head_3):
    generate_text(model, "def f(", max_new_tokens=8)  # generate under an edit

# %% [markdown]
# ## Find what matters

# %%
from interp import (
    Pairs,
    activation_patching,
    attribution_patching,
    compare,
    direct_logit_attribution,
    head_scores,
    integrated_gradients,
    logit_lens,
    max_activating,
    measure,
    sweep,
)

pairs = Pairs(text, other, ("1", "4"))  # two texts, with the right answer and the wrong one
measure(pairs.read_by(model).metric, model(text))  # measure a run: here a difference of logits
activation_patching(model, pairs, site="z").top(3)  # find the heads that carry the answer
activation_patching(model, pairs).plot()  # see where the answer is, by layer and position
activation_patching(model, pairs, "mlp_out", edit=edits.zero())  # see what is lost without an MLP
attribution_patching(model, pairs, site="z").top(3)  # estimate the same from one backward pass
exact, estimate = (f(model, pairs, site="z") for f in (activation_patching, attribution_patching))
compare(exact, estimate)  # see how far to trust the estimate
integrated_gradients(model, pairs, site="embed", steps=8)  # attribute the answer to the input
each = [{"blocks.0.attn.z": edits.zero(head=n)} for n in range(4)]
sweep(model, pairs, each).top(2)  # try edits of your own, many at once
direct_logit_attribution(model, cache, right="1", pos=-1).top(3)  # write a logit as a sum of parts
logit_lens(model, cache)  # see what each layer would predict
head_scores(model, cache, "induction").top(3)  # find induction heads
max_activating(model, [text], "blocks.2.mlp.post", neuron=5)  # find what a neuron responds to

# %% [markdown]
# ## Directions and variables

# %%
from interp import log_prob
from interp.alignment import align
from interp.directions import difference_of_means, erasure, steering_curve

yes, no = ["part KV8", "a part QX3-"], ["def f(", "return x"]
v = difference_of_means(model, yes, no)  # find what tells two kinds of texts apart
steer = {"blocks.2.resid_post": edits.add(v, scale=0.5)}  # steer along it
runner.run_with_hooks(text, hooks=steer)
steering_curve(model, v.at(2), no, [0.5, 1.0], log_prob("8"))  # see what each strength does
test = Pairs("part BTKW-MD52 is sold out; ask for BTKW-MD5", text, ("2", "1"))
align(model, pairs, "resid_pre", k=4, test=test, layers=2, pos=13)  # find where a variable stands
gone = {"blocks.2.resid_post": erasure(model, yes, no).edit(pos=-1)}  # erase it
runner.run_with_hooks(text, hooks=gone)

# %% [markdown]
# ## Circuits, features and weights

# %%
from interp import (
    acdc,
    attribution_graph,
    circuits,
    edge_attribution,
    evaluate_sae,
    faithfulness,
    graph,
    load_sae,
    ov_circuit,
    pictures,
    singular_tokens,
    splice,
)

words = ("part QJ-VW61 is gone; ask for QJ-VW6", "part QJ-VW63 is gone; ask for QJ-VW6")
fresh = Pairs(*words, ("1", "3"))  # a circuit is measured on texts that it was not found on
scores = edge_attribution(model, pairs)  # score every edge between heads and MLPs
circuit = circuits.greedy(graph.Graph(model), scores, 40)  # keep the edges that matter
acdc(model, pairs, 0.3)[0.3]  # or leave out edges one by one
faithfulness(model, fresh, circuit)  # see how much of the behaviour they explain
singular_tokens(model, layer=3, head=0, k=2)  # read a head's weights in tokens
ov_circuit(model)[3, 0].svd().s[:3]  # see what a head's weights amplify
with splice(model, load_sae("pydoc-4l/resid_post")) as spliced:
    spliced.capture(text, names="*.features")  # read the features of a dictionary
evaluate_sae(model, load_sae("pydoc-4l/resid_post"), [text, other])  # measure a dictionary
traced = attribution_graph(
    model, text, load_sae("pydoc-4l/transcoders")
)  # trace a token to features
traced.pruned().inputs(traced.logits[0].id)[:5]  # see what makes it
traced.intervene({"3_1002_43": 0.0})  # compare what the graph predicts with what the model does
pictures.patterns(model, cache).save(folder / "attention.html")  # look at attention in a browser

# %% [markdown]
# ## Corpora

# %%
from interp import tuned_lens
from interp.store import harvest, plan, statistics

corpus, streams = [text, other, *no], ["*.resid_pre", "blocks.3.resid_post"]  # or "corpus.jsonl"
plan(model, corpus, streams, folder)  # know what values of all tokens would take on disk
store = harvest(model, corpus, streams, folder / "store")  # write them; killed, it goes on
[len(x) for (x,) in store.batches(64, names=["blocks.3.resid_post"])]  # train on them
store.rows(text=1, offset=0)["tokens"]  # look one up
found = store.statistics()  # means, quantiles, densities and largest values of each
runner.run_with_hooks(text, hooks={"blocks.1.resid_pre": edits.mean(found)})  # ablate to a mean
tuned_lens(model, store, steps=5)  # fit a lens without running the model
statistics(model, corpus, "*.mlp.post")  # sum up without a disk
