"""TextMasks: the masks of real tokens in a run's texts, for every value of the run.

Most runs read one batch of texts. An encoder and its decoder read two batches, and each value
belongs to one of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from hooks.base.selection import Index, index_by_axis

NO_PADDING = -1
"""Stands for the number of a batch of texts, for values that read no text with padding."""


@dataclass(frozen=True)
class TextMasks:
    """The masks of the texts that the values of a run read.

    Attributes:
        batches: the masks of each batch of texts by axis, such as `pos` or `key`. Each mask is
            [batch, column] and True at real tokens.
        numbers: by the name of a value, the number of its batch of texts in `batches`, or
            `NO_PADDING`. Values that are not named here belong to batch 0.

    >>> import torch
    >>> masks = TextMasks(({"pos": torch.tensor([[False, True]])},), {"encoder": NO_PADDING})
    >>> masks.along("pos", "embed"), masks.along("pos", "encoder")
    (tensor([[False,  True]]), None)
    """

    batches: tuple[Mapping[str, Tensor], ...] = ()
    numbers: Mapping[str, int] = field(default_factory=dict)

    def along(self, axis: str, name: str | None = None) -> Tensor | None:
        """Return the mask [batch, column] along an axis of a value.

        The result is None if the texts of the value have no padding, or if the padding is unknown.

        Args:
            axis: the axis of the columns.
            name: the name of the value. Default: any value of batch 0.
        """
        number = 0 if name is None else self.numbers.get(name, 0)
        is_known = 0 <= number < len(self.batches)
        return self.batches[number].get(axis) if is_known else None

    def all_along(self, axis: str) -> list[Tensor]:
        """Return the masks along an axis, one for each batch of texts with a mask of this axis."""
        return [masks[axis] for masks in self.batches if axis in masks]

    def of_texts(self, batch: Index) -> "TextMasks":
        """Return the masks of some of the texts.

        The masks keep the axis `batch`, also if `batch` is an integer.
        """
        (index,) = index_by_axis(("batch",), {"batch": batch}, "the texts")
        rows = [index] if isinstance(index, int) else index
        batches = list[dict[str, Tensor]]()
        for masks in self.batches:
            batches.append({axis: mask[rows] for axis, mask in masks.items()})
        return TextMasks(tuple(batches), self.numbers)

    def tensors(self) -> dict[str, Tensor]:
        """Return all masks by name, as they are named in a file.

        For example, `pos` is a mask of the first batch of texts, and `pos.1` of the second.
        """
        named: dict[str, Tensor] = {}
        for number, masks in enumerate(self.batches):
            ending = f".{number}" if number else ""
            named |= {axis + ending: mask for axis, mask in masks.items()}
        return named

    @classmethod
    def read(cls, named: Mapping[str, Tensor], numbers: Mapping[str, int]) -> "TextMasks":
        """Return the masks that a file contains.

        Args:
            named: the masks by name. The method `tensors` made the names.
            numbers: the number of the batch of texts to which each value belongs.
        """
        batches: list[dict[str, Tensor]] = []
        for name, mask in named.items():
            axis, _, number = name.partition(".")
            while len(batches) <= int(number or 0):
                batches.append({})
            batches[int(number or 0)][axis] = mask
        return cls(tuple(batches), numbers)
