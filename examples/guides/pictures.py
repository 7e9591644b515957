# %% [markdown]
# # Pictures
#
# Each function of `interp.pictures` returns a `View`. As the last line of a notebook's cell it shows itself; `.save("x.html")`
# writes a page that needs no network, `.show()` opens it in a browser, and `.figure` is the plot of matplotlib where there is
# one. Tokens and numbers are under the pointer and under the arrow keys. Light or dark follows the reader's setting.

# %%
from hooks import HookedRunner
from interp import Pairs, activation_patching, head_scores, logit_lens, pictures
from models import load

model = load("pydoc-4l")
text, other = (f"part ZQXJ-KV8{digit} is sold out; ask for ZQXJ-KV8" for digit in "14")
logits, cache = HookedRunner(model).run_with_cache(text, lazy=True)
pictures.patterns(model, cache)  # heads as small pictures, the one that is clicked large
# With scores the head with the largest is open first, and a button sorts all heads by them.
pictures.patterns(model, cache, scores=head_scores(model, cache, "induction"))

# %%
lens = logit_lens(model, cache)
pictures.lens(lens)  # or lens alone: a readout shows itself

# %%
patched = activation_patching(model, Pairs(text, other, ("1", "4")), site="z")
pictures.effects(patched.normalized())  # or patched alone

# %%
values = lens.target_probabilities[-1, 0]
tokens = model.to_pieces(model.to_tokens(text).tokens[0])
view = pictures.text(tokens, values, unit="probability", title="the likeliest next token")
view

# %% [markdown]
# There are also `pictures.circuit`, with a slider over its size, and `pictures.curves` for losses, spectra and angles. Results,
# lenses, decompositions, circuits, attribution graphs, cards, pairs, dictionaries and their scores, directions, comparisons, factored
# matrices and stores show themselves: `x.view()` is their picture, and `x.save("x.html")` writes it. A page stays below 2 MB: large
# numbers are rounded to 8 bits, and large inputs thinned, with a note that says so. Figures for papers are `result.plot()`.
#
# A notebook shows pictures once it is trusted, as one that you ran yourself is. In one that is not, and on GitHub, a line stands in their
# place: run it, or "Trust Notebook" in the commands of JupyterLab.
