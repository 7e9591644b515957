"""Chats: the texts equal the texts of `transformers`, and spans are the positions of the contents."""

import json

import pytest
import torch

from hooks import HookedRunner, UnknownNameError
from interp import Pairs, activation_patching, edits, log_prob, sweep
from interp.directions import Contrast, Direction, difference_of_means, steering_curve
from models import ChatTemplate, attach, chat, load, load_tokenizer
from tests.shipped import pydoc

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2", reason="needs the extra hf")

TEMPLATES = {
    "chatml": """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "trimmed, with tags": """{{ bos_token }}
{% for m in messages %}
    {%- if m.role == 'system' %}
[{{ m.content | trim }}]
    {%- elif loop.index > 90 %}{% break %}
    {%- elif m.role == 'assistant' %}
{% generation %}{{ m.content | trim }}{{ eos_token }}{% endgeneration %}
    {%- else %}
<u>{{ m.content | trim }}</u>
    {%- endif %}
{%- endfor %}""",
    # The form of Gemma 3: the first turn contains the text of the system.
    "trimmed, turns of user and model": """{{ bos_token }}
{%- set start = '' %}
{%- set turns = messages %}
{%- if messages[0]['role'] == 'system' %}
    {%- set start = messages[0]['content'] + '\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- endif %}
{%- for m in turns %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + (start if loop.first else '') }}
    {%- if m['content'] is string %}{{ m['content'] | trim }}
    {%- else %}{{ raise_exception('content must be a string') }}
    {%- endif %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    "tools": """{{ tools | tojson(indent=2) }}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}
{{ ns.n }} {{ m.role }}: {{ m.content }}{% endfor %}{{ unk_token }}""",
}
MESSAGES = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": " w1 w2 user "},
    {"role": "assistant", "content": "w3"},
    {"role": "user", "content": "w1"},
]


def made(template):
    """Return a tokenizer of transformers whose tokens are characters, with a chat template."""
    alphabet = {chr(n): n for n in range(10, 127)} | {
        "é": 127,
        "<unk>": 128,
        "<s>": 129,
        "</s>": 130,
    }
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(alphabet, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=template,
    )


def load_saved(tokenizer, path):
    tokenizer.save_pretrained(path)
    return load_tokenizer(path)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [False, True])
def test_a_chat_is_written_as_transformers_writes_it(name, prompt, tmp_path):
    theirs = made(TEMPLATES[name])
    tools = [{"type": "function", "function": {"name": "é<&", "parameters": {}}}]
    options = {"tools": tools} if name == "tools" else {}
    expected = theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=prompt, **options
    )
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours.chat_template.render(MESSAGES, prompt, **options) == expected
    model = load("pydoc-4l")
    # `chat` also accepts a tokenizer of `transformers`.
    model.tokenizer = theirs
    written = chat(model, MESSAGES, add_generation_prompt=prompt, **options)
    assert written.texts == (expected,)
    assert written.tokens.tolist() == [ours.encode(expected)]
    # A template of the call also gets the texts of special tokens.
    for tokenizer in (made(None), load_saved(made(None), tmp_path / "without")):
        model.tokenizer = tokenizer
        options |= dict(template=TEMPLATES[name])
        assert chat(model, MESSAGES, add_generation_prompt=prompt, **options).texts == (expected,)
    ends = ours.offsets(expected)
    for n, message in enumerate(MESSAGES):
        here = written.spans[str(n)][0]
        text = expected[ends[here[0]][0] : ends[here[-1]][1]]
        assert text == (message["content"].strip() if "trim" in name else message["content"])
        assert here == [*range(here[0], here[-1] + 1)]
    assert written.spans["user"][0] == written.spans["1"][0] + written.spans["3"][0]
    assert written.spans["user"][0][0] > written.spans["system"][0][-1]


def test_spans_are_positions_of_edits():
    model = pydoc()
    one = chat(
        model,
        [{"role": "user", "content": "def f"}, {"role": "assistant", "content": "(x)"}],
        template="{% for m in messages %}{{ m.content }} {% endfor %}",
    )
    assert one.texts == ("def f (x) ",)
    assert one.spans == {
        "user": [[0, 1, 2, 3, 4]],
        "0": [[0, 1, 2, 3, 4]],
        "assistant": [[6, 7, 8]],
        "1": [[6, 7, 8]],
    }
    runner = HookedRunner(model)
    hooks = {"blocks.1.resid_post": edits.zero(pos=one.spans["assistant"])}
    found = runner.run_with_hooks(one, hooks=hooks)
    zero = torch.tensor([1.0] * 6 + [0.0] * 3 + [1.0])[:, None]
    by_hand = runner.run_with_hooks(
        one.tokens, hooks={"blocks.1.resid_post": lambda value, point: value * zero}
    )
    assert torch.equal(found, by_hand)


ENDED = "{% for m in messages %}{{ m.content }}; {% endfor %}"


def chats(*pairs):
    """Return chats, each of a question and an answer."""
    several = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        for asked, answer in pairs
    ]
    return chat(pydoc(), several, template=ENDED)


def test_several_chats_are_a_padded_batch_that_models_read():
    model, both = pydoc(), chats(("def f", "KV8"), ("import", "xy"))
    assert both.texts == ("def f; KV8; ", "import; xy; ")
    assert both.spans["assistant"] == [[7, 8, 9], [8, 9]]
    assert both.attention_mask is None or both.attention_mask.shape == both.tokens.shape
    shorter = chats(("def f", "KV8"), ("i", "xy"))
    assert shorter.attention_mask.sum(1).tolist() == [12, 7]
    torch.testing.assert_close(model(shorter)[1, :7], model("i; xy; ")[0], atol=1e-4, rtol=1e-4)


def test_spans_are_named_in_directions_and_pairs():
    model = pydoc()
    yes, no = (
        chats(("def f", "KV8"), ("i", "QX31"), ("of", "Z")),
        chats(("a", "one"), ("list", "is")),
    )
    name = "blocks.1.resid_post"
    v = difference_of_means(model, Contrast(yes, no, pos="assistant", batch=2), name)
    means = []
    for texts in (yes, no):
        runs = [HookedRunner(model).run_with_cache(text)[1][name][0] for text in texts.texts]
        places = texts.spans["assistant"]
        means.append(torch.cat([run[at] for run, at in zip(runs, places, strict=True)]).mean(0))
    torch.testing.assert_close(v[name], means[0] - means[1], rtol=1e-3, atol=1e-4)
    curve = steering_curve(model, v, yes, [1.0], log_prob("e"), others=no, pos="assistant")
    hooks = [{name: edits.add(v, pos=texts.spans["assistant"])} for texts in (yes, no)]
    torch.testing.assert_close(
        curve.score.values, sweep(model, yes, hooks[:1], log_prob("e")).values
    )
    reference, after = model(no), HookedRunner(model).run_with_hooks(no, hooks=hooks[1])
    real = no.attention_mask
    lost = (reference.softmax(-1) * (reference.log_softmax(-1) - after.log_softmax(-1))).sum(-1)
    mean = (lost * real).sum(1) / real.sum(1)
    torch.testing.assert_close(curve.kl.values[0], mean.detach(), rtol=1e-3, atol=1e-5)
    pairs = Pairs(
        yes, chats(("(x) y", "KV8"), ("o", "QX31"), ("is", "Z")), "e", spans=["user", "assistant"]
    )
    result = activation_patching(model, pairs, "resid_pre", over=("layer", "span"))
    assert [*result.labels["span"]] == ["user", "assistant"]
    assert pairs.read_by(model).spans["user"].tolist() == [
        [0, 1, 2, 3, 4],
        [0] * 5,
        [0, 1, 1, 1, 1],
    ]
    with pytest.raises(UnknownNameError, match="assistant"):
        difference_of_means(model, Contrast(yes, no, pos="asistant"))
    with pytest.raises(UnknownNameError):
        Pairs(no, no, spans=["tool"]).read_by(model)


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_a_chat_without_the_span_is_refused_beside_others_too(batch):
    model, name = pydoc(), "blocks.1.resid_post"
    whole, alone = chats(("def f", "KV8"), ("i", "QX31")), [[{"role": "user", "content": "of"}]]
    several = [[*alone[0], {"role": "assistant", "content": text}] for text in ("Z", "is")]
    without = chat(model, [*several, *alone], template=ENDED)
    empty = chats(("def f", "KV8"), ("i", "QX31"), ("of", ""))
    direction = Direction({name: torch.ones(128)})
    for wrong in (without, empty):
        refused = pytest.raises(ValueError, match="'assistant'; text 2")
        for texts in ((whole, wrong), (wrong, whole)):
            with refused:
                difference_of_means(model, Contrast(*texts, pos="assistant", batch=batch), name)
        with refused:
            steering_curve(model, direction, wrong, [1.0], log_prob("e"), pos="assistant")
        with refused:
            Pairs(wrong, answers="e", spans=["assistant"]).read_by(model)


def test_attached_models_read_chats():
    from tests.attachable import made as tiny

    model = tiny("llama")
    with attach(model, tokenizer=made(TEMPLATES["chatml"])):
        assert chat(model, MESSAGES).texts[0].startswith("<|im_start|>system\nbe kind")


def test_errors_of_a_template_and_changed_contents_are_one_error(tmp_path):
    model = pydoc()
    with pytest.raises(ValueError, match="roles must alternate"):
        chat(model, MESSAGES, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="must accept the messages"):
        chat(model, MESSAGES, template="{% if %}")
    with pytest.raises(ValueError, match="must not change contents"):
        chat(model, MESSAGES, template="{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    with pytest.raises(ValueError, match="got {'role': 'user'}"):
        chat(model, [*MESSAGES, {"role": "user"}], template="x")
    with pytest.raises(ValueError, match="the tokenizer contain no template"):
        chat(model, MESSAGES)
    # A template has no access to the internals of Python.
    with pytest.raises(ValueError, match="must accept the messages"):
        ChatTemplate("{{ ''.__class__.__mro__ }}").render(MESSAGES)
    left_out = chat(model, MESSAGES[:2], template="{{ messages[1].content }}")
    assert left_out.spans["system"] == [[]]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ ('{0.__class__.__mro__}'|attr('format'))(1) }}",
        "{% set call = '{0.__class__.__mro__}'.format %}{{ [1]|map(call)|list }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ strftime_now.__code__.co_code }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ lipsum.__globals__.os }}",
        "{{ messages.append(1) }}",
    ],
)
def test_no_template_reaches_the_insides_of_python(source):
    with pytest.raises(ValueError, match="must accept the messages"):
        ChatTemplate(source).render([*MESSAGES])


def test_of_several_templates_the_default_is_taken(tmp_path):
    made("x").save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = tmp_path / "tokenizer_config.json"
    several = [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]
    described = json.loads(config.read_text())
    config.write_text(json.dumps(described | {"chat_template": several}))
    assert load_tokenizer(tmp_path).chat_template.render([]) == "b"
    config.write_text(json.dumps(described | {"chat_template": several[:1]}))
    with pytest.raises(ValueError, match="must be named 'default'; got tools"):
        load_tokenizer(tmp_path)
    config.write_text(json.dumps(described))
    assert load_tokenizer(tmp_path).chat_template is None
