"""The guide for users of TransformerLens: each line runs, and gives the same numbers."""

import contextlib
import io
import json
import re
import runpy

import numpy as np
import pytest
import torch

import models
from hooks import HookedRunner
from interp import repeated_tokens
from tests import tiny
from tests.transformer_lens import rows

EXAMPLE = rows.GUIDE.parents[1] / "from_transformer_lens.py"

# The results of these lines differ for a reason: the name of a point, the sign of singular vectors,
# another set of queries, and values without the gain of a norm.
OTHER = ("utils.get_act_name", "SVDInterpreter", "detect_head", "folded_cache.apply_ln_to_stack")


@pytest.fixture(scope="module")
def names():
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        names = rows.guide()
    assert "blocks.1.resid_pre here" in printed.getvalue()
    return names


@pytest.fixture(scope="module")
def kept():
    with np.load(rows.FILE) as file:
        lines = json.loads(str(file["names"]))
        return {line: file[str(index)] for index, line in enumerate(lines)}


def test_each_row_runs_and_gives_their_numbers(names, kept):
    compared = set()
    for theirs, ours in rows.of_the_guide():
        value = rows.numbers(rows.result(ours, names))
        if theirs in kept and not theirs.startswith(OTHER):
            wanted = kept[theirs]
            np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-4, err_msg=ours)
            compared.add(theirs)
    assert kept.keys() - compared == {line for line in kept if line.startswith(OTHER)}
    assert len(compared) > 50


def test_lines_of_several_texts_give_the_numbers_of_each_text_alone(names):
    texts, model = names["texts"], names["model"]
    lines = [ours for _, ours in rows.of_the_guide() if "texts" in ours]
    values = {line: rows.result(line, names) for line in lines}
    padded, mask, logits, last, loss, written = values.values()
    alone = [model(text) for text in texts]
    assert mask.sum(1).tolist() == [part.shape[1] for part in alone]
    assert mask.shape == padded.tokens.shape == logits.shape[:2]
    for row, part in enumerate(alone):
        torch.testing.assert_close(logits[row, mask[row].bool()], part[0], rtol=1e-4, atol=1e-4)
    for row, text in enumerate(texts):
        stream = HookedRunner(model).run_with_cache(text)[1]["resid_post", 1][0, -1]
        torch.testing.assert_close(last[row], stream, rtol=1e-4, atol=1e-4)
    # The mean over all predicted tokens of both texts, in nats.
    terms = []
    for text, part in zip(texts, alone, strict=True):
        tokens = model.to_tokens(text).tokens[0]
        terms += [-part[0, at].log_softmax(-1)[token] for at, token in enumerate(tokens[1:])]
    torch.testing.assert_close(loss, torch.stack(terms).mean(), rtol=1e-4, atol=1e-4)
    for text, continued in zip(texts, written, strict=True):
        assert models.generate_text(model, text, max_new_tokens=5, stop=()) == continued


def test_lines_that_differ_differ_as_the_guide_says(names, kept):
    lines = dict(rows.of_the_guide())
    detect = 'detect_head(model, text, "induction_head")'
    tokens = names["model"].to_tokens(names["text"]).tokens[0].tolist()
    # An induction query has an earlier copy of its token, which another token follows.
    n_queries = sum(token in tokens[:pos] for pos, token in enumerate(tokens))
    scores = rows.numbers(rows.result(lines[detect], names))
    theirs = kept[detect] * len(tokens) / n_queries
    np.testing.assert_allclose(np.ravel(scores), np.ravel(theirs), rtol=1e-4)
    # The weights of `model` are not processed.
    found = rows.result(lines['SVDInterpreter(model).get_singular_vectors("OV", 1, 3, 2)'], names)
    attention = names["model"].blocks[1].attn
    expected = torch.linalg.svdvals(attention.W_V[2] @ attention.W_O[2])[:3]
    torch.testing.assert_close(found.s.float(), expected, rtol=1e-4, atol=1e-5)


def test_the_loss_of_induction_is_the_loss_of_the_second_copy(names):
    lines = dict(rows.of_the_guide())
    found = rows.result(lines["evals.induction_loss(model)"], names)
    model, losses = names["model"], []
    tokens = repeated_tokens(model.config.vocab_size, 20)
    for row, logits in zip(tokens, model(tokens), strict=True):
        # As in TransformerLens, the first predicted token is the third token of the second copy.
        losses += [-logits[pos].log_softmax(-1)[row[pos + 1]] for pos in range(21, 39)]
    torch.testing.assert_close(found, torch.stack(losses).mean())


def test_lines_with_an_attached_model_give_the_numbers_of_a_plain_model(names):
    sizes = dict(vocab_size=103, num_hidden_layers=2, num_attention_heads=3, pad_token_id=0)
    sizes |= dict(max_position_embeddings=32, initializer_range=0.5)
    model = tiny.model("LlamaForCausalLM", **sizes)
    tokenizer = names["model"].tokenizer
    attached = models.attach(model, tokenizer=tokenizer)
    names = {**names, "from_hf": models.from_hf}
    plain = models.from_hf(model, tokenizer=tokenizer)
    cache = HookedRunner(plain).run_with_cache(names["tokens"])[1]
    of_plain = {**names, "model": plain, "cache": cache}
    cache = HookedRunner(model).run_with_cache(names["tokens"])[1]
    of_attached = {**names, "model": model, "attached": attached, "cache": cache}
    lines = rows.of_attached_models()
    assert len(lines) > 10
    for with_plain, with_attached in lines:
        value = rows.result(with_attached, of_attached)
        wanted = rows.result(with_plain, of_plain)
        if isinstance(wanted, models.Transformer):
            value, wanted = value(names["tokens"]), wanted(names["tokens"])
        # Equal numbers everywhere would hide wrong ones.
        if isinstance(wanted, torch.Tensor) and wanted.numel() > 1:
            assert len(wanted.unique()) > 1
        np.testing.assert_allclose(
            *map(as_numbers, (value, wanted)), rtol=1e-4, atol=1e-4, err_msg=with_attached
        )


def as_numbers(value):
    """Return a value as an array: texts as the numbers of their characters, tokens as integers."""
    if isinstance(value, str):
        return np.array([*map(ord, value)])
    if isinstance(value, list) and isinstance(value[0], str):
        return as_numbers("|".join(value))
    return np.asarray(value.detach() if isinstance(value, torch.Tensor) else value)


def test_the_example_finds_the_induction_heads(capsys):
    assert runpy.run_path(str(EXAMPLE))["main"]() == 0
    first, *parts = capsys.readouterr().out.split("\n\n")
    before, after = map(float, re.findall(r"(\d\.\d+)", first))
    assert before > 4 * after
    scores, patched = (set(re.findall(r"layer (\d, head \d)", part)) for part in parts)
    assert scores == patched
    assert {head[0] for head in scores} == {"3"}
    # The previous-token head matters most, then a head that copies.
    assert re.findall(r"without head (\S+)", parts[0])[:2] == ["0.3", "3.0"]
