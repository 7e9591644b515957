# %% [markdown]
# # Training, and the SVD of attention
#
# The instrument of the source documents: small models, their training, and singular values of attention.

# %%
import torch

from hooks import HookedRunner
from interp import spectra, spectral, svd_targets
from models import TrainingConfig, build, train

walker = build("svd-64-2l", vocab_size=30, n_ctx=16)
steps = torch.randint(30, (400,), generator=torch.Generator().manual_seed(0))
# or walks [walk, step]; directory="out" writes a log and checkpoints; resume=True goes on from them
train(walker, steps, TrainingConfig(steps=3))

_, kept = HookedRunner(walker.eval()).run_with_cache(steps[None, :16], mode="svd_targets")
targets = svd_targets(walker, kept)  # QKᵀ, zero above the diagonal; `scores` in the cache is not
print(targets.squeeze_heads().qkt.shape)  # the document's shape, without the axis of the one head
found = spectra(targets)  # of QKᵀ, WvWo and AVWo, in float64
print(spectral.effective_rank(found["wvwo"].s))  # [layer, head]

# %% [markdown]
# | experiment | two CPU cores, one thread |
# | --- | --- |
# | `python examples/studies/tiny_lm.py --text tinyshakespeare.txt` | Tiny Shakespeare (not included) by nanoGPT's small setting: 1.82 nats per character in 2.5 minutes; `--tokens bytes`, or a directory with GPT-2's tokenizer; its docstring has a first look of seconds (at nanoGPT's own learning rate, 1e-3, half of the default: 1.90) |
# | `python examples/studies/qk_norm.py` | with and without QK-norm, 400 steps: at rate 1e-2 the largest attention score is 5.5 and 529, the loss 1.89 and 2.53 nats; at 1e-3 5.5 and 23, 2.01 and 2.14 |
# | `python examples/studies/svd_stability.py` | are attention maps less stable around events? Tables, figures and intervals in 2 minutes; `--d-model` 64 to 256, `--layers` 2 to 6, `--window`, `--delay`, `--vertices`. With seed 0, 4 of 8 intervals exclude zero; they are not independent |
# | `python examples/studies/handout.py --out out` | the handout's QKᵀ, S, A and Y, printed and drawn, and its figures 1, 2, 4 and 6 |
# | `examples/studies/cyclic.py` | functions to import: the power by frequency of embeddings, neurons and logits in tasks modulo n (Nanda et al. 2023) |
# | `python examples/train_pydoc.py` | a model like the bundled one, whose training rows were one character shorter, in about 25 minutes |
#
# Training goes on bit for bit from a checkpoint, also after Ctrl-C; a full disk or a crash leaves the last one whole. A
# damaged one is refused, and so is a second run in a directory that holds one.
#
#
# ## The source documents
#
#
# | source document | state |
# | --- | --- |
# | a single-head transformer as an instrument for SVD | here: the models `svd-64-2l` to `svd-256-6l`, modes and windows, targets, measures, walks, and the study |
# | tiny transformer handout | here: attention, blocks, model, sampling, worked numbers, training and the experiments |
# | transformer components | here: norms, masks, positions, blocks, weight tying, the registry, `count_parameters()` |
# | GPT-2 inference | here: checkpoints, BPE, KV cache, masks, sampling, batches, half precision, GGUF, multi-query, windows, chunks |
# | query-key normalisation | here: the configs `d12` to `d48`, the comparison and the smoke test (`examples/studies/tiny_lm.py --model`) |
#
# What these documents call the parts of a transformer:
#
# | handout | component document | here |
# | --- | --- | --- |
# | T, block_size | sequence_length | `n_ctx` |
# | H; L | num_heads; num_layers | `n_heads`; `n_layers` |
# | d_k, d_head | d_k | `d_head` |
# | d_ff | ffn_expansion | `d_mlp` |
# | E | token_embedding | `W_E` |
# | PositionalEncoding | create_positional_encoding | `positions=`, the point `pos_embed` |
# | Q, K, V | Q, K, V | the points `q`, `k`, `v` |
# | S | scores | the point `scores`, before the mask |
# | A | attn_weights | the point `pattern` |
# | Y | attn_output | the point `z` |
# | W_Q, W_K, W_V, W_O | W_q, W_k, W_v, W_o | `W_Q`, `W_K`, `W_V`, `W_O` |
# | proj_qkv, proj_out | | `attn.qkv`, `attn.output` |
# | causal mask | create_causal_mask | `causal_mask` |
# | MultiHeadAttention | MultiHeadAttention | `Attention` |
# | FFN: W₁, W₂ | linear1, linear2 | `MLP`: `W_in`, `W_out` |
# | TransformerBlock | norm1, attention, norm2, ffn | `Block`: `ln1`, `attn`, `ln2`, `mlp` |
# | | embed_norm, output_norm | `ln_embed`, `ln_final` |
# | W_out, b_out | output_proj | `W_U`, `b_U` |
# | TinyTransformerLM | Transformer | `build("tiny-lm")`, `build("transformer-learned")` |
# | | ModelRegistry.register, create, list_models | `register`, `build`, `available` |
# | bpc, perplexity | | `Evaluation.bits_per_character`, `.perplexity` |
#
# Of the other documents: QK^T, pattern, values, WvWo and AVWo are the fields of `svd_targets(model, cache)`, and the four
# extraction modes are `Mode`; windows of the stream are `residual_stream(cache, windows)`; GPT-2's `c_attn`, `c_proj`,
# `c_fc`, `wte` and `wpe` are `attn.qkv`, `attn.output`, `mlp.input`, `token_embedding` and `position_embedding`; hybrid norm
# of qk-norm.md is `norm_place="sandwich"`, and its QK-norm is `qk_norm="head"`.
