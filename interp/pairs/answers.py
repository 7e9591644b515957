"""Answers of several tokens: rows of a prompt and an answer, and the score of each row.

A model must read an answer to score it (teacher forcing). The prompt "The capital of France is"
with the answers " Paris, the city" and " Rome, the city" becomes two rows:

1. A row contains the prompt and all tokens of one answer except the last token, which is predicted
   and not read (`rows_of_answers`). So the row of an answer of one token is the prompt.
2. The score of a row is the log-probability of its answer given the prompt, in nats: the sum over
   the tokens of the answer. The score of a wrong answer is multiplied by -1 (`score_of_rows`).
3. The score of an example is the sum over its rows (`summed_by_example`): log p(right answer) - log
   p(wrong answer). An effect or an attribution of an example is also the sum over its rows.

The clean and the corrupted prompt are continued by the same answers. So each position of an answer
after the clean prompt corresponds to the same position of the answer after the corrupted prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooks.base import (
    Rows,
    Text,
    all_to_device,
    at_least_float32,
    columns_of_last,
    shown,
    to_device,
)
from interp.inputs.token_positions import short
from interp.inputs.words import AnswerTokens
from interp.measuring import TokenMetric, Writer

AnswerScore = Literal["log_prob", "accuracy"]
"""The score of an answer.

`log_prob` is the log-probability of the answer in nats. `accuracy` is 1 if greedy decoding returns
the answer, and 0 otherwise.
"""


@dataclass(frozen=True, eq=False)
class Continuations:
    """Answers that continue the prompts of examples, each of any number of tokens.

    Attributes:
        tokens: the answers of each example: the right answer, or the right and the wrong answer.
        score: the name of the score of an answer.
        per_token: whether to divide the score of an answer by its number of tokens.

    Raises:
        ValueError: if the right and the wrong answer of an example are the same.
    """

    tokens: tuple[tuple[AnswerTokens, ...], ...]
    score: AnswerScore = "log_prob"
    per_token: bool = False

    def __post_init__(self) -> None:
        for number, answers in enumerate(self.tokens):
            if len(answers) == 2 and answers[0] == answers[1]:
                raise ValueError(
                    f"right and wrong must be different answers; got {shown([*answers[0]])} for "
                    f"both in example {number}: the metric would be 0 in every run (for a control, "
                    "take another wrong answer)"
                )

    @property
    def n_answers(self) -> int:
        """The number of answers of an example: 1 or 2."""
        return len(self.tokens[0])

    @property
    def of_rows(self) -> list[AnswerTokens]:
        """The answer of each row: the right answers of all examples, then the wrong answers."""
        rows = []
        for number in range(self.n_answers):
            rows += [answers[number] for answers in self.tokens]
        return rows

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Continuations":
        """Return the answers of some examples.

        Args:
            change: a function that selects examples of any tensor [example], such as
                `lambda values: values[:2]`.
        """
        numbers = change(torch.arange(len(self.tokens))).tolist()
        return replace(self, tokens=tuple(self.tokens[number] for number in numbers))


def summed_by_example(
    values: Float[Tensor, "*axes row"], n_examples: int
) -> Float[Tensor, "*axes _n"]:
    """Return the value of each example: the sum over its rows.

    Args:
        values: the values of the rows. The last axis contains first the right answers of all
            examples and then, if there are any, the wrong answers of all examples.
        n_examples: the number of examples.

    >>> summed_by_example(torch.tensor([-1.0, -2.0, 5.0, 7.0]), 2)
    tensor([4., 5.])
    """
    if values.shape[-1] == n_examples:
        return values
    return values.unflatten(-1, (-1, n_examples)).sum(-2)


def rows_of_answers(text: Text, answers: Continuations) -> Text:
    """Return a row for each answer: the prompt, and all tokens of the answer except the last.

    Each token of a prompt stays in its column. In an encoder-decoder model, the answers continue
    the texts of the decoder.

    Args:
        text: the prompts.
        answers: the answers of each prompt.

    Raises:
        ValueError: if an argument of the model, such as `position_ids`, has a number for each
            position of the prompts, or if it is unknown which part of an argument belongs to which
            prompt.

    >>> rows = rows_of_answers(Text(torch.tensor([[3, 1]])), Continuations((((4, 6), (5,)),)))
    >>> rows.listed()
    [[3, 1, 4], [3, 1]]
    """
    rows = text.repeated(answers.n_answers)
    prompts = rows.of_logits
    continued = _continued(prompts, [tokens[:-1] for tokens in answers.of_rows])
    if prompts is rows:
        _require_no_positions(text)
        return replace(
            rows, tokens=continued.tokens, attention_mask=continued.attention_mask, texts=None
        )
    more = {**rows.more, "decoder_input_ids": continued.tokens}
    more.pop("decoder_attention_mask", None)
    if continued.attention_mask is not None:
        more["decoder_attention_mask"] = continued.attention_mask
    return replace(rows, more=more)


def prompts_of_rows(text: Text, rows: Text) -> Bool[Tensor, "row column"]:
    """Return True at the tokens of prompts, and False at answers and padding.

    Args:
        text: the prompts.
        rows: the rows of `rows_of_answers`.
    """
    real = text.of_logits.real
    n_rows, n_columns = rows.of_logits.tokens.shape
    is_prompt = real.new_zeros(n_rows, n_columns)
    is_prompt[:, : real.shape[1]] = real.repeat(n_rows // len(real), 1)
    return is_prompt


def predicting(rows: Text, prompts: Bool[Tensor, "row column"]) -> Bool[Tensor, "row column"]:
    """Return True at the positions that predict tokens of answers.

    These are the last token of each prompt, and the tokens of the answer that the model reads.

    Args:
        rows: the rows of `rows_of_answers`.
        prompts: the result of `prompts_of_rows`.
    """
    is_answer = rows.of_logits.real & ~prompts
    n_rows, n_columns = prompts.shape
    last_of_prompt = columns_of_last(1, n_columns, n_rows, prompts)
    return is_answer.scatter(1, to_device(last_of_prompt, prompts.device), True)


def _require_no_positions(text: Text) -> None:
    """Check that no argument of the model has a number for each position of a prompt.

    Such an argument has no numbers for the positions of the answers.
    """
    n_texts, n_columns = text.tokens.shape[:2]
    for name, value in text.more.items():
        is_numbered = isinstance(value, Tensor) and not value.is_floating_point()
        if is_numbered and (n_texts, n_columns) in (value.shape[:2], value.shape[1:3]):
            raise ValueError(
                f"{name} must be left out for answers of several tokens, because it has no number "
                f"for the positions of the answers; got {[*value.shape]}"
            )


def _continued(text: Text, answers: list[AnswerTokens]) -> Text:
    """Return texts with some tokens after the last real token of each text.

    Args:
        text: the texts.
        answers: the tokens to add to each text.
    """
    tokens = text.tokens
    ends = [columns_of_text[-1] + 1 for columns_of_text in text.columns]
    lengths = [end + len(answer) for end, answer in zip(ends, answers, strict=True)]
    n_columns = max(tokens.shape[1], *lengths)
    continued = tokens.new_zeros(len(tokens), n_columns)
    continued[:, : tokens.shape[1]] = tokens
    real = torch.zeros_like(continued, dtype=torch.bool)
    real[:, : tokens.shape[1]] = text.real
    for row, (answer, end) in enumerate(zip(answers, ends, strict=True)):
        continued[row, end : end + len(answer)] = tokens.new_tensor(answer)
        real[row, end : end + len(answer)] = True
    return Text(continued, None if bool(real.all()) else real)


def score_of_rows(answers: Continuations, rows: Text) -> TokenMetric:
    """Return the metric that scores the answer of each row.

    The score of a wrong answer is multiplied by -1.

    Args:
        answers: the answers of each example.
        rows: the rows of `rows_of_answers`.
    """
    tokens_of_rows = answers.of_rows
    # A sweep calls the metric once for each edit, so everything that the metric needs is computed
    # before.
    tokens, is_filler = _aligned(tokens_of_rows)
    longest = tokens.shape[1]
    weights = _weights_of_rows(answers, n_tokens=(~is_filler).sum(1))
    weights_of_dtype = {dtype: weights.to(dtype) for dtype in (torch.float32, torch.float64)}
    # If a row has fewer tokens than the longest answer, the model cannot return the logits of that
    # many last positions. Then the metric reads all positions and selects columns itself.
    columns_of_rows = rows.of_logits.columns
    is_short = any(len(columns_of_row) < longest for columns_of_row in columns_of_rows)
    columns = _last_columns(columns_of_rows, longest)
    score = _SCORES[answers.score]

    def metric(logits: Tensor) -> Tensor:
        if len(logits) != len(tokens):
            raise ValueError(
                f"the logits of these answers must have {len(tokens)} rows, one for each answer; "
                f"got {len(logits)}"
            )
        if is_short:
            row_numbers = torch.arange(len(logits), device=logits.device)[:, None]
            logits = logits[row_numbers, to_device(columns, logits.device)]
        else:
            # A caller may pass the logits of all positions.
            logits = logits[:, -longest:]
        tokens_here, is_filler_here = all_to_device((tokens, is_filler), logits.device)
        scores = score(at_least_float32(logits), tokens_here, is_filler_here)
        return scores * to_device(weights_of_dtype[scores.dtype], scores.device)

    unit = {"log_prob": "nats", "accuracy": ""}[answers.score]
    return TokenMetric(
        call=_call(answers.score, tokens_of_rows),
        last=0 if is_short else longest,
        unit=f"{unit} per token" if answers.per_token else unit,
        function=metric,
        call_in_words=partial(_call_in_words, answers),
    )


def _weights_of_rows(
    answers: Continuations, n_tokens: Int[Tensor, " row"]
) -> Float[Tensor, " row"]:
    """Return the number by which the score of each row is multiplied.

    Args:
        answers: the answers of each example.
        n_tokens: the number of tokens of each row's answer.
    """
    weights = torch.ones(len(n_tokens), dtype=torch.float64)
    weights[len(answers.tokens) :] = -1
    return weights / n_tokens if answers.per_token else weights


def _call(score: str, answers: Sequence[Sequence[int]]) -> str:
    """Return the call of the metric with the numbers of tokens of the answers."""
    n_tokens = sorted({len(answer) for answer in answers})
    counts = f"{n_tokens[0]}" if len(n_tokens) == 1 else f"{n_tokens[0]} to {n_tokens[-1]}"
    return f"{score}(answers of {counts} tokens)"


def _aligned(
    answers: Sequence[Sequence[int]],
) -> tuple[Int[Tensor, "row n"], Bool[Tensor, "row n"]]:
    """Return answers of different lengths as one tensor, with filler tokens at the left.

    Returns:
        The tokens, and a mask that is True at filler. All answers end at the last column.
    """
    longest = max(map(len, answers))
    tokens = torch.zeros(len(answers), longest, dtype=torch.long)
    is_filler = torch.ones_like(tokens, dtype=torch.bool)
    for row, answer in enumerate(answers):
        tokens[row, longest - len(answer) :] = torch.tensor(answer)
        is_filler[row, longest - len(answer) :] = False
    return tokens, is_filler


def _call_in_words(answers: Continuations, write: Writer) -> str:
    """Return the call of the metric with the texts of the answers."""
    calls = []
    for number in range(answers.n_answers):
        texts = ["".join(write([*example[number]])) for example in answers.tokens]
        is_same = all(text == texts[0] for text in texts)
        calls.append(f"{answers.score}({short(texts[0] if is_same else texts)})")
    return " - ".join(calls)


def _last_columns(columns_of_rows: Rows, n: int) -> Int[Tensor, "row n"]:
    """Return the last `n` columns of each row. A row with fewer begins with columns 0."""
    last = [[*([0] * n), *columns_of_row][-n:] for columns_of_row in columns_of_rows]
    return torch.tensor(last)


def _log_probs(
    logits: Float[Tensor, "row n vocab"],
    tokens: Int[Tensor, "row n"],
    is_filler: Bool[Tensor, "row n"],
) -> Float[Tensor, " row"]:
    """Return the log-probability of each answer: the sum over its tokens, in nats."""
    log_probs = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return log_probs.masked_fill(is_filler, 0).sum(1)


def _is_greedy(
    logits: Float[Tensor, "row n vocab"],
    tokens: Int[Tensor, "row n"],
    is_filler: Bool[Tensor, "row n"],
) -> Float[Tensor, " row"]:
    """Return 1 for each answer whose tokens are all the likeliest tokens, and 0 otherwise.

    The result is NaN if a logit is NaN at a position that predicts the answer. The comparison with
    the likeliest token alone would hide the NaN.
    """
    is_likeliest = ((logits.argmax(-1) == tokens) | is_filler).all(1)
    has_nan = (logits.isnan().any(-1) & ~is_filler).any(1)
    return is_likeliest.to(logits.dtype).where(~has_nan, torch.nan)


_SCORES = {"log_prob": _log_probs, "accuracy": _is_greedy}
