"""attach: puts hook points into a model, after checks that it can have them."""

from typing import Any

from torch import nn

from models.attached.attached import Attached
from models.attached.attention import register
from models.attached.configs import configs_of, kernel_name
from models.attached.example import Example, example_of, is_encoder_decoder, parameters_of
from models.attached.points import TOP
from models.attached.roles import Roles
from models.attached.setting_up import SetUp
from models.text.tokenizer import as_tokenizer


def attach(
    model: nn.Module,
    *,
    tokenizer: Any = None,
    example: Any = None,
    blocks: str | None = None,
    attn: str | None = None,
    mlp: str | None = None,
) -> Attached:
    """Puts hook points into a model of `transformers`, under the names of `models.Transformer`.

    `HookedRunner(model)` and the analyses of `interp` then work as on a plain transformer. Weights, state
    dict and outputs stay as they are. Where the points belong is found from a run on fourteen tokens and
    checked by a few more, so no architecture needs to be known. Attention by code of its own gets points if it
    is two products with a softmax between, or PyTorch's fused function. A point is left out where the model does not
    show its value, or where an edit of it could not take effect.

    An encoder and its decoder have points `encoder.blocks.*` and `decoder.blocks.*`, with `cross.*` for attention to the
    encoder. With an `example` that has images or sounds, towers have points `vision.blocks.*` and `audio.blocks.*`. Positions
    there are the tower's, `projected` is what it gives, and `merged` the stream of the text with that in it.

    A transformer of your own may be written with other classes: it needs an `nn.Embedding` or an `example`, and blocks
    that run one on another. Where they or their sublayers are not found, `blocks`, `attn` and `mlp` name them.

    A model that a tensor-parallel plan splits over processes is attached, run and edited by all of them alike; points
    hold the heads and neurons of all.

    Args:
        model: the model.
        tokenizer: its tokenizer, such as one of `transformers`. With it the model also reads strings.
        example: the arguments of a run, such as a processor gives, or the first one, a tensor. Models that read no tokens need
            it, and those that read images or sounds beside tokens for the points of their towers.
        blocks: the names of the blocks, such as `layers.*`; by default a `ModuleList` is looked for.
        attn, mlp: the names of the sublayers inside a block.

    Raises:
        ImportError: if `transformers` is not installed, or older than 5.6.
        TypeError: if the tokenizer or the example is none.
        ValueError: if the model is attached already, has other modules under our names, or no blocks, does not run on the
            example, gives NaN, is split over processes and has a part that is all zeros, or a named sublayer is not what is
            added to the stream.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from hooks import HookedRunner
    >>> sizes = GPT2Config(vocab_size=7, n_positions=9, n_embd=4, n_layer=1, n_head=2)
    >>> model = GPT2LMHeadModel(sizes).eval()
    >>> attach(model)
    Attached(GPT2LMHeadModel, 21 points)
    >>> _, cache = HookedRunner(model).run_with_cache(torch.tensor([[3, 1, 4]]))
    >>> cache["pattern", 0].shape
    torch.Size([1, 2, 3, 3])
    """
    what = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise TypeError("attach must come before torch.compile; got a compiled model")
    weights = [*model.parameters()]
    if all(weight.is_meta for weight in weights) and not hasattr(model, "_hf_hook"):
        raise ValueError(f"attach runs the model, so it must have weights; got {what} on meta")
    if any("hook_points" in vars(module) for module in model.modules()):
        raise ValueError("no part of the model must be attached already: detach(model) first")
    parts = ("encoder", "decoder") if is_encoder_decoder(model) else ()
    owners = [model, *map(dict(model.named_children()).get, parts)]
    if taken := [name for owner in owners for name in TOP if hasattr(owner, name)]:
        raise ValueError(f"{', '.join(TOP)} must be free for points; the model has {taken[0]}")
    default, given = example_of(model), None if example is None else example_of(model, example)
    if default is None and given is None:
        reads = ", ".join(parameters_of(model)[:3])
        raise ValueError(
            f"attach needs example=, the arguments of a run, for a {what}, which reads {reads}"
        )
    reader = as_tokenizer(tokenizer)
    if configs := configs_of(model):
        register({kernel_name(config) for config in configs.values()})
    attached = Attached(model)
    try:
        SetUp(attached, _runs_of(model, default, given), Roles(blocks, attn, mlp)).run()
    except BaseException:
        attached.remove()
        raise
    attached.tokenizer = reader
    return attached


def _runs_of(model: nn.Module, default: Example | None, given: Example | None) -> list[Example]:
    """The runs that points are found by: on tokens alone, where the model can, and on the user's example."""
    if given is None or default is None or is_encoder_decoder(model):
        return [example for example in (given, default) if example][:1]
    if given.is_text:
        return [given]
    try:
        default.logits(model)
    except ValueError:  # it needs images beside tokens
        return [given]
    return [default, given]
