# %% [markdown]
# # Features of dictionaries
#
# A sparse autoencoder writes a vector of the model as a sum of few features; a transcoder does so for what an MLP adds. Files of
# SAELens, sparsify, dictionary_learning, Gemma Scope and circuit-tracer load by their folder, and two sets of dictionaries of the
# bundled model come with the package.

# %%
import torch

from interp import Pairs, activation_patching, edits, evaluate_sae, load_sae, splice
from models import load

model = load("pydoc-4l")
autoencoder = load_sae("pydoc-4l/resid_post")  # or a folder: load_sae("downloads/layer_5")
print(autoencoder)

# %% [markdown]
# Inside `splice` the dictionary is a part of the model, and its features are a point like others: kept, edited, patched,
# attributed to, in sweeps, generation and attached models too. Until features are edited the model computes what it did before, bit
# by bit, because the error, what the features do not explain, is added.

# %%
text, other = (f"part ZQXJ-KV8{digit} is sold out; ask for ZQXJ-KV8" for digit in "14")
pairs = Pairs(text, other, ("1", "4"))
before = model(text)
with splice(model, autoencoder) as runner:
    logits, cache = runner.run_with_cache(text, names="*.features")
    assert torch.equal(logits, before)
    print((cache["features", 2] != 0).sum(-1))  # how many are active at each position
    print(activation_patching(model, pairs, site="features").normalized().top(3))
    without = {"blocks.2.resid_post.features": edits.zero(feature=[1011, 332])}
    print((runner.run_with_hooks(text, hooks=without) - before)[0, -1].abs().max())

# %% [markdown]
# `error="frozen"` adds the error as a constant, so gradients flow through features alone; `error=None` leaves it out. A transcoder
# stands where it writes, and reads another point: that of its config, or `reads="ln2.normalized"` of the same layer.

# %%
transcoders = load_sae("pydoc-4l/transcoders")
print({point: dictionary.reads for point, dictionary in transcoders.items()})
with splice(model, transcoders, error=None):
    print(model.to_pieces(model(text)[0, -1].topk(3).indices))  # without any MLP of the model

# %% [markdown]
# ## How good is a dictionary?
#
# `evaluate_sae` puts the reconstructions into the model, and compares the loss with that of zeros and of means in their place. It
# shows losses and no ratio where the ablation hardly matters. In most published models the stream of the first token is many times as
# long as the others, and rules explained variance: a warning says so, and `pos=slice(1, None)` leaves it as it is and scores the rest.
# `feature_cards`, `purity` and `max_activating` take `pos=` too, as `harvest` does.

# %%
texts = [
    "def f(x): return x + 1",
    "class A: pass",
    "import os; print(os.getcwd())",
    "for n in range(10): print(n)",
]
scores = evaluate_sae(model, transcoders, texts)
print(scores)
print(scores.points["blocks.1.mlp_out"].explained_variance)

# %% [markdown]
# On text that it was not trained on the bundled autoencoder recovers 0.98 of the loss in prose and 0.99 in repeated random
# characters, all four transcoders together 0.96 and 0.99 (`python examples/train_dictionaries.py`, after rounding to 8 bits). That is
# no evidence that features mean something. Two controls belong beside it:
#
# - `features.stability(one, other)`: does another seed find the same features? Here the mean best cosine of two seeds is 0.48, that of
#   random directions 0.28, and 0.4 % of features have one above 0.9.
# - `features.purity(model, texts, point)`: how uniform are the tokens where a unit is largest? Of the features 46 % are 90 % pure,
#   of the neurons of the same layer 9 %.
#
# ## What does a feature do?

# %%
from interp import pictures
from interp.features import feature_cards

cards = feature_cards(model, autoencoder, [text, other, *texts], [1011, 332], k=3)
print(cards)
view = pictures.features(cards)  # a notebook shows the cards themselves
# cards.save("out") writes the JSON that Neuronpedia reads, and FeatureCards.load("out") reads such files.

# %% [markdown]
# `hookscope features --prompt "..."` prints the same. `python examples/features.py` finds the features that carry a digit, ablates them
# and steers a generation with one.
#
# ## What loads
#
# | library | files | read |
# | --- | --- | --- |
# | SAELens 6 and before | `cfg.json`, `sae_weights.safetensors` | standard, gated, jumprelu, topk, abstopk, batchtopk, matching pursuit, transcoders with and without skip; norms; heads |
# | sparsify | `cfg.json`, `sae.safetensors` | topk and groupmax; transcoders, skip, also of early versions; `transcodes=True` for an early one without skip |
# | dictionary_learning | `config.json`, `ae.pt` | all its classes; biases of an interrupted training are scaled as it does at the end |
# | Gemma Scope 1 | `params.npz` | the path says the place, and whether embeddings are scaled; where it does not, `scale_embeddings=` and `transcodes=` must. A transcoder reads the norm before its gain: `load_sae(path).with_input_gain(block.ln2.weight)` |
# | Gemma Scope 2 | `config.json`, `params.safetensors`; `params_layer_0.safetensors` and so on | jump ReLU, affine skip; cross-layer transcoders |
# | circuit-tracer | `layer_0.safetensors` and so on | a transcoder for each layer, ReLU, jump ReLU or top-k (`k=` where `config.yaml` does not say it) |
# | circuit-tracer | `W_enc_0.safetensors`, `W_dec_0.safetensors` and so on | cross-layer transcoders, for attribution graphs; `splice` refuses them |
# | Llama Scope, and its R1 | `hyperparams.json`, `checkpoints/final.safetensors`; `config.json`, `sae_weights.safetensors` | autoencoders and transcoders; what is read before a norm's gain needs `with_input_gain` |
# | OpenAI | `autoencoders/7.pt` | v5 (top-k behind a norm), v1 and v4 |
# | Qwen Scope | `layer7.sae.pt` | top-k; `k=`, which only the name of the repository says |
# | Goodfire | `...-SAE-l19.pth` | ReLU |
#
# The path may be a place on the hub: `load_sae("google/gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71")`; where SAELens is installed
# also a release and an id as it names them. Weights in half precision become float32, unless `dtype=` says otherwise.
# `with_unit_decoder()` gives decoder rows the length 1, as Neuronpedia shows features. A place that files name has our name where it
# is the same in every model; others, such as `layers.3.mlp`, are looked up in the model by `splice`, and where none has that value
# `splice(..., at="blocks.3.mlp_out")` says which is meant.
#
# Features and outputs equal those of the libraries to 1e-6 (`tests/interp/features/test_load_sae.py`), and the published formulas of the last four
# (`tests/interp/features/test_published_forms.py`). A field of a config is honoured, known to change nothing, or refused by name; so is a tensor. `expected_average_only_in` needs `norm_factor=`, which is not in the files.
