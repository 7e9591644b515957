# %% [markdown]
# # Directions: find, test, erase, steer
#
# Two kinds of texts, and a vector that tells them apart: here texts that end inside a part number, and texts that end elsewhere.

# %%
import random

from interp.directions import difference_of_means, erasure, probe, steering_curve
from models import load

model, draw = load("pydoc-4l"), random.Random(0)
words = [
    "list",
    "of",
    "all",
    "parts",
    "that",
    "can",
    "be",
    "returned",
    "when",
    "they",
    "are",
    "not",
    "sold",
    "out",
]


def text(inside):
    """Some words, and then the beginning of a part number or of a word."""
    start = " ".join(draw.sample(words, 5))
    number = "".join(draw.sample("BCDFGHJKLMNPQRSTVWXZ", 4)) + "-" + draw.choice("KQVX")
    return f"{start} {number}" if inside else f"{start} {draw.choice(words)[:3]}"


yes, no = [text(True) for _ in range(40)], [text(False) for _ in range(40)]
v = difference_of_means(model, yes, no)  # at resid_post of every layer, after the last token
print(v)

# %% [markdown]
# ## Is it there, and does that mean anything?
#
# A probe is fitted on some texts and scored on others, in five folds, with an interval that counts texts and stays between 0 and 1.
# Its control has labels drawn by chance for each text: what it scores there is no property of the values.
# Copies of a text are in one fold, have one drawn label, and are scored once.
# It needs scikit-learn (`pip install -e ".[probes]"`).

# %%
found = probe(model, yes, no)
print(found)
print(found.selectivity.mean())

# %%
print(
    probe(model, yes, no, "blocks.2.resid_post", pos=[-4, -2, -1], over="pos")
)  # each position by itself

# %% [markdown]
# Padding is never an example, in whatever form positions are. Lists of each text's own are those of `yes`, then of `no`.
#
# `yes` and `no` may be caches of runs in place of texts. Chats (`models.chat`) have named spans: `pos="assistant"` takes the answers alone,
# here, in `difference_of_means` and `steering_curve`, and `Pairs(one, other, spans=["user", "assistant"])` patches them.
#
# ## Steer
#
# `edits.add(v, scale=2)` is a hook function like other edits, at all positions or at some. A curve says what each strength does to a
# score, and what it costs on other texts: KL(unsteered ‖ steered), the mean over their tokens.

# %%
from interp import log_prob

others = ["def f(x): return x", "import os", "for n in range(10):"]
curve = steering_curve(model, v.at(2), no, [0.0, 0.5, 1.0, 2.0], log_prob("8"), others=others)
print(curve)
print("within 0.2 nats:", curve.within(0.2))

# %%
from hooks import HookedRunner
from interp import edits
from models import generate_text

runner = HookedRunner(model)
print(repr(generate_text(model, "The list of ", max_new_tokens=24, temperature=0.0)))
with runner.hooks({"blocks.2.resid_post": edits.add(v, scale=1.0)}):
    print(repr(generate_text(model, "The list of ", max_new_tokens=24, temperature=0.0)))

# %% [markdown]
# One batch may have a strength for each prompt, `edits.add(strengths[:, None, None] * v[2])`. Two edits set the component along a direction
# to a number: `[(name, edits.project_out(v[2])), (name, edits.add(v.unit(), 4.0))]`.
#
# ## Erase
#
# LEACE (Belrose et al. 2023) is the least change after which no linear reading tells the texts apart, exactly on the texts that it was
# fitted on. It is computed in float64 from streamed sums, and nothing is shrunk.

# %%
erased = erasure(model, yes, no, "blocks.2.resid_post")
with runner.hooks({"blocks.2.resid_post": erased.edit(pos=-1)}):
    after = difference_of_means(model, yes, no, "blocks.2.resid_post")
print(v[2].norm(), after["blocks.2.resid_post"].norm())

# %% [markdown]
# ## Files
#
# `v.save("v.safetensors")` and `Direction.load` keep all of it. `v.at(1, 2, 3).to_gguf("v.gguf", "gpt2")` writes a control vector for
# llama.cpp, which has none for layer 0; `Direction.from_gguf` reads those of repeng too, in every type that gguf dequantises. Principal components and sparse probes have no
# function: `torch.linalg.svd` of values that `runner.capture` gives, and `probe` with a small `C`.
#
# `python examples/directions.py --out out` does all of this with texts to fit on and texts to test on, and draws it.
