"""Try SAELens on a store: its trainer reads the rows, and its store reads the files of `to_arrow`.

Run it by hand, in an environment with sae-lens 6.54 and its TransformerLens, in which this package
is installed without its dependencies: `python tests/stores/try_saelens.py`. It takes a minute on
one core. It fails if the trained autoencoder explains less than half of the variance of held-out
rows, or if a number that is read back differs.
"""

import tempfile
from pathlib import Path

import torch

POINT, HOOK, CONTEXT, SIZE = "blocks.2.resid_post", "blocks.2.hook_resid_post", 64, 512


def texts():
    """Yield paragraphs of Python's own documentation."""
    from pydoc_data.topics import topics

    for text in topics.values():
        yield from (part for part in text.split("\n\n") if len(part) > 30 and part.isascii())


def trained(store, folder, steps=1500):
    """Return an autoencoder that SAELens' trainer trained on a store."""
    from sae_lens import LoggingConfig, TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import SAETrainerConfig
    from sae_lens.training.sae_trainer import SAETrainer

    config = TopKTrainingSAEConfig(d_in=128, d_sae=1024, k=32, device="cpu")
    sae = TopKTrainingSAE(config)
    options = SAETrainerConfig(
        total_training_samples=steps * SIZE,
        train_batch_size_samples=SIZE,
        lr=1e-3,
        # The default of `lr_end` does not work, so give a value.
        lr_end=1e-4,
        device="cpu",
        logger=LoggingConfig(log_to_wandb=False),
    )
    rows = (x for (x,) in store.batches(SIZE, seed=0, names=[POINT], epochs=None) if len(x) == SIZE)
    SAETrainer(cfg=options, sae=sae, data_provider=rows).fit()
    sae.save_inference_model(folder)


def read_back(folder, n):
    """Return the values of `n` contexts in order, read by the store of SAELens."""
    from sae_lens.training.activations_store import ActivationsStore

    store = ActivationsStore(
        model=None,
        dataset=None,
        cached_activations_path=str(folder),
        hook_name=HOOK,
        context_size=CONTEXT,
        d_in=128,
        dtype="float32",
        device=torch.device("cpu"),
        store_batch_size_prompts=1,
        train_batch_size_tokens=CONTEXT,
        n_batches_in_buffer=4,
        activations_mixing_fraction=0.0,
        total_training_tokens=n * CONTEXT,
        streaming=False,
        hook_head_index=None,
        prepend_bos=False,
        normalize_activations="none",
    )
    values, tokens = zip(*(store.get_raw_llm_batch() for _ in range(n)), strict=True)
    return torch.cat(values), torch.cat(tokens).long()


def main():
    from interp.features import load_sae
    from interp.store import HarvestConfig, harvest, to_arrow

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        config = HarvestConfig(context=CONTEXT, pack=True)
        several = [*texts()]
        cut = len(several) * 9 // 10
        store = harvest("pydoc-4l", several[:cut], POINT, out / "store", config)
        held = harvest("pydoc-4l", several[cut:], POINT, out / "held", config)
        trained(store, out / "sae")
        dictionary = load_sae(out / "sae")
        x = torch.cat([held.file(n)[POINT] for n in range(len(held.files))])
        rest = (x - dictionary(x)).square().sum() / (x - x.mean(0)).square().sum()
        print(f"{store}; the autoencoder leaves {rest:.3f} of the variance of {held}")
        assert rest < 0.5
        n = to_arrow(held, out / "arrow", {POINT: HOOK}, drop_short=True)
        values, tokens = read_back(out / "arrow", n)
        kept = [
            torch.cat([held.file(number)[name] for number in range(len(held.files))])
            for name in (POINT, "tokens", "pos")
        ]
        starts = (kept[2] == 0).nonzero()[:, 0].tolist()
        full = [
            s
            for s, end in zip(starts, [*starts[1:], len(kept[2])], strict=True)
            if end - s == CONTEXT
        ]
        expected = [torch.cat([part[s : s + CONTEXT] for s in full]) for part in kept]
        assert torch.equal(values, expected[0])
        assert torch.equal(tokens, expected[1].long())
        print(f"SAELens reads {n} contexts of {CONTEXT} tokens, all equal")


if __name__ == "__main__":
    main()
