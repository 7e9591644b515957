"""Copies of texts: examples with the same real tokens, whatever their padding.

1. Hash the real tokens of each example, together with the other inputs that the model reads for it.
2. Examples with the same hash are copies of one text. A cache does not keep all inputs of its run,
   such as images. So two examples of a cache are copies only if their values agree as well.
3. Number the different texts from 0, so that copies have the same number. An analysis with
   held-out data puts copies into the same part, gives them the same label where it draws random
   labels as a control, and counts them once in its intervals.
"""

import hashlib
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooks import ActivationCache
from hooks.base import Placement, Text, axis_of_rows, is_listed, is_rounding, storage, without_rows
from interp.inputs.cached import text_of
from interp.inputs.parts import part_now

_OF_DECODER = {"decoder_input_ids", "decoder_attention_mask"}


def digests(*texts: Text) -> list[str]:
    """Return a hash of each example.

    Args:
        texts: a batch of texts, in which each row is an example. Or several batches of the same
            size, such as clean and corrupted texts. Then row i of all batches is example i.

    >>> mask = torch.tensor([[False, True, True], [True, True, False]])
    >>> first, second = digests(Text(torch.tensor([[0, 3, 1], [3, 1, 0]]), mask))
    >>> first == second == digests(Text(torch.tensor([[3, 1]])))[0]
    True
    """
    return [hash_of_example for hash_of_example, _ in hashed_examples(*texts)]


def hashed_examples(*texts: Text) -> list[tuple[str, bool]]:
    """Return a hash of each example, and whether its text is the same in all batches.

    Args:
        texts: see `digests`.

    >>> one, other = Text(torch.tensor([[3, 1], [4, 1]])), Text(torch.tensor([[3, 2], [4, 1]]))
    >>> [is_equal for _, is_equal in hashed_examples(one, other)]
    [False, True]
    """
    tokens_by_example = zip(*map(_tokens, _on_cpu(texts)), strict=True)
    inputs_by_example = zip(*map(_other_inputs, texts), strict=True)
    examples = []
    for tokens, other_inputs in zip(tokens_by_example, inputs_by_example, strict=True):
        parts = tokens + tuple(filter(None, other_inputs))
        is_equal = all(
            inputs == (tokens[0], other_inputs[0])
            for inputs in zip(tokens, other_inputs, strict=True)
        )
        examples.append((_hashed(repr(parts).encode()), is_equal))
    return examples


def numbered(
    hashes: Sequence[str], are_copies: Callable[[int, int], bool] | None = None
) -> list[int]:
    """Number the different texts, and return for each example the number of its text.

    The first example has text 0. Copies have the same number.

    Args:
        hashes: the hash of each example.
        are_copies: a function of the indices of two examples with the same hash, which returns
            whether the examples are copies. Default: they are always copies.

    >>> numbered(["a", "b", "a", "c"])
    [0, 1, 0, 2]
    """
    numbers: list[int] = []
    # The first example of each text, by the hash of the text.
    first_examples: dict[str, list[int]] = {}
    n_texts = 0
    for example, digest in enumerate(hashes):
        candidates = first_examples.setdefault(digest, [])
        copies = (first for first in candidates if are_copies is None or are_copies(first, example))
        original = next(copies, None)
        if original is None:
            candidates.append(example)
            numbers.append(n_texts)
            n_texts += 1
        else:
            numbers.append(numbers[original])
    return numbers


def groups(
    hashes: Sequence[str], are_copies: Callable[[int, int], bool] | None = None
) -> tuple[int, ...] | None:
    """Return for each example the number of its text, or None if all texts are different.

    A part of many examples records the hashes, so that copies in other parts are found too.

    Args:
        hashes, are_copies: see `numbered`.
    """
    if (part := part_now()) is not None:
        part.digests = hashes
        part.compares_values = are_copies is not None
    numbers = numbered(hashes, are_copies)
    return tuple(numbers) if len({*numbers}) < len(numbers) else None


def groups_of_cache(
    cache: ActivationCache, values: Float[Tensor, "*axes example"], text: Text | None = None
) -> tuple[int, ...] | None:
    """Return for each example of a cached run the number of its text.

    Two examples are copies if they have the same real tokens and the same values in a table, up to
    rounding. The values tell examples apart that differ in other inputs, such as images.

    Args:
        cache: the cache.
        values: the table, which was computed from the cache.
        text: the texts of the cache, on the CPU. Default: the texts are read from the cache.

    Returns:
        The numbers. None if all texts are different, if the cache does not know its tokens, or if
        the examples of the table are not all texts of the run.
    """
    text = text_of(cache) if text is None else text
    if text is None or cache.is_part or len(text.tokens) != values.shape[-1]:
        return None
    return groups(digests(text), same_values(values.detach()))


def same_values(values: Float[Tensor, "*axes example"]) -> Callable[[int, int], bool]:
    """Return a function of two examples that returns whether their values agree up to rounding."""
    columns = values.reshape(-1, values.shape[-1])

    def are_equal(first: int, second: int) -> bool:
        return bool(is_rounding(columns[:, first], columns[:, second]).all())

    return are_equal


def unseen(text: Text, seen: set[str]) -> Bool[Tensor, " batch"]:
    """Return True for each text whose hash is not in `seen`, and add the hashes to `seen`.

    A copy of an earlier text of the same batch gets False.

    Args:
        text: the texts.
        seen: the hashes of earlier texts.
    """
    is_new = []
    for digest in digests(text):
        is_new.append(digest not in seen)
        seen.add(digest)
    return torch.tensor(is_new, device=text.tokens.device)


def _on_cpu(texts: Sequence[Text]) -> list[Text]:
    """Return the tokens and masks of texts on the CPU, after a single wait for the device."""
    copy = Placement("cpu", None)
    copies = []
    for text in texts:
        mask = text.attention_mask
        copies.append(Text(copy(text.tokens), None if mask is None else copy(mask)))
    copy.wait()
    return copies


def _tokens(text: Text) -> list[object]:
    """Return the real tokens of each text.

    If the inputs are images or sounds instead of tokens, the result is a hash of each of them.
    """
    if text.tokens.is_floating_point():
        return [*map(_content, text.tokens)]
    return [*text.listed()]


def _other_inputs(text: Text) -> list[tuple[object, ...]]:
    """Return hashes of the inputs of each text besides its tokens and its mask."""
    n_texts = len(text.tokens)
    decoded = text.of_logits
    if decoded is text:
        inputs = []
        names = {*text.more}
    else:
        inputs = [_tokens(*_on_cpu([decoded]))]
        names = {*text.more} - _OF_DECODER
    shape = text.tokens.shape[:2]
    without_axis = {*without_rows(text.more, shape)}
    for name in sorted(names):
        value = text.more[name]
        # It is unknown which part of this value belongs to which text. Therefore, each text gets
        # a different number, so that no two texts count as copies.
        if name in without_axis:
            inputs.append([(name, _content(value), number) for number in range(n_texts)])
        elif isinstance(value, Tensor) and value.shape == text.tokens.shape:
            rows = zip(value.cpu(), text.real.cpu(), strict=True)
            inputs.append([(name, _content(row[is_real])) for row, is_real in rows])
        elif is_listed(value, n_texts):
            inputs.append([(name, _content(part)) for part in value])
        elif isinstance(value, Tensor) and (axis := axis_of_rows(name, value, shape)) is not None:
            inputs.append([(name, _content(part)) for part in value.unbind(axis)])
    return [*zip(*inputs, strict=True)] if inputs else [()] * n_texts


def _content(value: Tensor) -> tuple[list[int], str]:
    """Return the shape of a tensor and a hash of its numbers."""
    return [*value.shape], _hashed(storage.bytes_of(value))


def _hashed(content: bytes | memoryview) -> str:
    """Return a hash of some bytes, 16 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()
