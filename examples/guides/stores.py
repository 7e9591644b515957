# %% [markdown]
# # Stores: values of whole corpora
#
# A cache is for some texts. `harvest` writes the values of any number of texts to disk, a row for each token. It may be killed at any
# moment and called again, and any number of jobs write the same files.

# %%
import tempfile

from interp.store import Activations, harvest, plan
from models import load

model, out = load("pydoc-4l"), tempfile.mkdtemp()
texts = [f"part {n} of the list" for n in range(300)]
names = ["blocks.1.ln2.normalized", "blocks.1.mlp_out"]  # what a transcoder reads and writes
print(plan(model, texts, names, out))
for job in range(3):  # here one after another; elsewhere on machines of any scheduler
    store = harvest(model, texts, names, out, shard=(job, 3))
print(store)

# %% [markdown]
# - **Files.** File n has the values of texts 64 n to 64 n + 63, whichever job wrote it, with checksums. It is plain safetensors: a tensor
#   [row, ...] for each point, and `tokens`, `text` and `pos` of each row. `manifest.json` says of what model they are.
# - **Going on.** Files that are there and whole are left alone; those that are missing or damaged are made. Another model, other texts
#   or other settings are refused by name. `store.checksums` are equal for equal stores.
# - **Texts** may be a generator. `context=128` cuts them into pieces of at most 128 tokens. `dtype=torch.bfloat16` halves the bytes.
# - **Bytes.** Rows times numbers of a point times bytes of a number: a billion tokens of a point of 4,096 numbers in bfloat16 are 8.2 TB.
#
# ## Reading

# %%
for x, y in Activations(out).batches(4096, seed=0):
    print(x.shape, y.shape)
loader_ready = store.dataset(
    1024
)  # for torch.utils.data.DataLoader(..., batch_size=None): workers and ranks share the files
moments = store.moments("blocks.1.mlp_out")
print(moments.n, moments.mean.norm(), moments.covariance.shape)

# %% [markdown]
# A trainer of dictionaries that wants an iterator of [batch, d_in], such as SAELens', takes `(x for (x,) in store.batches(4096, names=[name]))`.
#
# The shuffle is bounded: files are drawn in any order, and the rows of `window` files are mixed at a time. Larger windows mix better and
# take more memory.
