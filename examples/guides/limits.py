# %% [markdown]
# # Limits
#
# What is refused, what is not there, and what was never tried. A number that would be wrong is an error of one line, which says what was
# wrong and what to do. Each cell below makes some of them; the errors are printed.

# %%
import torch

from hooks import HookedRunner
from interp import (
    Pairs,
    activation_patching,
    attribution_graph,
    decompose,
    graph,
    load_sae,
    logit_lens,
    splice,
)
from models import Transformer, TransformerConfig, load, load_tokenizer

model, text = load("pydoc-4l"), "part ZQXJ-KV81 is sold out; ask for ZQXJ-KV8"
runner = HookedRunner(model)


def refused(call):
    """Prints the error of a call."""
    try:
        call()
    except Exception as error:
        print(f"{type(error).__name__}: {error}\n")
    else:
        raise AssertionError("it was not refused")


# %% [markdown]
# ## Names, shapes and states

# %%
refused(lambda: runner.capture(text, names="blocks.1.attn.patern"))
refused(lambda: runner.run_with_cache(text, name="*.attn.pattern"))
refused(lambda: runner.run_with_cache([text, text[:9]], positions=slice(2, -1)))
refused(lambda: runner.run_with_cache({"text": [text]}))
refused(
    lambda: runner.run_with_hooks(
        text, hooks={"blocks.0.mlp_out": lambda value, point: value[:1, :2]}
    )
)
refused(lambda: runner.run_with_cache(text * 40))
refused(lambda: activation_patching(load("pydoc-4l").train(), Pairs(text, text[::-1], ("1", "4"))))
refused(lambda: Pairs(text, text + "1", ("1", "4")).read_by(model))
_, cache = runner.run_with_cache(text)
with torch.no_grad():
    model.blocks[2].attn.W_O.mul_(1.1)
refused(lambda: decompose(model, cache))
model = load("pydoc-4l")
_, part = HookedRunner(model).run_with_cache(text, names="*.attn.z")
refused(lambda: logit_lens(model, part))

# %% [markdown]
# ## Models
#
# - A config that the plain model cannot express is refused by the field's name, and so are weights that do not fit. `attach` takes any
#   causal decoder of `transformers`. What reads and writes its stream is found from a run, and what is not found is named.
# - Encoders with decoders, models of images and sound, and state-space models have no table for `load`; `attach` puts points into them. A
#   logit lens, direct attribution and circuits need the blocks of a decoder's text: not those of towers, encoders or encoder-decoders. Stages such as
#   Swin's are blocks with points of their streams alone.
# - Hidden layers of experts have no points, and experts outside the text's blocks have none at all. Blocks that run several times, and streams
#   of several vectors a position (DeepSeek V4), are refused by `attach`; a `HookedRunner` keeps each call by `calls="all"`, without gradients'
#   caches, lazily or joined.
# - In half precision, attention with its `scores` or `pattern` listened to rounds otherwise than the fused kernel does. Where that sends a
#   token to other experts, logits of a mixture of experts change by more than rounding: by up to their own size in tiny random ones.
# - Norms of the stream itself (`norm_place="post"`) have no graph, no circuits and no attribution graphs, because their stream is no sum.

# %%
sizes = {"vocab_size": 7, "n_ctx": 5, "n_layers": 1, "n_heads": 1, "d_model": 4}
post = Transformer(TransformerConfig(**sizes, norm_place="post")).eval()
refused(lambda: graph.Graph(post))
refused(lambda: TransformerConfig(**sizes | {"n_heads": 3}))
refused(lambda: load_tokenizer("no/such/folder"))

# %% [markdown]
# ## Dictionaries and attribution graphs
#
# - Dictionaries with a gate, a norm of their own or matching pursuit cannot be in attribution graphs: their features are no linear
#   readings. Transcoders across layers can, but cannot be spliced.
# - Features kept by a lazy cache must be read inside the `with` of `splice`.
# - Rows of attribution graphs hold patterns and the scales of norms. What a feature does by moving attention is an estimate beside
#   them, with `attention=True`; what it does by moving scales is not in them. `intervene` shows how much both are.

# %%
transcoders = load_sae("pydoc-4l/transcoders")
refused(lambda: attribution_graph(model, [text, text], transcoders))
refused(lambda: attribution_graph(model, text, load_sae("pydoc-4l/resid_post")))
with splice(model, load_sae("pydoc-4l/resid_post")) as spliced:
    _, lazy = spliced.run_with_cache(text, lazy=True)
refused(lambda: lazy["blocks.2.resid_post.features"])

# %% [markdown]
# ## Not there
#
# - Running on somebody else's machine, serving with vLLM, interventions with weights to be trained: see [other libraries](compared.md).
# - A harvest of points with queries and keys (`scores`, `pattern`): a store has a row for each token. `statistics(..., reading=)` sums their
#   readings up instead.
# - A shuffle of a whole store: `batches` mixes the rows of `window` files ([stores](stores.py)).
# - Training of dictionaries as a product: `examples/train_dictionaries.py` made the bundled ones, and no more is promised.
# - Edits on the command line are `zero`, `scale` and `noise`, which a line of text can say. Others need values of a run: use Python.
#
# ## Never tried
#
# - A GPU was at hand twice, for five minutes each ([speed](speed.py)). Of published files these were: SmolLM2-135M, llama.cpp's
#   vocabularies, Mistral's tekken.json. No published dictionary was: their readers were tested with files that the libraries wrote, or by the published formula.
# - Pictures were looked at in Chromium: in JupyterLab, in its exported HTML, in built pages and in print. VS Code and Colab were not tried.
# - A notebook that is not trusted shows a line in place of each picture, and so does GitHub.
# - Stores stood on disks and in the object store that `fsspec` keeps in memory; S3 and its like were not at hand. Ray ran on one machine.
# - Tensor-parallel plans ran in two processes with gloo on CPUs, not with NCCL.
# - Windows and macOS were not tried.
