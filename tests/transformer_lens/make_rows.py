"""Make `rows.npz`: `python -m tests.transformer_lens.make_rows`, with TransformerLens 2.16.1.

It runs the left column of the tables in `examples/guides/from_transformer_lens.ipynb`, with the
weights of the bundled model, and stores the first numbers of each result.
"""

# ruff: noqa: F401  # the lines of the tables use these imports

import contextlib
import io
import json
from pathlib import Path

import numpy as np

from tests.transformer_lens import rows

SKIPPED = ("evals.", "get_path_patch", "utils.test_prompt")


def main():
    import torch

    kept, names = {}, namespace()
    torch.manual_seed(0)
    for theirs, _ in rows.of_the_guide():
        if theirs.startswith(SKIPPED):
            continue
        with contextlib.redirect_stderr(io.StringIO()):
            value = rows.result(theirs, names)
        if (numbers := rows.numbers(value)) is not None:
            kept[theirs] = numbers
    arrays = {str(index): numbers for index, numbers in enumerate(kept.values())}
    np.savez_compressed(rows.FILE, names=json.dumps([*kept]), **arrays)
    print(len(kept), Path(rows.FILE).stat().st_size)


def namespace():
    """Return the names that the lines of the left column use.

    They are a model of TransformerLens with the weights of our model, texts, and a run.
    """
    import torch
    from transformer_lens import (
        FactoredMatrix,
        HookedTransformerKeyValueCache,
        SVDInterpreter,
        evals,
        patching,
        utils,
    )
    from transformer_lens.head_detector import detect_head

    ours = rows.guide()
    model, folded = theirs(ours["model"]), theirs(ours["model"])
    # Do not fold the biases of values. Otherwise the outputs of heads would not include them.
    folded.fold_value_biases = lambda state: state
    folded.process_weights_()
    folded.setup()
    model.set_use_attn_result(False)
    text, other, halve = ours["text"], ours["other"], ours["halve"]
    tokens, corrupted = model.to_tokens(text), model.to_tokens(other)
    right, wrong = model.to_single_token("1"), model.to_single_token("4")
    logits, cache = model.run_with_cache(tokens)
    _, folded_cache = folded.run_with_cache(tokens)
    torch.set_grad_enabled(True)

    def metric(logits):
        return logits[0, -1, right] - logits[0, -1, wrong]

    return locals()


def theirs(ours):
    """Return the same model in TransformerLens, with a tokenizer of characters."""
    import tokenizers
    import torch
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformers import PreTrainedTokenizerFast

    c = ours.config
    pieces = ours.to_pieces(range(c.vocab_size))
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({p: n for n, p in enumerate(pieces)}, unk_token=pieces[0])
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    # Do not use token 0, because TransformerLens takes it for padding in a generation.
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), pieces[-1])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    # With these settings, TransformerLens does not load another tokenizer from the hub.
    tokenizer.init_kwargs |= {"add_bos_token": True, "name_or_path": ""}
    config = HookedTransformerConfig(
        n_layers=c.n_layers,
        n_heads=c.n_heads,
        d_model=c.d_model,
        d_head=c.d_head,
        d_mlp=c.d_mlp,
        n_ctx=c.n_ctx,
        d_vocab=c.vocab_size,
        eps=c.norm_eps,
        act_fn={"gelu_tanh": "gelu_pytorch_tanh"}.get(c.activation, c.activation),
        default_prepend_bos=False,
        device="cpu",
    )
    model = HookedTransformer(config, tokenizer=tokenizer).eval()
    state = model.state_dict()
    for name, value in state.items():
        path, _, last = name.rpartition(".")
        if last in ("mask", "IGNORE"):
            continue
        if last in ("w", "b"):
            norm = ours.get_submodule(path)
            weight = norm.weight if last == "w" else norm.bias
        else:
            stacked = getattr(ours, last, torch.zeros_like(value))
            weight = stacked[int(path.split(".")[1])] if path.startswith("blocks") else stacked
        state[name] = weight.detach().clone().reshape(value.shape)
    model.load_state_dict(state)
    return model


if __name__ == "__main__":
    main()
