"""Tests of how texts are divided into steps: sentences, words, turns or spans of the user."""

import itertools

import pytest
import torch

from interp import Steps
from interp.inputs.offsets import offsets_of
from interp.steps.spans import sentence_starts
from models import CharTokenizer, Transformer, TransformerConfig, chat
from tests.interp.texts import BYTES_OF_EACH_TOKEN
from tests.shipped import pydoc

# In each text, `|` marks where a sentence begins; the first one begins without a mark.
SENTENCES = [
    "The key is in the red box.| The dog sleeps.| Why",
    'He said "Go!"| (She went.)| “Ja.”| Done',
    "It costs 3.14 dollars.| It costs .5 dollars",
    "Dr. No met J. Smith vs. Mr. Xi.| Then e.g. this, i.e. that.| It was I.| Me.",
    "Wait...| What?!| Yes…| No",
    "First line\n|Second. \n|Third.\n\n  \n|  Fourth\n",
    "1. One\n|2. Two.| Then 3.| Four",
    "a.b.c and www.x.org are names.| OK",
    "\n\nOnly one.  ",
    "Did he?| No.| I did.",
    "no end",
]


@pytest.mark.parametrize("marked", SENTENCES)
def test_sentences_begin_where_a_reader_says(marked):
    text = marked.replace("|", "")
    bounds = [*sentence_starts(text), len(text)]
    assert [text[i:j] for i, j in itertools.pairwise(bounds)] == marked.split("|")


@pytest.fixture(scope="module")
def model():
    return pydoc()


def test_steps_contain_all_tokens_in_order(model):
    for by in ("sentence", "word"):
        steps = Steps(model, "Open the file. Read it.\nThen,", " return the text. Done", by=by)
        assert [n for span in steps.spans for n in span] == [*range(len(steps.tokens))]
        assert "".join(steps.words) == "Open the file. Read it.\nThen, return the text. Done"
        assert steps.text.tokens.tolist() == [steps.tokens]
        assert all(len(span) for span in steps.spans)
        for word, span in zip(steps.words, steps.spans, strict=True):
            assert model.to_text(steps.tokens[span.start : span.stop]) == word
    assert steps.words[5:7] == ["\nThen,", " return"]
    assert len(steps) == 10


def test_a_prompt_may_be_one_row_of_tokens(model):
    prompt = "One is the first. It is in the"
    tokens = model.to_tokens(prompt).tokens
    assert tokens.ndim == 2
    assert Steps(model, tokens, " box.").words == Steps(model, prompt, " box.").words
    with pytest.raises(ValueError, match="one text; got 2 texts"):
        Steps(model, tokens.repeat(2, 1), " box.")


def test_the_answer_begins_a_step_in_the_middle_of_a_sentence(model):
    steps = Steps(model, "One is the first. It is in the", " box. Done.")
    assert steps.words == ["One is the first.", " It is in the", " box.", " Done."]
    assert steps.first_answer == 2
    assert "answer from 2" in repr(steps)
    assert Steps(model, "One. Two.", "").first_answer == 2


def test_tokens_and_strings_are_the_same_text(model):
    text, answer = "Open the file. Read", " it. Now."
    of_strings = Steps(model, text, answer)
    tokens = model.to_tokens(text).listed()[0]
    more = model.to_tokens(answer).listed()[0]
    for prompt, continued in ((tokens, answer), (torch.tensor(tokens), more), (text, more)):
        steps = Steps(model, prompt, continued)
        assert steps.tokens == [*tokens, *more]
        assert steps.words == of_strings.words
        assert steps.first_answer == of_strings.first_answer == 2


def test_own_spans(model):
    text = "If it is a list, then read the list."
    steps = Steps(model, text, "", by=["If it is", " then", " the"])
    assert steps.words == ["If it is a list,", " then read", " the list."]
    assert steps.by == "span"
    n_tokens = len(steps.tokens)
    by_positions = Steps(model, text, "", by=[range(3), range(3, n_tokens)])
    assert by_positions.spans == [range(3), range(3, n_tokens)]
    cases = [
        (["If", "nothing"], "occur after"),
        (["it is"], "begin the text"),
        ([range(3), range(4, n_tokens)], "begins at 3"),
        ([range(3)], "all"),
        ([range(0, n_tokens, 2)], "range of token positions"),
        ([range(3), "If"], "only strings or only ranges"),
        ([], "only strings or only ranges"),
        ("letter", "'sentence', 'word', 'turn'"),
        ("turn", "chat"),
    ]
    for by, message in cases:
        with pytest.raises(ValueError, match=message):
            Steps(model, text, "", by=by)
    with pytest.raises(TypeError):
        Steps(model, text, "", by=3)
    with pytest.raises(ValueError, match="answer must begin a step"):
        Steps(model, text, " More.", by=["If", " then"])


def test_turns_of_a_chat(model):
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    messages = [
        {"role": "user", "content": "open it. now."},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "read"},
    ]
    text = chat(model, messages, template=source)
    steps = Steps(model, text, "done. yes.", by="turn")
    assert steps.words == [
        "<user>open it. now.",
        "\n<assistant>ok",
        "\n<user>read\n<assistant>",
        "done. yes.",
    ]
    assert steps.first_answer == 3
    assert len(Steps(model, text, "done. yes.")) == 7


def test_incomplete_characters_belong_to_the_step_where_they_begin():
    model = Transformer(
        TransformerConfig(vocab_size=300, n_ctx=99, n_layers=1, n_heads=1, d_model=4)
    )
    model.tokenizer = BYTES_OF_EACH_TOKEN
    text = "é日. 😀 is? ok"
    steps = Steps(model, text, "")
    data = text.encode()
    assert steps.tokens == [*data]
    assert steps.words == ["é日.", " 😀 is?", " ok"]
    assert [len(span) for span in steps.spans] == [6, 9, 3]
    offsets = offsets_of(model, [*data])
    assert offsets.starts[:6] == [0, 0, 1, 1, 1, 2]


def test_prompts_that_are_not_one_text(model):
    with pytest.raises(ValueError, match="one text"):
        Steps(model, ["One.", "Two."], "")
    plain = Transformer(TransformerConfig(vocab_size=9, n_ctx=9, n_layers=1, n_heads=1, d_model=4))
    with pytest.raises(ValueError, match="tokenizer"):
        Steps(plain, [1, 2, 3], "")
    one = CharTokenizer.of("ab. ")
    plain.tokenizer = one
    assert Steps(plain, "a. b", "").words == ["a.", " b"]
