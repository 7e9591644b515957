"""Roles: the blocks and sublayers that a user names, checked by the same sums as those that are found."""

from collections.abc import Sequence
from typing import NamedTuple

from models.attached.hidden import is_in
from models.attached.norms import norm_of
from models.attached.probe import Call
from models.attached.sums import is_same
from models.attached.unreadable import AttachError


class Roles(NamedTuple):
    """The names that a user gives: of the blocks in a model, and of the sublayers in a block. None where they are looked for."""

    blocks: str | None = None
    attn: str | None = None
    mlp: str | None = None


def sublayer_of(block: Call, calls: Sequence[Call], name: str) -> Call:
    """The call of the sublayer with this name.

    Raises:
        ValueError: if the block has none, or it did not run once.
    """
    for call in calls:
        if call.name == f"{block.name}.{name}":
            return call
    names = ", ".join(name for name, _ in block.module.named_children())
    raise AttachError(
        f"{name!r} must be a module of each block that runs once; {block.name} has {names}"
    )


def gives(added: Call, sublayer: Call) -> bool:
    """Whether what is added is a sublayer's output, or what a norm or dropout makes of it."""
    reads = any(is_same(x, sublayer.output) for x in added.inputs)  # the same tensor
    is_plain = norm_of(added) is not None or not [*added.module.parameters()]
    return (reads and is_plain) or is_in(sublayer, added) or is_in(added, sublayer)


def require_added(sublayer: Call, added: Call | None, block: Call) -> None:
    """Refuses a sublayer that does not give what is added to the stream.

    Raises:
        ValueError: naming the sublayer.
    """
    if added is None or not gives(added, sublayer):
        raise AttachError(
            f"{sublayer.name.removeprefix(block.name)[1:]!r} must give what is added to the stream, up to a norm, dropout or a "
            f"number of the block; in {block.name} the stream is no such sum"
        )
