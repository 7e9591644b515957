"""Make a fixture for the tests of stores: activations that SAELens cached.

Run it by hand, in an environment with sae-lens 6.54 and transformer-lens 2.16:
`python tests/stores/make_cached.py`. The folder `cached` contains the files that SAELens'
`CacheActivationsRunner` wrote. `expected.safetensors` contains the tokens, and the activations that
TransformerLens' `run_with_cache` computes for them, in the same order. The runner shuffles only the
data set that it returns, not the rows on disk. Its order is in a file of indices, `cache-*.arrow`,
which no other file mentions.
"""

import shutil
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
SEQUENCES, CONTEXT, D_IN, VOCABULARY = 12, 8, 16, 20
# The number of sequences in a batch of the model, and in a file of the cache.
AT_ONCE = 4
HOOK = "blocks.1.hook_resid_post"


def model():
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    return HookedTransformer(
        HookedTransformerConfig(
            n_layers=2,
            d_model=D_IN,
            n_ctx=CONTEXT,
            d_head=D_IN // 2,
            n_heads=2,
            d_mlp=2 * D_IN,
            d_vocab=VOCABULARY,
            act_fn="gelu",
            seed=0,
            device="cpu",
        )
    )


def cache(folder, source, tokens):
    from datasets import Dataset
    from sae_lens import CacheActivationsRunner, CacheActivationsRunnerConfig

    config = CacheActivationsRunnerConfig(
        dataset_path="none",
        model_name="tiny",
        model_batch_size=AT_ONCE,
        hook_name=HOOK,
        d_in=D_IN,
        training_tokens=tokens.numel(),
        context_size=CONTEXT,
        new_cached_activations_path=str(folder),
        device="cpu",
        # A file has as many batches as fit into this size. SAELens fills the last file with the
        # first sequences again, so the number of sequences must be a multiple of the sequences in a
        # file.
        buffer_size_gb=AT_ONCE * CONTEXT * D_IN * 4 / 1e9,
        prepend_bos=False,
    )
    # SAELens would load a published model by its name, so replace its loader by one that returns
    # this model.
    with patch("sae_lens.cache_activations_runner.load_model", lambda **_: source):
        CacheActivationsRunner(
            config, override_dataset=Dataset.from_dict({"tokens": tokens.tolist()})
        ).run()


def main():
    folder = HERE / "cached"
    shutil.rmtree(folder, ignore_errors=True)
    source = model()
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, CONTEXT), generator=draw)
    cache(folder, source, tokens)
    with torch.no_grad():
        # Use the same batches, because the rounding of a sum may depend on the number of rows.
        parts = [
            source.run_with_cache(part, names_filter=HOOK)[1][HOOK]
            for part in tokens.split(AT_ONCE)
        ]
    save_file(
        {HOOK: torch.cat(parts), "token_ids": tokens.to(torch.int32)}, HERE / "expected.safetensors"
    )


if __name__ == "__main__":
    main()
