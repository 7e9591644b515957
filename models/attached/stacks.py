"""The stacks of blocks in a run: for texts, for images and for sounds.

1. A stack is a `ModuleList` that is not inside another one. Each of its modules runs once, and
   reads the output of the previous module. A user can also name the modules (`stacks_of`).
2. The points of the stack that reads the text have no prefix. Its stream must have a position for
   each token (`require_position_of_each_token`). The names of points of an encoder and its decoder
   begin with `encoder.` and `decoder.`. The names of points of a tower, a stack that reads images
   or sounds, begin with `vision.` or `audio.`. The words in the path of its blocks decide which.
3. The points of a stack with a prefix are in a new module (`Tower`) with the name of the prefix, or
   in the model's own module if it has one of this name.
4. The features of a tower are inserted into the stream of the text. `merged` is that stream, and
   `projected` is the output of the tower that is inserted (`entries_of_towers`).
5. Embeddings come before the first block, and a norm and a linear map after the last (`parts`).
"""

import fnmatch
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hooks.base import is_same, tensors_in, without_gradients
from hooks.shared import OptionalPoints, Session
from models.attached.forward import Replaced
from models.attached.layout import (
    BlockLayout,
    Roles,
    axis_of_streams,
    candidates_of,
    layout_of,
    layout_of_streams,
)
from models.attached.original import (
    ADVICE,
    SHAPE,
    WITHOUT_ATTACH,
    AttachError,
    ExampleArguments,
    base_of,
    embedding_of,
    is_encoder_decoder,
    reading_part,
    text_config,
)
from models.attached.parts import (
    Embeddings,
    TracedNorm,
    Unembedding,
    embeddings_of,
    final_norm_of,
    unembed_of,
)
from models.attached.probe import Call, ProbeRun
from models.mode import mode


@dataclass(eq=False)
class Stack:
    """A stack of blocks.

    Attributes:
        name: the prefix of its points; empty for the blocks of the text.
        chain: the calls of its blocks, in order.
        probe: the record of the run in which the blocks were called. Rows and positions are two
            axes of its tensors, also if the blocks see them as one axis. With several vectors for
            each token, the stream is [batch, pos, stream, d_model].
        stream_axis: the index of the axis of streams in the model's own tensors; None if the blocks
            have one vector for each token.
        layouts: the parts of its blocks.
        left_out: the reason for each point, or group of points, that is missing, by its name.
        embeddings, final_norm, unembedding: the modules before and after its blocks; see `parts`.
            Each is None if it was not found. A tower has no embeddings, and only the stack of the
            text has an unembedding.
    """

    name: str
    chain: Sequence[Call]
    probe: ProbeRun
    stream_axis: int | None = None
    layouts: list[BlockLayout] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    embeddings: Embeddings | None = None
    final_norm: TracedNorm | None = None
    unembedding: Unembedding | None = None

    @property
    def path(self) -> str:
        """The name of the module that contains its blocks."""
        name = self.chain[0].name
        return name.rpartition(".")[0] or name

    @property
    def prefix(self) -> str:
        """The beginning of the names of its points."""
        return f"{self.name}." if self.name else ""

    @property
    def texts(self) -> Tensor | None:
        """The tokens [batch, pos] at its positions.

        They are None for an encoder, a decoder or a tower, or if the model reads no tokens.
        """
        return None if self.name else self.probe.example.tokens

    def root(self, model: nn.Module) -> nn.Module:
        """Return the innermost module that runs all its blocks."""
        around = around_of(self.probe, self.chain)
        return around[-1].module if around else model

    def owner(self, model: Any) -> Any:
        """Return the module that contains its points."""
        if not self.name:
            return model
        # Look only among the children, because a wrapper of adapters also returns the attributes of
        # the model inside it.
        children = dict(model.named_children())
        if self.name not in children:
            kind = Tower if self.name in ("encoder", "decoder") else OptionalTower
            children[self.name] = kind(self.root(model))
            setattr(model, self.name, children[self.name])
        return children[self.name]


class Tower(nn.Module):
    """The points of a stack other than the stack of the text.

    `root` is the module that runs its blocks. It is not a submodule of the tower.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        vars(self)["root"] = root

    @property
    def main_input_name(self) -> str:
        """The name of the encoder's main argument, which `generate` reads from `model.encoder`."""
        return str(getattr(vars(self)["root"], "main_input_name", "input_ids"))


class OptionalTower(Tower, OptionalPoints):
    """The points of a tower, which runs only if there is an image or a sound."""


class OwnPart(Replaced):
    """A replacement of a model's `get_encoder` or `get_decoder`.

    The original method returns the module with the name `encoder` or `decoder`. In some attached
    models, this is the `Tower` with the points.
    """

    def __init__(self, model: Any, name: str) -> None:
        super().__init__(model, name)
        self.part = self.inner()

    def __call__(self, modality: Any = None) -> Any:
        """Return the model's own module."""
        return self.part if modality is None else self.inner(modality=modality)


def find_stacks(
    model: nn.Module, probes: Sequence[ProbeRun], roles: Roles, kernels: set[str]
) -> list[Stack]:
    """Return the stacks of all runs with the layouts of their blocks, the stack of the text first.

    Args:
        model: the model.
        probes: a run of texts, a run with images or sounds, or both.
        roles: the modules that the user names.
        kernels: the names of the attention functions that the model asks for.

    Raises:
        AttachError: if there is no stack, the output of a named sublayer is not added to the
            stream, or the stream of a text does not have a position for each token.
    """
    stacks = stacks_of(model, probes, roles.blocks)
    config = text_config(model)
    for stack in stacks:
        known = roles if stack.name in ("", "encoder", "decoder") else Roles()
        for call in stack.chain:
            with reading_part(model, call.name):
                if stack.stream_axis is None:
                    stack.layouts.append(layout_of(call, stack.probe, known, config))
                else:
                    candidates = candidates_of(call, stack.probe, known)
                    stack.layouts.append(layout_of_streams(candidates))
        stack.left_out |= _left_out(model, stack, kernels)
        if stack.name:
            for layout in stack.layouts:
                layout.experts = None
    for stack in stacks:
        require_position_of_each_token(model, stack)
        with reading_part(model, stack.path):
            _find_ends(model, stack)
    return stacks


def _find_ends(model: nn.Module, stack: Stack) -> None:
    """Set the embeddings, the final norm and the unembedding of a stack."""
    probe = stack.probe
    first, last = stack.chain[0], stack.chain[-1]
    has_streams = stack.stream_axis is not None
    root = stack.root(base_of(model)) if stack.name else model
    if stack.name in ("encoder", "decoder") or stack.texts is not None:
        # The first of several vectors of a token is its embedding.
        stream = first.inputs[0][:, :, 0] if has_streams else first.inputs[0]
        stack.embeddings = embeddings_of(model, root, probe=probe, first=first, stream=stream)
    stack.final_norm = final_norm_of(root, probe, last, has_streams)
    if stack.texts is not None and not has_streams:
        stack.unembedding = unembed_of(model, probe, last)


def _left_out(model: nn.Module, stack: Stack, kernels: set[str]) -> dict[str, str]:
    """Return the reasons why a stack may have no points of attention, experts or norms."""
    why = dict[str, str]()
    inside = nn.ModuleList(call.module for call in stack.chain).modules()
    times = max(stack.probe.attention[module] for module in inside)
    if times > 1 and stack.name:
        why["attn"] = f"attention ran {times} times; give an example with one image or sound"
    elif not stack.probe.attention:
        kind = type(model).__name__
        why["attn"] = (
            f"{kind} has no attention, or computes attention in a way that is not recognised"
        )
    for experts in filter(None, (layout.experts for layout in stack.layouts)):
        if stack.name:
            why["mlp"] = "experts have points in the blocks of the text only"
        else:
            why |= experts.left_out
    if any(weight.is_meta for weight in model.parameters()):
        why["scale"] = "the weights of some norms are stored elsewhere until they run"
    if others := [kernel for kernel in kernels if kernel not in ("eager", "sdpa")]:
        rule = "attn_implementation must be 'eager' or 'sdpa' for these"
        why["scores"] = why["pattern"] = f"{rule}; got {others[0]!r}"
    return why


def stacks_of(model: nn.Module, probes: Sequence[ProbeRun], blocks: str | None) -> list[Stack]:
    """Return the stacks of all runs. If there is a stack of the text, it comes first.

    Args:
        model: the model.
        probes: a run of texts, a run with images or sounds, or both.
        blocks: a glob that matches the names of the blocks. With None, the blocks are searched.

    Raises:
        ValueError: if there is no stack.
    """
    stacks = list[Stack]()
    known = set[nn.Module]()
    for probe in probes:
        chains = _chains(probe, model, blocks)
        new = [found for found in chains if found[0][0].module not in known]
        if is_encoder_decoder(model):
            # If several stacks have the same name, take the first one. Stacks with attention come
            # first.
            named = {
                _name(chain, "encoder|decoder", "encoder"): n
                for n, (chain, *_) in reversed([*enumerate(new)])
            }
        else:
            # Towers do not run on tokens alone. So in a run of texts, take only the first stack.
            new = new[:1] if probe.example.is_text else new
            named = _named_towers(new, probe.example.tokens, has_text=bool(stacks))
        for name, n in named.items():
            stack = Stack(name, *new[n])
            stacks.append(stack)
            known |= {call.module for call in stack.chain}
    return sorted(stacks, key=lambda stack: (stack.name != "", stack.chain[0].began))


def _named_towers(
    stacks: Sequence[tuple[list[Call], ProbeRun, int | None]],
    tokens: Tensor | None,
    has_text: bool,
) -> dict[str, int]:
    """Return a name for each stack, with the index of the stack.

    The names of a stack's points begin with the name of the stack: `vision` or `audio`, then
    `vision_2` and so on for more stacks of one kind. The stack of the text has an empty name. It is
    the last stack whose stream has the shape of the tokens, or else the only stack.

    Args:
        stacks: the calls of the blocks of each stack, with the run and the axis of streams.
        tokens: the tokens that the model reads; None if it reads no tokens.
        has_text: whether an earlier run found the stack of the text. Then `stacks` does not contain
            it, and no stack gets the empty name.
    """
    order = sorted(range(len(stacks)), key=lambda n: stacks[n][0][0].began)
    shapes = {n: stacks[n][0][0].inputs[0].shape[:2] for n in order}
    of_texts = [n for n, shape in shapes.items() if tokens is not None and shape == tokens.shape]
    main = None
    if not has_text and of_texts:
        main = of_texts[-1]
    elif not has_text and len(stacks) == 1:
        main = 0
    counts = Counter[str]()
    named = dict[str, int]()
    for n in order:
        if n == main:
            name = ""
        else:
            name = "audio" if _name(stacks[n][0], "audio|speech|sound", "") else "vision"
        counts[name] += 1
        named[name if counts[name] == 1 else f"{name}_{counts[name]}"] = n
    return named


def _name(chain: Sequence[Call], words: str, default: str) -> str:
    """Return the first of some words in the path of a stack's blocks, or else a default.

    Args:
        chain: the calls of the blocks.
        words: the words, separated by `|`.
        default: the result if the path contains none of them.
    """
    word = re.search(words, chain[0].name)
    return word.group() if word else default


def _chains(
    probe: ProbeRun, model: nn.Module, blocks: str | None
) -> list[tuple[list[Call], ProbeRun, int | None]]:
    """Return the calls of the blocks of each stack, the record, and the axis of streams.

    The record has rows and positions as two axes. The axis is None for one vector for each token.

    The stacks are the lists of modules with attention, ordered by their number of weights, the
    largest first. If no attention is recognised, the only stack is the largest list. In a model
    with an encoder and a decoder, lists without recognised attention follow, because they may be
    one of these two.

    Raises:
        AttachError: if no list is a chain of blocks.
    """
    lists = [_named(model, blocks)] if blocks else _outermost(model)
    called = {call.module for call in probe.calls}
    ran = [listed for listed in lists if called & {*listed}]
    ran.sort(key=_n_weights, reverse=True)
    candidates = [listed for listed in ran if _attends(listed, probe)]
    if is_encoder_decoder(model):
        candidates += [listed for listed in ran if listed not in candidates]
    stacks = []
    problem = "has no list of blocks that runs"
    for listed in candidates or ran[:1]:
        calls_of_list = [call for call in probe.calls if call.module in {*listed}]
        times = Counter(call.module for call in calls_of_list)
        first = next((call.inputs[0] for call in calls_of_list if call.inputs), torch.empty(0))
        tokens = probe.example.tokens
        texts = SHAPE if tokens is None else (tokens.shape[0], tokens.shape[1])
        axis = axis_of_streams(calls_of_list[0], probe, texts) if calls_of_list else None
        apart = probe.apart(_shape(first) if axis is None else texts)
        if axis == 0:
            apart = apart.with_streams_third(first)
        calls = {call.module: call for call in apart.calls}
        chain = [calls[block] for block in listed if block in calls]
        if why := _problem(chain, {times[block] for block in listed}, 3 if axis is None else 4):
            problem = f"has blocks in {_list_of(model, listed)!r} that {why}"
        else:
            stacks.append((chain, apart, axis))
    if not stacks:
        raise AttachError(
            "the model must have a ModuleList of blocks that run once each, in order, on a stream "
            f"[batch, pos, d_model]; {type(model).__name__} {problem} ({ADVICE})"
        )
    return stacks


def _n_weights(blocks: Sequence[nn.Module]) -> int:
    """Return the number of weights of some blocks."""
    return sum(_n_weights_of(block) for block in blocks)


def _n_weights_of(block: nn.Module) -> int:
    """Return the number of weights of one block."""
    return sum(weight.numel() for weight in block.parameters())


def _attends(blocks: Sequence[nn.Module], probe: ProbeRun) -> bool:
    """Return whether a module of some blocks computed attention."""
    return any(probe.attention[module] for module in nn.ModuleList(blocks).modules())


def _list_of(model: nn.Module, blocks: Sequence[nn.Module]) -> str:
    """Return the name of the module that contains some blocks."""
    name = next(name for name, module in model.named_modules() if module is blocks[0])
    return name.rpartition(".")[0] or name


def entries_of_towers(
    model: Any, probe: ProbeRun, text: Sequence[Call], towers: Sequence[Stack]
) -> tuple[nn.Module | None, dict[str, nn.Module]]:
    """Return the modules at which the features of towers enter the stream of the text.

    Features are the outputs of a tower, mapped to vectors of the stream.

    Args:
        model: the model.
        probe: a run with features.
        text: the calls of the text's blocks; they may be from another run.
        towers: the stacks of the towers, with calls in `probe`.

    Returns:
        The module that reads the stream with the features, and for each tower the module that
        returns its features. If the model reads no features, these are None and an empty dict.
    """
    calls = {call.module: call for call in probe.calls}
    tokens = calls[embedding].output if (embedding := embedding_of(model)) in calls else None
    text = [calls[call.module] for call in text]
    ended = max(tower.chain[-1].ended for tower in towers)
    for call in around_of(probe, text):
        merged = next((x for x in call.inputs if x.shape == text[0].inputs[0].shape), None)
        if merged is None or tokens is None or tokens.shape != merged.shape:
            continue
        inserted = merged[(merged != tokens).any(-1)]
        between = [earlier for earlier in probe.calls if ended < earlier.began < call.began]
        returning = [earlier.module for earlier in between if _returned(earlier, inserted)]
        # If several modules return the features, take the last one. A module that ran several times
        # counts at its first call.
        distinct = [*dict.fromkeys(returning)]
        return call.module, {tower.name: distinct[-1] for tower in towers if distinct}
    return None, {}


def _returned(call: Call, features: Tensor) -> bool:
    """Return whether the output of a call contains exactly these features, in some shape."""
    output = call.output
    if output is None or output.numel() != features.numel():
        return False
    # The features are copied into the stream, so the bits are equal.
    return is_same(output.reshape(features.shape), features)


def around_of(probe: ProbeRun, chain: Sequence[Call]) -> list[Call]:
    """Return the calls of modules that run all of a stack, the outermost call first."""
    first, last = chain[0], chain[-1]
    return [call for call in probe.calls if call.began < first.began and call.ended > last.ended]


def _outermost(model: nn.Module) -> list[list[nn.Module]]:
    """Return the modules of each `ModuleList` that is not inside another one."""
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
    }
    inside_a_list = tuple(f"{name}." for name in lists)
    return [[*blocks] for name, blocks in lists.items() if not name.startswith(inside_a_list)]


def _named(model: nn.Module, blocks: str) -> list[nn.Module]:
    """Return the modules whose names match a glob, or the modules of the list with this name.

    Raises:
        AttachError: if no module matches.
    """
    depth = blocks.count(".")
    chosen = [
        module
        for name, module in model.named_modules()
        if name.count(".") == depth and fnmatch.fnmatchcase(name, blocks)
    ]
    if len(chosen) == 1 and isinstance(chosen[0], nn.ModuleList):
        return [*chosen[0]]
    if not chosen:
        names = ", ".join(name for name, _ in model.named_children())
        raise AttachError(
            f"blocks must be the names of modules, such as 'layers.*'; {blocks!r} matches no "
            f"module (the model has {names})"
        )
    return chosen


def _shape(stream: Tensor) -> tuple[int, int]:
    """Return the rows and positions of a stream, which may share an axis."""
    if stream.ndim == 2:
        return SHAPE if len(stream) == SHAPE[0] * SHAPE[1] else (1, len(stream))
    return (stream.shape[0], stream.shape[1]) if stream.ndim > 1 else SHAPE


def _meaning(call: Call) -> str:
    """Return a remark for an error: the probable meaning of a block's output with four axes.

    For another number of axes, the remark is empty.
    """
    if call.output is None or call.output.ndim != 4:
        return ""
    kinds = (nn.Conv2d, nn.ConvTranspose2d)
    if any(isinstance(module, kinds) for module in call.module.modules()):
        return " (a feature map of convolutions, [batch, channel, height, width])"
    if call.output.shape[:2] == SHAPE:
        return " (several streams for each token)"
    return " (positions in rows and columns, or several streams)"


def _problem(chain: Sequence[Call], times: set[int], n_axes: int) -> str | None:
    """Return the reason why calls are not a chain of blocks; None if they are.

    Args:
        chain: the calls.
        times: how many times the blocks ran. It must contain only 1.
        n_axes: the number of axes of the stream.
    """
    if times != {1}:
        return f"run {' or '.join(map(str, sorted(times)))} times"
    for call in chain:
        if not call.inputs or call.output is None or call.output.ndim != n_axes:
            if call.output is None:
                return "return no tensor"
            return f"return {[*call.output.shape]}{_meaning(call)}"
    # Nothing is computed between blocks, so there is no rounding.
    for before, call in itertools.pairwise(chain):
        if not is_same(before.output, call.inputs[0]):
            return "do not read the output of the block before"
    return None


def require_position_of_each_token(model: nn.Module, stack: Stack) -> None:
    """Require a stream [batch, pos, d_model] with a position for each token.

    Stacks of images and sounds are not checked. The stream of an encoder or a decoder may have
    another number of positions, for example with an image. But it must not have the axes
    [pos, batch, d_model].

    Raises:
        AttachError: if the positions are different. The error describes the positions of the
            stream.
    """
    tokens = _tokens_of(stack)
    stream = stack.chain[0].inputs[0]
    if tokens is None or tokens.shape == stream.shape[:2]:
        return
    rows, n_pos = tokens.shape
    stream_rows, stream_pos = stream.shape[:2]
    advice = WITHOUT_ATTACH
    if (stream_rows, stream_pos) == (n_pos, rows):
        why = "its blocks read [pos, batch, d_model], with positions first"
    elif stack.texts is None:
        return
    elif base_of(model) is not model and _positions(base_of(model), stack, n_pos) == n_pos:
        why = f"an adapter puts {stream_pos - n_pos} virtual tokens before each text"
        advice = "attach its base model, and pass the adapter as run="
    else:
        why = _reason(n_pos, stream_pos, _positions(model, stack, n_pos - 1))
    raise AttachError(
        f"the stream must have a position for each of {n_pos} tokens of {rows} texts; got "
        f"{[*stream.shape]} in {stack.path!r} of a {type(model).__name__}: {why} ({advice})"
    )


def _tokens_of(stack: Stack) -> Tensor | None:
    """Return the tokens that a stack reads; None for a stack that reads no tokens."""
    example: ExampleArguments = stack.probe.example
    if stack.name == "decoder":
        decoded = example.kwargs.get("decoder_input_ids")
        return decoded if isinstance(decoded, Tensor) and decoded.ndim == 2 else None
    return example.tokens if stack.name in ("", "encoder") else None


def _reason(n_pos: int, stream_pos: int, shorter: int | None) -> str:
    """Return the part of an error that explains why the stream does not have one position per
    token.

    Args:
        n_pos: the number of tokens.
        stream_pos: the number of positions of the stream.
        shorter: the number of positions of a text with one token less; None if it is unknown.
    """
    if stream_pos < n_pos:
        return f"it joins tokens, {n_pos} of them into {stream_pos}"
    if shorter == stream_pos - 1:
        return f"it adds {stream_pos - n_pos} positions to each text"
    if shorter == stream_pos:
        return "it pads texts to a multiple of some length"
    if shorter is not None and shorter * n_pos == stream_pos * (n_pos - 1):
        return f"it has {stream_pos // n_pos} positions for each token, in several streams"
    return "its positions are not the positions of the tokens"


@without_gradients
def _positions(model: Any, stack: Stack, n_pos: int) -> int | None:
    """Return the stream's positions for texts of `n_pos` tokens; None if the model does not run."""
    example = stack.probe.example
    counts = list[int]()

    def note(args: Any, kwargs: Any) -> None:
        counts.append(next(tensors_in((args, kwargs))).shape[1])

    def cut(value: Any) -> Any:
        tokens = example.tokens
        is_by_token = isinstance(value, Tensor) and tokens is not None
        return value[:, :n_pos] if is_by_token and value.shape[:2] == tokens.shape else value

    args = [*map(cut, example.args)]
    kwargs = {name: cut(value) for name, value in example.kwargs.items()}
    try:
        with mode(model, training=False), Session() as session:
            session.before(stack.chain[0].module, note)
            model(*args, **kwargs)
    # Models raise different errors if the length of texts is fixed.
    except Exception:
        return None
    return counts[0] if counts else None
