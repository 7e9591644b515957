# %% [markdown]
# # Stores: values of whole corpora
#
# A cache is for some texts. `harvest` writes the values of any number of texts to disk, a row for each token. It may be killed at any
# moment and called again, and any number of jobs write the same files.

# %%
import tempfile
from pathlib import Path

from hooks import HookedRunner
from interp import edits, head_scores
from interp.directions import leace
from interp.store import Activations, Ray, harvest, plan, statistics
from models import load

model, out = load("pydoc-4l"), Path(tempfile.mkdtemp())
texts = [f"part {n} of the list" for n in range(300)]
names = ["blocks.1.ln2.normalized", "blocks.1.mlp_out"]  # what a transcoder reads and writes
print(plan(model, texts, names, out))  # before anything is written
for job in range(3):  # here one after another; elsewhere on machines of any scheduler
    store = harvest(model, texts, names, out / "store", shard=(job, 3))
print(store)

# %% [markdown]
# - **Texts** are lists, generators, token arrays, rows of `datasets` (`column=` names theirs), or a path: `"corpus.jsonl"`, `"part-*.txt"`
#   (a text each line), `"tokens.npy"`, compressed or not, also at an address that `fsspec` knows, such as `s3://`.
# - **What is read together.** A text that is longer than `context`, or than the model's, is cut into pieces. `pack=True` puts several texts
#   into one piece, so that no place is padding.
# - **What is kept.** `pos=slice(1, None)` leaves out the first position, `without=[bos]` a token wherever it stands, `pool="mean"` keeps a
#   row for each piece. `dtype=torch.bfloat16` halves the bytes; a value that a dtype cannot hold is an error, and the same call with
#   another dtype begins again.
# - **Files.** File n has the values of texts 64 n to 64 n + 63 (`per_file=64`), whichever job wrote it. It is plain safetensors: a tensor
#   [row, ...] for each point, and of each row `tokens`, the number of its `text`, its `offset` in it, and the `pos` where the
#   model read it. `manifest.json` says of what model they are, and has a CRC of each tensor.
# - **Going on.** Files that are there and whole are left alone; those that are missing or damaged are made. Another model (all of its weights
#   are hashed), other texts or other settings are refused by name. With more texts a store grows, and fewer are refused.
#   `store.damaged()` reads all files and lists the bad ones.
# - **Whose a file is.** Each has a hash of the manifest (without what grows), so no other harvest takes it for its own after the manifest was
#   lost, and a file that was copied from elsewhere is refused when it is read. Of two harvests that begin at once in an empty folder one is
#   refused. In object stores that takes a write on condition (S3, GCS); without it, one is refused at its next file.
# - **The same bits** come from one job and from many, if processors are of one kind and use as many threads: PyTorch adds in another
#   order with more. Ray gives each worker one thread for each of its cores.
#
# On the command line a job is a line, and a scheduler's array of jobs is the whole harvest:
#
# ```bash
# hookscope harvest corpus.jsonl --model gpt2 --point "blocks.6.resid_post" --out s3://bucket/store --shard $SLURM_ARRAY_TASK_ID/64
# ```
#
# ## Ray
#
# ```python
# harvest(partial(load, "gpt2"), "s3://bucket/corpus-*.jsonl", names, "s3://bucket/store", engine=Ray(8, {"num_gpus": 1}))
# ```
#
# `pip install "hookscope[ray]"`. Each worker is an actor with a model of its own, made by a function
# (`lambda: load("gpt2").cuda()` is one too), and does four jobs or more of `shard=(n, 4 * workers)`. Ray starts a worker that died again, with its job,
# which goes on at its first missing file. Workers need this package, and the paths that you give.
#
# ## Reading

# %%
store = Activations(out / "store")  # in another process, or on another machine
for x, y in store.batches(4096, seed=0):
    print(x.shape, y.shape)
print(store.rows(text=7, offset=2, names=["tokens", "blocks.1.mlp_out"])["tokens"])
# For a DataLoader with batch_size=None, whose workers and ranks share the files:
dataset = store.dataset(1024)

# %% [markdown]
# Files are mapped into memory. The shuffle is bounded: files are drawn in any order, and the rows of `window` files (16) are mixed at a
# time. Two rows of one file are in one batch more often than in a full shuffle, by the factor of all files to `window`: over 640 files
# of 64 texts, 40 times as often as 1 in 640, so still a sixteenth of all pairs. More, smaller files and a larger window mix better.
#
# ## Statistics
#
# One pass, in float64; those of parts are added. So each job can make its own, `save` them, and one adds them up.

# %%
half = [store.statistics(part=(n, 2), covariance=True) for n in range(2)]
sums = half[0] + half[1]
one = sums["blocks.1.mlp_out"]
print(one, one.mean.norm(), one.covariance.shape)
print(one.quantiles([0.01, 0.5, 0.99])[:, 0], "rank is sure to", one.rank_error)
print(
    store.top(sums, "blocks.1.mlp_out", column=5, model=model)[:2]
)  # as `max_activating`, without a run
streamed = statistics(
    model, texts[:50], "*.pattern", reading=lambda m, cache: head_scores(m, cache, "previous_token")
)
print(streamed["reading"].mean)  # [layer, head]

# %% [markdown]
# They are what other tools take: mean ablation takes the means, `leace` the moments with labels, `tuned_lens(model, store)` streams
# in place of runs, and `store.texts()` gives the tokens back to `jacobian_lens`, whose lenses are `merged`.

# %%
runner = HookedRunner(model)
ablated = runner.run_with_hooks(texts[0], hooks={"blocks.1.mlp_out": edits.mean(sums)})
moments = store.moments("blocks.1.mlp_out", lambda rows: (rows["pos"] == 0).double()[:, None])
print(leace(moments).right.shape)

# %% [markdown]
# ## Training on it
#
# `examples/train_dictionaries.py` makes the bundled dictionaries from one harvest. SAELens' trainer takes the rows as they are, and so does
# any loop that wants [batch, d_in]:
#
# ```python
# rows = (x for (x,) in store.batches(4096, names=["blocks.2.resid_post"], epochs=None))  # without end
# SAETrainer(cfg=SAETrainerConfig(..., lr_end=1e-5), sae=sae, data_provider=rows).fit()
# ```
#
# Its data sets of cached activations are read and written: `from_arrow(folder, out)` makes a store of one, never over another, and
# `to_arrow(store, folder, {"blocks.2.resid_post": "blocks.2.hook_resid_post"})` writes what its `cached_activations_path` takes
# (`pip install datasets`). Read such a folder with `dtype="float32"`: SAELens reads the tokens in the same dtype, and bfloat16 has
# no 50,256.
#
# ## On paper: 10⁹ tokens of a 7B model
#
# `plan` gives bytes exactly and time from the rate of a batch. For one point of width 4,096 in bfloat16, at texts of 1,000 tokens:
#
# | what | how it is found | |
# | --- | --- | --- |
# | bytes | tokens times (4,096 times 2, and 16 that say where a row is from) | 8.2 TB a point |
# | files | 64 texts each | 15,625 of 525 MB |
# | GPU hours | 2 times 7·10⁹ operations a token, at 400·10¹² a second; `capture` stops at the last point asked for | 9.7 at the last layer, 4.9 in the middle |
# | writing | bytes by time | 0.23 to 0.47 GB/s a GPU |
# | requests | a file is written in parts of 50 MB on S3, 13 requests; read whole by one | 200,000 to write, 15,625 for each epoch |
# | checking | a CRC at 3 GB/s, when it is written and when a job goes on | 45 min of one core |
#
# The time is computed, not measured: no GPU was at hand, and 400·10¹² is what good kernels reach on an H100. On two CPU cores a harvest takes
# 1.0 of the time of `capture` alone ([speed](speed.py)). What matters, in this order: how many points, and their width (a transcoder needs
# two); the dtype; which tokens (`pos`, `without`, `pool`); the last layer asked for; `pack`, where texts are short; `per_file`, since a file is
# what is lost by a kill, what a reader holds `window` times in memory, and what a request costs.
