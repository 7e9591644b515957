"""Linear: `nn.Linear`, with all cores at work on a few rows, or copies of the matrix; and dropout."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from hooks import Passage
from models.component import Component
from models.config import TransformerConfig

# Below it a matrix stays in the processor's cache, and a call costs more than the product.
LARGE = 2**17


class Linear(Component, nn.Linear):
    """`x weight^T + bias`, as `nn.Linear`, and faster on a CPU where no gradients are recorded.

    Generation multiplies one vector by each matrix. The BLAS that `nn.Linear` calls does that in one
    thread and waits for memory; here the matrix is cut into as many parts as there are threads, and they
    are multiplied side by side: two to four times as fast on two cores. More vectors go to oneDNN, which
    PyTorch carries too: 1.1 to 2.5 times as fast. So results with and without gradients, and of few and
    of many rows, differ by rounding.
    """

    def __init__(self, d_in: int, d_out: int, bias: bool = True) -> None:
        super().__init__(d_in, d_out, bias)
        self.is_large = d_in * d_out >= LARGE

    def forward(self, x: Float[Tensor, "*axes d_in"]) -> Float[Tensor, "*axes d_out"]:
        """The map of each row."""
        if self.is_large and self._is_free(x):
            d_out, d_in = self.weight.shape
            rows = x.numel() // d_in
            packed = self._packed() if rows > 2 else None
            if rows == 1 or (packed is None and 1 < rows <= 4 and d_out >= d_in):
                return self._split(x, rows)
            if rows and _has_onednn():
                matrix = self.weight if packed is None else packed
                return torch.ops.mkldnn._linear_pointwise(x, matrix, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def _split(self, x: Tensor, rows: int) -> Tensor:
        # One part a thread; of a very tall matrix parts that fit the processor's cache.
        d_out, d_in = self.weight.shape
        threads = torch.get_num_threads()
        parts = threads * max(1, d_out // (2048 * threads))
        whole = d_out // parts * parts
        cut = self.weight[:whole].view(parts, -1, d_in)
        vectors = x.reshape(rows, d_in)
        out = torch.bmm(cut, vectors.mT.expand(parts, -1, -1)).flatten(0, 1).mT
        if whole < d_out:
            out = torch.cat([out, F.linear(vectors, self.weight[whole:])], 1)
        out = out if self.bias is None else out + self.bias
        return out.reshape(*x.shape[:-1], d_out)

    def _packed(self) -> Tensor | None:
        """The copy that is being read, where it is of the matrix of now."""
        copy = _copies.get().get(self)
        return copy.packed if copy is not None and copy.is_of(self.weight) else None

    def _is_free(self, x: Tensor) -> bool:
        """Whether the product may be taken in any way: nothing watches the operations themselves."""
        weight = self.weight
        return (
            type(x) is Tensor
            and type(weight) in (nn.Parameter, Tensor)  # what others make of them has its own rules
            and x.device.type == weight.device.type == "cpu"
            and x.dtype == weight.dtype == torch.float32
            and x.shape[-1:] == weight.shape[1:]
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not torch.is_autocast_enabled("cpu")
            and not is_in_torch_dispatch_mode()  # fake tensors, or somebody counts operations
            and torch._C._get_tracing_state() is None
            and is_unwatched(x)
            and weight.is_contiguous()
        )

    @property
    def offset(self) -> Float[Tensor, " d_out"]:
        """The bias; zeros where there is none."""
        return self.weight.new_zeros(self.out_features) if self.bias is None else self.bias


class Copy(NamedTuple):
    """A matrix in the order in which oneDNN reads it, and what it was made of."""

    weight: Tensor
    version: int
    numbers: Tensor  # keeps them where they are, should the weight get others
    packed: Tensor

    def is_of(self, weight: Tensor) -> bool:
        """Whether it stands for a weight, as far as PyTorch counts its changes."""
        return (
            weight is self.weight
            and weight._version == self.version
            and weight.data_ptr() == self.numbers.data_ptr()
            and weight.shape == self.numbers.shape
        )


Copies = Mapping[Linear, Copy]
_copies: ContextVar[Copies] = ContextVar("copies", default=MappingProxyType({}))


def prepacked(model: nn.Module) -> Copies:
    """Copies of a model's matrices in the order in which oneDNN reads them; see `reading`.

    Raises:
        ValueError: if there is nothing to copy: it takes float32 matrices of this package, of at least
            2^17 numbers, on a CPU, and oneDNN.
    """
    copies = {
        module: Copy(
            weight,
            weight._version,
            weight.detach(),
            torch.ops.mkldnn._reorder_linear_weight(weight.detach()),
        )
        for module in model.modules()
        if isinstance(module, Linear) and _can_be_packed(weight := module.weight)
    }
    if not copies:
        raise ValueError(
            "prepack=True copies float32 matrices on a CPU that has oneDNN, of at least "
            f"{LARGE} numbers, and this model has none"
        )
    return copies


@contextmanager
def reading(copies: Copies) -> Iterator[None]:
    """Within it, three and more rows are multiplied with the copies.

    oneDNN otherwise orders a matrix anew for every product, which for few rows takes half as long as the
    product itself. From five rows on the numbers are the same to the last bit. A matrix that is
    replaced or changed in place meanwhile is read itself. Nothing sees a change through `.data`, so
    this is for blocks in which no user's code runs but hooks.
    """
    token = _copies.set(copies)
    try:
        yield
    finally:
        _copies.reset(token)


def _can_be_packed(weight: Tensor) -> bool:
    return (
        _has_onednn()
        and weight.numel() >= LARGE
        and type(weight) in (nn.Parameter, Tensor)
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and not weight.is_inference()  # whose changes are not counted
    )


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)


def is_unwatched(x: Tensor) -> bool:
    """Whether neither autograd, in reverse or forward mode, nor vmap follows what is done to a tensor."""
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return not (x.requires_grad or transformed)


def dropout(config: TransformerConfig) -> nn.Module:
    """The config's dropout of values; nothing where its probability is zero."""
    return nn.Dropout(config.dropout) if config.dropout else Passage()
