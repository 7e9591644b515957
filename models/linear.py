"""Linear: `nn.Linear`, with all cores at work on a few rows; prepacked copies of it; and dropout."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType

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
        """The matrix as `prepacked` has it, where it has the one of now."""
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


@dataclass(frozen=True, eq=False)
class _Copy:
    """A matrix in the order in which oneDNN reads it, and what it was made of."""

    weight: Tensor
    version: int
    numbers: Tensor  # keeps them where they are, should the weight get others
    packed: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> "_Copy":
        numbers = weight.detach()
        packed = torch.ops.mkldnn._reorder_linear_weight(numbers)
        return cls(weight, weight._version, numbers, packed)

    def is_of(self, weight: Tensor) -> bool:
        """Whether it stands for a weight, as far as PyTorch counts its changes."""
        return (
            weight is self.weight
            and weight._version == self.version
            and weight.data_ptr() == self.numbers.data_ptr()
        )

    def is_true(self) -> bool:
        """Whether its numbers are those of the weight."""
        return torch.equal(self.packed.to_dense().view(torch.int32), self.numbers.view(torch.int32))


_copies: ContextVar[Mapping[Linear, _Copy]] = ContextVar("copies", default=MappingProxyType({}))


@contextmanager
def prepacked(model: nn.Module) -> Iterator[None]:
    """Within it, three and more rows are multiplied with copies of a model's matrices, on a CPU.

    oneDNN otherwise orders a matrix anew for every product, which for few rows takes as long as the
    product: a batch of eight prompts generates about 1.3 times as fast with copies in that order. From
    five rows on the numbers are those without copies, to the last bit; of three and four they differ by
    rounding. The copies take as much memory as the matrices, and are the calling thread's until the
    block ends. Meanwhile a matrix that is replaced or changed in place is read itself.

    Args:
        model: a `Transformer`, or any module that contains one.

    Raises:
        ValueError: if nothing in the model can be prepacked: it takes float32 matrices of this
            package, of at least 2^17 numbers, on a CPU, and oneDNN.
        RuntimeError: at the end, if weights were changed through `.data`, which PyTorch does not count:
            what was computed since is of the old ones.

    >>> from models import Transformer, TransformerConfig, generate
    >>> config = TransformerConfig(vocab_size=900, n_ctx=9, n_layers=1, n_heads=2, d_model=256)
    >>> model = Transformer(config).eval()
    >>> with prepacked(model):
    ...     rows = generate(model, [[1, 2], [3], [4, 5, 6]], max_new_tokens=3)
    """
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module.is_large and _can_be_packed(module.weight)
    }
    if not linears:
        raise ValueError(
            "nothing to prepack: that takes float32 matrices of a models.Transformer, of at least "
            f"{LARGE} numbers, on a CPU, and oneDNN"
        )
    copies = {module: _Copy.of(module.weight) for module in linears.values()}
    before = _copies.get()
    _copies.set({**before, **copies})
    try:
        yield
    finally:
        _copies.set(before)
    changed = [
        name
        for name, module in linears.items()
        if copies[module].is_of(module.weight) and not copies[module].is_true()
    ]
    if changed:
        raise RuntimeError(
            "weights were changed through .data while prepacked copies stood for them, so what was "
            f"computed since is of the old ones: {', '.join(changed)}"
        )


def _can_be_packed(weight: Tensor) -> bool:
    return (
        _has_onednn()
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
