"""Jacobian lenses: mean Jacobians from the stream of each layer to the final stream.

`jacobian_fit` fits a lens to texts, and `published` is the form of the files of other libraries.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import require_integer, to_device, wide_dtype, without_gradients, writer_of
from interp.inputs.token_positions import SeveralTokens, tokens_of
from interp.inputs.words import token_ids
from interp.json_form import Table
from interp.protocol import n_logits, of
from interp.reading.affine import AffineLens
from interp.reading.lens_vectors import LensDecomposition, pursue
from interp.reading.published import read_published, write_published


@dataclass(frozen=True, eq=False, repr=False)
class JacobianLens(AffineLens):
    """Mean Jacobians, fitted by `jacobian_lens`.

    The lens maps a stream x entering block l to `weight[l] @ x`.

    Attributes:
        weight: one matrix for each block, the Jacobian. Row i computes entry i of the result.
        bias: zeros, one vector for each block.
        config_hash: the config hash of the model that the lens belongs to; empty if it is unknown.
        n_texts: the number of texts in the mean.
        squares: the mean of the squared Frobenius norms of the Jacobians of single texts.
        n_different: the effective number of texts, if some texts are copies. It is n² / Σ m² for n
            texts, with a term m² for each different text that occurs m times (Kish 1965, "Survey
            Sampling"). A mean over this number of different texts would have the same standard
            error. None if all texts are different.
        about: other facts, such as the name of the model, from a file of another library.

    >>> JacobianLens(torch.eye(2)[None], torch.zeros(1, 2), "", 1, torch.tensor([2.0]))
    JacobianLens [layer 1, d_model 2], mean of 1 text
    """

    n_texts: int
    squares: Float[Tensor, " layer"]
    n_different: float | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    _format: ClassVar[str] = "hookscope-jacobian-lens-1"

    def _tables(self) -> dict[str, Table]:
        """Return the standard error of each matrix, and the number of texts."""
        error = Table(self.error, "layer", "share of the matrix")
        return {"error": error, "n_texts": Table(self.n_texts, unit="texts")}

    @property
    def error(self) -> Float[Tensor, " layer"]:
        """The standard error of the matrix of each layer over texts, divided by the size of the
        matrix. Both are measured by the Frobenius norm.

        Copies of a text are taken into account; see `n_different`. The error is NaN for a single
        text, and for a lens of `from_published`, because the file does not contain `squares`.
        """
        n = self.n_texts if self.n_different is None else self.n_different
        of_mean = self.weight.square().sum((1, 2))
        variance = (self.squares - of_mean).clamp(min=0) / of_mean
        return (variance / (n - 1)).sqrt() if n > 1 else variance * torch.nan

    def merged(self, *others: "JacobianLens") -> "JacobianLens":
        """Return the lens of all texts of this lens and of other lenses, which were fitted on
        different texts.

        Raises:
            ValueError: if the lenses are of different models.
        """
        lenses = (self, *others)
        for lens in others:
            if (lens.weight.shape, lens.config_hash) != (self.weight.shape, self.config_hash):
                raise ValueError(
                    f"merged lenses must be of one model; got weights {list(self.weight.shape)} "
                    f"and {list(lens.weight.shape)}, config hashes {self.config_hash[:12]} and "
                    f"{lens.config_hash[:12]}"
                )
        n_texts = sum(lens.n_texts for lens in lenses)

        def mean(name: str) -> Tensor:
            """Return the mean of an attribute of the lenses, weighted by their numbers of texts.

            Args:
                name: the name of the attribute.
            """
            parts = [getattr(lens, name) * lens.n_texts for lens in lenses]
            return torch.stack(parts).sum(0) / n_texts

        n_different = n_texts**2 / sum(
            lens.n_texts**2 / (lens.n_different or lens.n_texts) for lens in lenses
        )
        return JacobianLens(
            weight=mean("weight"),
            bias=self.bias,
            config_hash=self.config_hash,
            n_texts=n_texts,
            squares=mean("squares"),
            n_different=n_different,
            about={} if any(lens.about != self.about for lens in others) else self.about,
        )

    @property
    def layers(self) -> list[int]:
        """The layers that have a matrix. The matrix of any other layer is NaN."""
        is_missing = self.weight[:, 0, 0].isnan().tolist()
        return [layer for layer, missing in enumerate(is_missing) if not missing]

    @classmethod
    def from_published(cls, path: str | os.PathLike[str]) -> "JacobianLens":
        """Load a lens from a file of the package jacobian-lens, TransformerLens or Neuronpedia.

        The form has no matrix for the stream that enters the first block, so layer 0 of the lens is
        NaN. Layer l of the lens is `J[l - 1]` of the file, because the file counts the streams
        after the blocks. The file does not contain a config hash. Only the sizes are checked when
        the lens is used.

        `huggingface_hub.hf_hub_download("neuronpedia/jacobian-lens", name)` downloads a file, such
        as `gpt2-small/jlens/Salesforce-wikitext/gpt2_jacobian_lens.pt`.

        Raises:
            FileNotFoundError: if the file does not exist.
            CacheError: if the file does not have this form, or two of its entries contradict each
                other.
        """
        published = read_published(path)
        weight = published.weight
        return cls(
            weight=weight,
            bias=torch.zeros_like(weight[..., 0]),
            config_hash="",
            n_texts=published.n_texts,
            squares=torch.full_like(weight[:, 0, 0], torch.nan),
            about=published.about,
        )

    def to_published(
        self, path: str | os.PathLike[str], dtype: torch.dtype = torch.float32
    ) -> None:
        """Write the lens as a file that TransformerLens and the package jacobian-lens load.

        The form has no place for layer 0, the bias, `squares` and the config hash; `save` keeps
        them.

        Args:
            path: the path of the file, with the suffix `.pt`.
            dtype: the dtype of the matrices. Published files have float16, with half the size.

        Raises:
            FileNotFoundError: if the directory does not exist.
            ValueError: if the path has another suffix, or no layer except layer 0 has a matrix.

        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/lens.pt"
        >>> lens = JacobianLens(torch.ones(3, 2, 2), torch.zeros(3, 2), "", 1, torch.ones(3))
        >>> lens.to_published(path)
        >>> JacobianLens.from_published(path)
        JacobianLens [layer 3, d_model 2], mean of 1 text, no matrix for layer 0
        """
        write_published(
            path,
            weight=self.weight,
            layers=self.layers,
            n_texts=self.n_texts,
            about=self.about,
            dtype=dtype,
        )

    @without_gradients
    def vectors(
        self, model: nn.Module, tokens: SeveralTokens, layer: int
    ) -> Float[Tensor, "*axes d_model"]:
        """Return the lens vector of each token at a layer: its row of W_U J.

        The product of the stream with a lens vector is the logit of the token by the lens, before
        the final norm. `edits.interchange(source, vector)` patches the stream along the vector,
        `edits.add(vector)` steers along it, and `edits.project_out(vector)` removes it.

        Args:
            model: the model of the lens, with `W_U`.
            tokens: tokens in any shape; or texts of one token each.
            layer: the layer; the vectors belong to the stream that enters it.

        Returns:
            The lens vectors, with the shape of `tokens` before `d_model`.

        Raises:
            TypeError: if the model has no `W_U` or no `config`.
            ValueError: if the lens is of another model, has no matrix for the layer, a token is not
                in the vocabulary, or a text is several tokens.

        >>> from models import load
        >>> model, zeros = load("pydoc-4l"), torch.zeros(4, 128)
        >>> lens = JacobianLens(2 * torch.eye(128).expand(4, -1, -1), zeros, "", 1, zeros[:, 0])
        >>> vector = lens.vectors(model, "a", layer=3)
        >>> torch.equal(vector, 2 * model.W_U[:, model.to_id("a")])
        True
        """
        jacobian, unembedding = self._parts(model, layer)
        ids = tokens_of(token_ids(model, tokens), most=torch.iinfo(torch.int8).max)  # of any shape
        flat = to_device(ids.flatten(), unembedding.device)
        require_integer("the largest token", int(flat.max()), least=0, most=n_logits(model) - 1)
        return (unembedding[:, flat].mT @ jacobian).view(*ids.shape, -1)

    @without_gradients
    def decompose(
        self, model: nn.Module, vectors: Float[Tensor, "*batch d_model"], layer: int, k: int = 25
    ) -> LensDecomposition:
        """Write vectors of the stream as sums of a few lens vectors with positive coefficients.

        Orthogonal matching pursuit selects the lens vectors (Gurnee et al. 2026); see
        `interp.reading.lens_vectors`. A vector may have fewer than `k` lens vectors, if no other
        lens vector points in the direction of the rest.

        Args:
            model: the model of the lens, with `W_U`.
            vectors: vectors of the stream that enters the layer, such as activations, directions of
                probes or decoder rows of dictionaries.
            layer: the layer.
            k: the largest number of lens vectors in a sum. Default: 25, as in the paper.

        Raises:
            TypeError: if the model has no `W_U` or no `config`.
            ValueError: if the lens is of another model, has no matrix for the layer, `k` is below
                1, there are no vectors, or a vector is 0 or not finite.

        >>> from models import load
        >>> model, zeros = load("pydoc-4l"), torch.zeros(4, 128)
        >>> lens = JacobianLens(2 * torch.eye(128).expand(4, -1, -1), zeros, "", 1, zeros[:, 0])
        >>> a, b = lens.vectors(model, ["a", "b"], layer=3)
        >>> lens.decompose(model, 0.5 * a + 0.3 * b, layer=3)
        LensDecomposition [selected 2] at layer 3: the first vector
          token   length in the stream  coefficient  remaining squared length
          64 'a'  0.932                 0.5          25.5%
          65 'b'  0.5627                0.3          0.0%
        """
        require_integer("k", k)
        jacobian, unembedding = self._parts(model, layer)
        if vectors.shape[-1] != len(jacobian) or not vectors.numel():
            raise ValueError(
                f"vectors must be one or more vectors [..., {len(jacobian)}]; "
                f"got {list(vectors.shape)}"
            )
        rows = to_device(vectors, unembedding.device).to(unembedding.dtype)
        rows = rows.reshape(-1, len(jacobian))
        sizes = rows.norm(dim=-1)
        if not ((sizes > 0) & sizes.isfinite()).all():
            raise ValueError(
                "vectors must be finite and not 0; got a vector that is 0 or not finite"
            )
        pursuit = pursue(rows, jacobian, unembedding=unembedding, k=k)
        shape = vectors.shape[:-1]
        writer = writer_of(model)
        words = None
        if writer is not None:
            first = pursuit.tokens[0].tolist()
            words = ["" if token < 0 else writer(token) for token in first]
        return LensDecomposition(
            tokens=pursuit.tokens.view(*shape, -1),
            coefficients=pursuit.coefficients.view(*shape, -1),
            lengths=pursuit.lengths.view(*shape, -1),
            shares=pursuit.shares.view(*shape, -1),
            rest=pursuit.rest.view(vectors.shape),
            layer=layer,
            words=words,
        )

    def _parts(
        self, model: nn.Module, layer: int
    ) -> tuple[Float[Tensor, "d_model d_model"], Float[Tensor, "d_model vocab"]]:
        """Return the matrix of a layer and the unembedding of a model, in one dtype of at least
        float32 and on one device.

        Raises:
            TypeError: if the model has no `W_U` or no `config`.
            ValueError: if the lens is of another model, or has no matrix for the layer.
        """
        unembedding = of(model, "W_U", "config").W_U
        self.check(model)
        require_integer("layer", layer, least=0, most=len(self.weight) - 1)
        if layer not in self.layers:
            raise ValueError(
                f"layer must be a layer with a matrix, one of {self.layers}; got {layer}"
            )
        dtype = wide_dtype(torch.promote_types(unembedding.dtype, self.weight.dtype))
        jacobian = to_device(self.weight[layer], unembedding.device).to(dtype)
        return jacobian, unembedding.to(dtype)

    def __repr__(self) -> str:
        """Return the sizes of the lens, the number of texts, the range of the standard errors, and
        the layers without a matrix.
        """
        missing = sorted({*range(len(self.weight))} - {*self.layers})
        listed = ", ".join(map(str, missing))
        plural = "s" * (self.n_texts != 1)
        parts = [super().__repr__(), f"mean of {self.n_texts} text{plural}"]
        errors = self.error[~self.error.isnan()]
        if len(errors):
            low, high = errors.min().item(), errors.max().item()
            parts.append(f"standard error {low:.2g} to {high:.2g} of a matrix")
        return ", ".join([*parts, f"no matrix for layer {listed}"] if missing else parts)
