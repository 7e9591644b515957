"""Linear: `nn.Linear`, with all cores at work on a few rows; and dropout."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooks import Identity
from hooks._torch import Component, is_unwatched, linear_by_onednn
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
            if rows == 1 or (1 < rows <= 4 and d_out >= d_in):
                return self._split(x, rows)
            if rows and _has_onednn():
                return linear_by_onednn(x, self.weight, self.bias)
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
            and is_unwatched(x)
            and weight.is_contiguous()
        )

    @property
    def offset(self) -> Float[Tensor, " d_out"]:
        """The bias; zeros where there is none."""
        return self.weight.new_zeros(self.out_features) if self.bias is None else self.bias


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)


def dropout(config: TransformerConfig) -> nn.Module:
    """The config's dropout of values; nothing where its probability is zero."""
    return nn.Dropout(config.dropout) if config.dropout else Identity()
