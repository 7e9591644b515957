"""Cards of the features of a crosscoder, for one of its models."""

from collections.abc import Sequence

from hooks.base import Index, Texts, require_integer, shows_progress, without_gradients
from interp.features.cards import FeatureCards, Row, cards_of, require_features, rows_of
from interp.features.crosscoder import Crosscoder
from interp.features.members import Models, models_of, values_of_members
from interp.inputs.copies import unseen
from interp.kinds import require_made


@shows_progress
@without_gradients
def crosscoder_cards(
    models: Models,
    crosscoder: Crosscoder,
    texts: "Texts",
    features: Sequence[int],
    member: str | int,
    *,
    point: str | None = None,
    k: int = 8,
    pos: "Index | None" = None,
    batch: int = 16,
    progress: bool = True,
) -> FeatureCards:
    """Return a card for each feature of a crosscoder, as one of its models sees it.

    The values of features and the texts are the same for all models. The tokens that a feature
    promotes, and its nearest features, come from the decoder of the chosen model.

    Args:
        models: the model of each member, in the order of `crosscoder.names` or by name; one model
            if the members are its layers.
        crosscoder: the crosscoder.
        texts: the texts. Each model reads each text once.
        member: the model whose decoder, unembedding and tokenizer are used.
        point: the point that all members read. Default: the points in the files.
        features: the indices of the features.
        k: the number of examples, tokens and neighbours on each card. Default: 8.
        pos: the positions of each text that count. Position 0 is the first token that is not
            padding, and negative positions count from the last. Default: all positions.
        batch: the number of texts in a batch. Default: 16.
        progress: whether to show a bar or, outside a terminal, lines of progress. Default: True.

    Returns:
        The cards, in the order of `features`.

    Raises:
        ValueError: if there is no text, a feature does not exist, a point is unknown, or two models
            read the texts as different tokens.
        UnknownNameError: if a name is no member.

    >>> import torch
    >>> from torch import nn
    >>> from models import load
    >>> model, eye = load("pydoc-4l"), torch.eye(128)
    >>> both = Crosscoder(
    ...     torch.stack([eye, eye]), torch.stack([eye, eye]), torch.zeros(128),
    ...     torch.zeros(2, 128), nn.ReLU(), names=["base", "tuned"],
    ... )
    >>> cards = crosscoder_cards(
    ...     [model, model], both, ["def f(x): return x"], [0, 5], "tuned",
    ...     point="blocks.2.resid_post",
    ... )
    >>> [(card.index, card.n_tokens) for card in cards]
    [(0, 18), (5, 18)]
    """
    require_made("crosscoder", crosscoder, Crosscoder)
    index = crosscoder.index(member)
    require_integer("k", k)
    require_features(features, crosscoder.n_features)
    rows: list[Row] = []
    digests: set[str] = set()
    for text, values in values_of_members(models, crosscoder, texts, point=point, batch=batch):
        chosen = crosscoder.encode(values)[..., [*features]].float()
        rows += rows_of(text, chosen, counts=text.at(pos), is_new=unseen(text, digests))
    model = models_of(models, crosscoder)[index]
    W_dec, _ = crosscoder.decoder(index)
    return cards_of(model, rows, W_dec=W_dec, features=features, k=k)
