# %% [markdown]
# # Interchange: where a variable stands
#
# Which part of a value carries a variable? Run a text with that part taken from another text, and see whether the model answers as if
# the variable had been the other one. Distributed alignment search learns the part (Geiger et al. 2024). A search that is free enough
# fits anything, so it is scored on other pairs and beside controls.

# %%
import random

from interp import Pairs
from interp.alignment import align
from models import load

model, draw = load("pydoc-4l"), random.Random(0)
LETTERS = "BCDFGHJKLMNPQRSTVWXZ"


def text(digit):
    """A part number that ends in the digit, asked for again."""
    part = "".join(draw.sample(LETTERS, 4)) + "-" + "".join(draw.sample(LETTERS, 2)) + "8"
    return f"part {part}{digit} is sold out; ask for {part}"


digits = [draw.sample("123456789", 2) for _ in range(100)]
# The corrupted text is run. The answer is the clean one's digit, after the corrupted one's part number.
pairs = Pairs(
    [text(a) for a, _ in digits], [text(b) for _, b in digits], [(a, b) for a, b in digits]
)
train, test = pairs.read_by(model).split(seed=0, share=0.7)
found = align(model, train, "resid_pre", k=8, test=test, layers=2, pos=13, epochs=6)
print(found)

# %% [markdown]
# - **aligned**: the columns that were learned. Eight of 128 carry the digit at position 13, where it stands.
# - **random**: as many columns, drawn at random. The text keeps its own digit, so it is below chance.
# - **shuffled weights**: the same search in a model that has learned nothing. Two answers are compared, and chance is one half.
# - **shuffled answers**: the same search for answers of other pairs.
# - **whole**: all of the value. It carries the other part number too, and the model less often finds the place to copy from.
#
# `found.accuracy` and `found.metric` are results with intervals, [control, point, pos, example]: give several layers and positions, or
# names of spans, for a table. `found.featurizers` are the parts, and an edit takes them:

# %%
from hooks import HookedRunner
from interp import edits

one, other = text(4), text(7)
point = "blocks.2.resid_pre"
source = HookedRunner(model).run_with_cache(one)[1]
edit = edits.interchange(source, found.featurizers[point, 13], pos=13)
logits = HookedRunner(model).run_with_hooks(other, hooks={point: edit})
print(one, "into", other, ":", model.to_pieces(logits[0, -1].argmax()))

# %% [markdown]
# ## Causal models, and other features
#
# A causal model is a function from inputs to values by name, which takes each variable by name too. `counterfactual` gives the answers
# that pairs need.

# %%
from interp.alignment import counterfactual


def add(a, b, c, carry=None):
    """The causal model: three numbers, of which the first two make a variable."""
    carry = a + b if carry is None else carry
    return {"carry": carry, "answer": carry + c}


print(counterfactual(add, {"a": 1, "b": 2, "c": 3}, {"a": 4, "b": 4, "c": 0}, "carry"))

# %% [markdown]
# In place of learned columns `align` learns a mask of features that are given: `features=neurons(512)` of the neurons,
# `pca(values, 20)` of principal components, `of_dictionary(load_sae(...))` of a sparse autoencoder; `sparsity=` says what each costs.
# `python examples/interchange.py` does the same in a model whose answer is known.
#
# ## An illusion, and how it is seen
#
# A direction may join one along which texts differ but which nobody reads to one that is read but along which no text differs. Patching
# it moves the answer by a way that the model never goes (Makelov et al. 2023). `null_spaces` says how much of an effect goes that way:
# `dormant` through directions along which no clean run varies; `unread` is what is lost if only the part of the direction that is
# read is patched.

# %%
from interp.alignment import null_spaces

towards = model.W_out[2] @ model.W_U[:, model.to_id("4")]  # neurons that write towards a digit
reader = model.W_out[2].detach()
print(null_spaces(model, test, "blocks.2.mlp.post", towards, reader=reader))
