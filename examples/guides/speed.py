# %% [markdown]
# # How fast, and on a GPU
#
# What was measured, how, and on what.
#
# `python tests/bench/bench.py`, with a row's name or for all, compares calls in interleaved rounds and prints median ratios and
# the memory that one call adds at its peak. Torch 2.13, transformers 5.23, no GPU. Rows with times in **bold** are of two cores of
# an AMD EPYC, of this day's code; the others of two cores of an Intel Xeon with AMX (about twice as fast), before caches cloned their
# values and CPU kernels of our own went.
#
# | row | what | hookscope | ratio | at most |
# | --- | --- | --- | --- | --- |
# | `forward-small` | plain forward, GPT-2-small shape, B=1 T=1024 | **1986 ms**, 243 MiB | 0.98 of `transformers` with sdpa | 1.00 |
# | `forward-tiny` | plain forward, 2 layers d=64, B=8 T=32 | **1.24 ms**, 7 MiB | 0.70 of `transformers` with sdpa | 0.75 |
# | `cached` | cache `blocks.*.resid_post`, T=1024 | **1942 ms**, 326 MiB | 1.01 of its own plain forward | 1.03 |
# | `cached` | `mode="full"`, lazy, T=1024 | **1967 ms**, 348 MiB | 1.02 of its own plain forward; 1.25 times the residual stream's bytes | 1.05; 1.3 |
# | `cached` | `capture` at the middle layer, T=1024 | **632 ms**, 49 MiB | 0.29 of its own plain forward | 0.45 |
# | `full` | `mode="full"`, eager, T=1024 | 1638 ms, 2162 MiB | 1.23 of `transformers` with sdpa, which keeps nothing, where TransformerLens 4.3 takes 1.27 in the same run; 1.51 and 1.55 in another run, 1.28 to 1.34 in three without it | 1.25 |
# | `attached` | an attached `transformers` model, nothing hooked, T=1024 | **1987 ms**, 210 MiB | 1.00 of the same model unattached, sdpa | 1.03 |
# | `spliced` | a dictionary of 65,536 features in the model, live, and nobody listens, GPT-2-small shape, T=1024 | **1894 ms**, 245 MiB | 1.00 of its own plain forward | 1.02 |
# | `reconstruction` | a TopK dictionary of 65,536 features alone, 1,024 vectors of size 768 | **994 ms**, 524 MiB | 1.11 of its encoder's product and top-k | 1.15 |
# | `attached-patterns` | the same, all patterns cached | **3219 ms**, 775 MiB | 1.13 of `output_attentions=True` | 1.05 |
# | `sweep-pos` | one patch of `resid_pre` by layer and pos, 12 layers d=768, B=4 T=15, vocabulary 5000 | **25 ms**, 128 MiB | 0.22 of its own plain forward | 0.28 |
# | `sweep-head` | one patch of `z`, `v` or `pattern` by layer and head, same | **35 ms**, 591 MiB | 0.31, 0.31, 0.32 of its own plain forward | 0.43 |
# | `sweep-long` | the same at B=8 T=128, where batches bring nothing more, by pos; by head | 0.21 s; 0.44 s | 0.29; 0.60 of its own plain forward | |
# | `sweep-tiny` | the same on 4 layers d=128, B=4 T=15, by pos; by head | **1.0 ms; 1.4 to 1.7 ms**, 89 MiB | 0.36; 0.51 to 0.60 of its own plain forward | |
# | `attribution` | attribution patching of `resid_pre`, `z`, `mlp.post`, `pattern`, GPT-2-small shape, B=4 T=64 | **1.5 s**, 300 MiB | 1.04, 1.03, 1.08, 1.10 of two forwards and one backward | 1.15 |
# | `edges` | edge attribution, all 32,491 edges, GPT-2-small shape, B=8 T=64 | **4.0 s**, 682 MiB | 1.31 of two forwards and one backward; by position 1.52 | 1.5; 1.5 GB |
# | `circuit` | a circuit of half of the edges, same | **1.9 s**, 176 MiB | 2.10 of its own plain forward | 3 |
# | `attribution-direct` | direct logit attribution of all parts at every position, same, from an eager cache | **58 ms**, 9 MiB | 0.05 of its own plain forward; `accumulated` 0.01; `decompose`, whose table has 237 MiB, 0.16; every neuron 0.10 along one direction for each text, 0.32 along one for each position | 0.25 |
# | `generate-small` | greedy generation, GPT-2-small shape, 64 tokens after 32 | 1.62 s, 23 MiB | 1.02 of `transformers`' `generate`; 8 prompts together 0.74 of it | 1.0; 0.75 |
# | `generate-tiny` | greedy generation, 2 layers d=64, 64 tokens after 32 | **37 ms**, 7 MiB | 0.54 of `transformers`' `generate`; 8 prompts together 0.55 of it | 0.6 |
# |  | an attribution graph, GPT-2-small shape, T=64, 12 transcoders of 4,096 features, 10 logits, 500 features (`tests/bench/tracing.py`) | **4.1 s**, 0.43 GiB | 0.17 of circuit-tracer 0.5 in batches of 16, its best of four sizes; 0.04 in its own of 512 | 0.5; 1.5 GiB |
# |  | a harvest to disk of one point in the middle, GPT-2-small shape, 16 texts of 256 (`tests/bench/store.py`) | **2.8 s** | 1.05 to 1.07 of `capture` over the same batches, of which the hash of 500 MB of weights is 0.06 | 1.10 |
# |  | shuffled batches of a store, rows of 3 kB, from the page cache (`tests/bench/store.py`) | **4.8 to 5.5 GB/s** | by 16 to 2 files mixed at a time | at least 1 |
# |  | statistics of the same rows; with covariances (same) | **0.16; 0.10 GB/s** | | |
# |  | two workers of Ray, one core each, GPT-2-small shape, 240 texts of 256 (`tests/bench/store.py --ray`) | **41 s** | 1.01 of the rate of two processes | at least 0.8 |
# |  | 10⁶ tokens of a model of no work (same) | **7 s** | a peak of 307 and 313 MiB after a tenth of them, 321 and 316 MiB at the end | flat |
# | `import` | `import interp` beyond `import torch`, from source without bytecode | **0.26 s** | | 0.3 s |
# | `smollm2-32`, `-512`, `-2048` | plain forward, SmolLM2-135M, B=1 | **175; 1189; 5807 ms** | 1.00; 1.00; 0.95 of `transformers` with sdpa on the same file | 1.02 |
# | `spectra` | spectra of QKᵀ, WvWo and AVWo of all 270 heads, SmolLM2-135M, 8 tokens | 0.84 s, 497 MiB | 9.8 of its plain forward | 2 s |
# | `long` | readings of 1,024 tokens from a lazy cache, SmolLM2-135M: all points of a layer; scores of heads, a picture, SVD targets of a layer, direct attribution, `statistics`, `max_activating` | 165 MiB; 237, 213, 219, 81, 27, 46 MiB | 1.4, 1.3, 1.3, 0.5, 0.2, 0.3 of a layer's bytes; a lens 2.3, of which 0.3 GiB do not grow | 1.5 |
# | `smollm2-load` | loading SmolLM2-135M from its GGUF file, without the tokenizer | 1.24 s, 558 MiB | 0.08 of `transformers`' time, 0.59 of its memory | 0.5, 0.5 |
# | `smollm2-generate` | greedy generation of it, 32 tokens after 32 | **2.45 s**, 8 MiB | 0.98 of `transformers`' `generate` | 1.02 |
#
# Every neuron at every position, each along a direction of its own, cannot be had for less than about 0.25: the products of
# those directions with the output weights take 0.22. Rows that miss their bound:
# `full` in some runs, the lens of `long`, memory of `smollm2-load`, `generate-small` (1.02 of 1.0), `attached-patterns` (1.13 of 1.05, since caches copy what they keep) and, by position of a
# direction each, `attribution-direct`. Ratios vary by a few hundredths from run to run. On the model of 2 layers, where Python's own work counts (row `cached-tiny`, the EPYC), a lazy
# run takes 1.50 of its own forward and an eager one of every point 2.60; raw PyTorch hooks that keep the same tensors, without a
# copy of their own, take 1.91. With very small kernels (`cached-deep`) each of 64 layers adds 222 microseconds to a lazy run, 72
# for one cached point and 110 for one edit. On 10,000 linear layers (`modules`), where the plain forward takes 96 ms, 10,000
# edits by exact name take 815 ms and a cache of all points 243 ms. Beside TransformerLens 2.18 (and transformers 4.57, which it
# needs), on the EPYC, an earlier commit's plain forward at T=1024 took 0.79 of the sdpa one, and TransformerLens' 1.28;
# `mode="full"` took 1.15 and its `run_with_cache` 2.03. Beside TransformerLens 4 the benchmarks use its `TransformerBridge`.
#
#
# ## What grows how
#
# `python tests/bench/growth.py`: one thread, one text, 4 heads, d_model 128, vocabulary 1000; seconds, and MiB that the call adds at its
# peak in a process of its own. The exponents are between 512 and 2,048 tokens, and between 4 and 16 layers at 512: 1 is linear.
#
# | | 4 layers, 128 tokens | 4, 512 | 4, 2,048 | 16, 128 | 16, 512 | 16, 2,048 | length: time, memory | depth: time, memory |
# | --- | --- | --- | --- | --- | --- | --- | --- | --- |
# | forward | 0.008 s, 1 | 0.029 s, 6 | 0.213 s, 15 | 0.031 s, 2 | 0.124 s, 6 | 0.772 s, 15 | 1.3, 0.6 | 1.0, 0.0 |
# | lazy cache | 0.015 s, 2 | 0.036 s, 7 | 0.230 s, 36 | 0.050 s, 4 | 0.151 s, 10 | 0.913 s, 33 | 1.3, 0.9 | 1.0, 0.3 |
# | capture in the middle | 0.010 s, 2 | 0.035 s, 6 | 0.189 s, 19 | 0.028 s, 2 | 0.096 s, 7 | 0.539 s, 20 | 1.2, 0.8 | 0.7, 0.1 |
# | full cache | 0.016 s, 7 | 0.068 s, 59 | 0.884 s, 635 | 0.059 s, 27 | 0.238 s, 236 | 5.609 s, 2397 | 2.3, 1.7 | 0.9, 1.0 |
# | logit lens | 0.052 s, 8 | 0.132 s, 48 | 0.833 s, 160 | 0.166 s, 50 | 0.575 s, 175 | 2.164 s, 337 | 1.0, 0.5 | 1.1, 0.9 |
# | scores of heads | 0.027 s, 4 | 0.097 s, 35 | 1.181 s, 408 | 0.083 s, 4 | 0.327 s, 49 | 4.554 s, 446 | 1.9, 1.6 | 0.9, 0.2 |
# | picture of patterns | 0.029 s, 12 | 0.111 s, 69 | 1.154 s, 298 | 0.111 s, 41 | 0.335 s, 74 | 4.089 s, 319 | 1.8, 1.1 | 0.8, 0.1 |
# | SVD targets of a layer | 0.015 s, 4 | 0.048 s, 24 | 0.594 s, 294 | 0.041 s, 4 | 0.154 s, 32 | 1.079 s, 305 | 1.4, 1.6 | 0.8, 0.2 |
# | direct attribution | 0.035 s, 2 | 0.116 s, 10 | 0.431 s, 32 | 0.108 s, 4 | 0.292 s, 19 | 1.546 s, 43 | 1.2, 0.6 | 0.7, 0.4 |
# | patching of heads | 0.130 s, 12 | 0.474 s, 70 | 3.196 s, 206 | 1.315 s, 41 | 5.708 s, 277 | 34.795 s, 922 | 1.3, 0.9 | 1.8, 1.0 |
# | attribution patching | 0.038 s, 5 | 0.122 s, 26 | 0.673 s, 92 | 0.102 s, 20 | 0.511 s, 83 | 2.933 s, 352 | 1.3, 1.0 | 1.0, 0.8 |
# | edge attribution | 0.057 s, 14 | 0.181 s, 58 | 1.065 s, 248 | 0.189 s, 39 | 0.694 s, 170 | 3.567 s, 667 | 1.2, 1.0 | 1.0, 0.8 |
# | harvest of a point, 4 texts | 0.033 s, 2 | 0.118 s, 6 | 0.373 s, 24 | 0.052 s, 2 | 0.141 s, 6 | 0.493 s, 25 | 0.9, 1.1 | 0.1, 0.0 |
# | attribution graph, 64 features | 0.139 s, 29 | 0.723 s, 158 | 5.958 s, 719 | 0.670 s, 49 | 3.383 s, 269 | not run | 1.5, 1.1 (4 layers) | 1.1, 0.4 |
#
# Attention is quadratic in time, and all else linear. Memory is linear but where scores or patterns are asked for: of one layer at a
# time for readings and pictures, of all layers for an eager cache of everything. A lens and patching keep more for more layers, as
# their results do. Patching has a row for each head of each layer, so its time is quadratic in depth.
# Of SmolLM2 at 2,048 tokens, beyond the lazy cache: all points of one layer 0.61 GiB, a picture of patterns 0.68, scores of heads 0.86,
# direct attribution 0.13, saving all of it 0.70 (a file of 11.4 GB). A lens of 512 tokens takes 0.36 GiB, most of which
# does not grow.
#
# ## On a GPU
#
# ```bash
# python -m pytest tests/gpu -o addopts= --full && python tests/bench/bench.py --device cuda
# ```
#
# prove on a GPU what is tested without one: the same numbers in every precision, a host that does not wait, and every analysis
# beside the CPU. They need no network, no C compiler and no bfloat16; rows of `transformers` that cannot run are left out and
# named. Once there was one: an NVIDIA H100 of 80 GB in a sandbox whose processor starts kernels slowly, torch 2.11,
# transformers 5.17. Ratios are to the first line of each row.
#
# | row | what | time | ratio | memory |
# | --- | --- | --- | --- | --- |
# | `forward` | GPT-2-small shape, B=8 T=1024, bfloat16: the fewest calls of PyTorch | 12.0 ms | 1 | 906 MiB |
# | | hookscope | 14.6 ms | 1.21 | 810 MiB |
# | | `transformers`, sdpa | 17.9 ms | 1.48 | 798 MiB |
# | `cached` | hookscope, which keeps nothing | 13.1 ms | 1.16 | 810 MiB |
# | | cache `blocks.*.resid_post`; to the CPU | 16.0; 17.1 ms | 1.41; 1.52 | 942; 810 MiB |
# | | `mode="full"`, lazy; `capture` at the middle layer | 17.9; 6.9 ms | 1.57; 0.60 | 980; 132 MiB |
# | `decode` | greedy generation, 128 tokens after 32 | 1.29 s | 1 | 6 MiB |
# | | `transformers`, dynamic cache; static cache, which is compiled | 1.80; 0.29 s | 1.39; 0.23 | 6; 7 MiB |
# | `lengths` | one block of 32 heads, 8 key heads and width 4096, T=32768, B=1, bfloat16 | 39 ms | 1 | 3.4 GiB |
# | | padding; a window of 4096; a soft cap | 107; 50; 275 ms | 2.7; 1.3; 7.0 | 3.4; 3.4; 5.0 GiB |
# | `analyses` | two forwards and one backward, GPT-2-small shape, B=8 T=64, float32 | 23 ms | 1 | 289 MiB |
# | | attribution patching of `z`, by pos and head | 38 ms | 1.75 | 301 MiB |
# | | edge attribution, all 32,491 edges | 217 ms | 9.8 | 524 MiB |
# | | activation patching of `z` at 144 heads | 227 ms | 10.3 | 952 MiB |
#
# On a CPU edge attribution has a ratio of 1.31; there it was not profiled (its many small kernels are likely why). Of the tests
# 528 passed. Attribution graphs failed, which took positions from the host, and so did the test of attached models, by its own
# fault. Both have been mended since, without a GPU: graphs are tested with pretended devices, as is what follows.
#
# - A forward pass, a cached run and a training step never wait for the device. A generation waits in each step, to see whether
#   its logits are finite and its rows go on; a cached run with `device="cpu"` waits once, at its end. Tokens and masks on the
#   device are read back once, to be checked; `with models.trusted():` skips that.
# - `--device` and `--dtype` are options of the command line.
# - A model's blocks may be on several devices, the CPU among them. Stream and context move once per change of device, in a
#   forward pass and in each batch of rows of a sweep. Every analysis gives the numbers of one device. Scores of edges are
#   gathered where the metric is, `stack` and weight views on the first block's device, folded weights and the tuned lens on that
#   of the model's first parameter.
# - Where PyTorch prefers cuDNN's attention (2.11 and later, on an H100), it runs without a mask only: with one, its gradients can
#   be NaN (PyTorch's issue 196678). Shared key heads are copied for the kernels. Soft caps go by blocks of queries.
# - Attention forms no matrix of all scores unless somebody hooks `scores` or `pattern`: 64 GiB for each of them in the row `lengths`.
