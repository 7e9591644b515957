"""The induction exercise of the TransformerLens course: find the heads, ablate them, patch them.

Comments show the same line in TransformerLens. The guide
`examples/guides/from_transformer_lens.ipynb` has a table of all lines.

    python examples/from_transformer_lens.py
"""

from hooks import HookedRunner
from interp import (
    Pairs,
    activation_patching,
    cross_entropy,
    edits,
    head_scores,
    repeated_tokens,
    sweep,
)
from models import load, next_token_loss

PERIOD = 20


def main() -> int:
    """Print the induction heads, the loss without each head, and the share of the answer that
    each head restores.
    """
    # HookedTransformer.from_pretrained(...). The model and its hooks are two objects here.
    model = load("pydoc-4l")
    runner = HookedRunner(model)

    # torch.randint and torch.cat: random tokens twice; the second time they can be copied.
    tokens = repeated_tokens(model.config.vocab_size, PERIOD)
    # run_with_cache(tokens, names_filter=lambda name: name.endswith("pattern"))
    logits, cache = runner.run_with_cache(tokens, names="*.pattern")
    loss = next_token_loss(logits, tokens)  # return_type="loss", loss_per_token=True
    first, second = loss[:, :PERIOD].mean().item(), loss[:, PERIOD:].mean().item()
    print(f"loss at first {first:.2f}, of the copy {second:.2f} nats")

    # pattern.diagonal(1 - PERIOD).mean() of each head, in cache["pattern", layer]
    scores = head_scores(model, cache, "induction")
    print(f"\nattention to what followed the earlier copy\n{scores.top(3)}")

    # run_with_hooks(tokens, fwd_hooks=[(get_act_name("z", layer), hook)]) for every head: one call
    # here.
    heads = [(layer, head) for layer in range(4) for head in range(4)]
    ablations = [{f"blocks.{layer}.attn.z": edits.zero(head=head)} for layer, head in heads]
    effects = sweep(model, tokens, ablations, cross_entropy(tokens)).mean()  # [edit], in nats
    largest = sorted(zip(effects.tolist(), heads, strict=True), reverse=True)[:3]
    for effect, (layer, head) in largest:
        print(f"without head {layer}.{head} the loss is {effect:+.2f} nats")

    # patching.get_act_patch_attn_head_out_all_pos(model, corrupted_tokens, clean_cache, metric)
    pairs = Pairs("ZQXJ-KV81 or ZQXJ-KV8", "ZQXJ-KV84 or ZQXJ-KV8", ("1", "4"))
    patched = activation_patching(model, pairs, "z")
    print(f"\nshare of the answer that a head's output brings back\n{patched.normalized().top(3)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
