"""attach: puts hook points into a model of `transformers`, and checks that the points work.

1. Return the earlier attachment if its settings are equal, or else remove it (`settings`).
2. Run each example on the unchanged model, and again with every call recorded (`probe`).
3. Find the stacks of blocks (`stacks`), and the parts of each block (`layout`).
4. Add points to these parts, and hooks that pass values through the points (`points`).
5. Check that each point has the value that its name promises (`checks`). A point that fails a check
   is removed, and the reason is stored.
6. Return the object that analyses use (`attached`).
"""

from typing import Any

from torch import nn

from hooks.base import explains_calls
from models.attached.attached import Attached
from models.attached.attention import hooked_attention
from models.attached.checks import check_points
from models.attached.layout import Roles
from models.attached.original import examples_of, reading, register
from models.attached.points import place_points
from models.attached.probe import recorded
from models.attached.settings import AttachSettings, earlier_attachment, make_room
from models.attached.stacks import find_stacks
from models.mode import mode
from models.text.tokenizer import as_tokenizer


@explains_calls
def attach(
    model: nn.Module,
    *,
    tokenizer: Any = None,
    example: Any = None,
    blocks: str | None = None,
    attn: str | None = None,
    mlp: str | None = None,
) -> Attached:
    """Put hook points into a model of `transformers`, under the names of `models.Transformer`.

    After this, `HookedRunner(model)` and the analyses of `interp` work as on a plain transformer.
    The weights, the state dict and the outputs do not change. The points are found from a run on
    fourteen tokens, in evaluation mode, and checked by a few more runs, so no architecture needs to
    be known. A module that computes attention in its own code gets points if it computes two
    products with a softmax between them, or calls PyTorch's fused function. A point is left out if
    the model does not expose its value, or if an edit of it could not take effect. If the residual
    stream has several vectors for each token, its points have the axes `batch pos stream d_model`.

    An encoder and its decoder have points `encoder.blocks.*` and `decoder.blocks.*`, with `cross.*`
    for attention to the encoder. With an `example` that contains images or sounds, towers have
    points `vision.blocks.*` and `audio.blocks.*`. Their positions are positions in the tower.
    `projected` is the output of the tower, and `merged` is the stream of the text with this output
    inserted.

    You can also attach a transformer that you wrote yourself, with other classes. The model needs
    an `nn.Embedding` or an `example`, and blocks that each read the output of the block before. If
    the blocks or their sublayers are not found, name them with `blocks`, `attn` and `mlp`.

    If a tensor-parallel plan splits a model over processes, all processes must make the same calls
    to attach, run and edit it. Points show the heads and neurons of all processes.

    A second call for the same model returns the existing attachment. If the settings are different,
    or the modules, sizes or attention kernels of the model have changed, the points are created
    again. The model then has a new attachment. If this fails, the model has none.

    Args:
        model: the model.
        tokenizer: the model's tokenizer, for example from `transformers`. With a tokenizer, the
            model also reads strings. A second call without a tokenizer keeps the tokenizer of the
            first call.
        example: the arguments of a run, for example the output of a processor, or only the first
            argument, a tensor. Models that read no tokens need an example. Models that read images
            or sounds besides tokens need one for the points of their towers.
        blocks: the names of the blocks, for example `layers.*`, or of the `ModuleList` that
            contains them. Default: a `ModuleList` is searched.
        attn, mlp: the names of the sublayers inside a block.

    Returns:
        The attachment: the object that analyses use. `attachment.remove()`, or the end of a `with`
        statement, removes the points.

    Raises:
        ImportError: if `transformers` is not installed, or is older than 5.6.
        TypeError: if the tokenizer or the example has a wrong type.
        HookError: if points that must be created again have hooks, which would be lost.
        ValueError: if a part of the model, or a model that contains it, is already attached; if the
            model has other modules under the names of points, has no blocks, does not run on the
            example, or returns NaN; if the model is split over processes and a part is all zeros;
            if the output of a named sublayer is not added to the stream; or if a module cannot be
            read. The error names the module.

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
    earlier: Attached | None = earlier_attachment(model)
    settings = AttachSettings(example, blocks, attn=attn, mlp=mlp)
    reader = as_tokenizer(tokenizer)
    if earlier is not None and tokenizer is None:
        reader = earlier.tokenizer
    if earlier is not None and settings.hold_for(earlier.settings, model):
        earlier.tokenizer = reader
        return earlier
    make_room(model, earlier)
    examples = examples_of(model, example)
    register(model, hooked_attention)
    attached = Attached(model)
    try:
        # Dropout would make the runs differ, and points would fail their checks.
        with mode(model, training=False), reading(model, ""):
            probes = recorded(attached, examples)
            stacks = find_stacks(
                model, probes, roles=Roles(blocks, attn, mlp), kernels=attached.kernels
            )
            wirings = place_points(model, attached.forward, stacks=stacks, probes=probes)
            attached.read_through(stacks)
            for wiring in wirings:
                attached.left_out |= check_points(wiring)
    except BaseException:
        attached.remove()
        raise
    attached.tokenizer = reader
    settings.note(model)
    attached.settings = settings
    return attached
