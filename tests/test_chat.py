"""Chats: texts are those of `transformers`, and spans are where the contents are."""

import json

import pytest
import torch

from hooks import HookedRunner
from interp import edits
from models import ChatTemplate, attach, chat, load, load_tokenizer

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2", reason="needs the extra report")

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
    """A tokenizer of transformers that splits texts at each character."""
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
    model.tokenizer = theirs  # also as an object
    written = chat(model, MESSAGES, add_generation_prompt=prompt, **options)
    assert written.text == expected
    assert written.tokens.tolist() == [ours.encode(expected)]
    ends = ours.offsets(expected)
    for n, message in enumerate(MESSAGES):
        here = written.spans[str(n)]
        text = expected[ends[here[0]][0] : ends[here[-1]][1]]
        assert text == (message["content"].strip() if "trim" in name else message["content"])
        assert here == [*range(here[0], here[-1] + 1)]
    assert written.spans["user"] == written.spans["1"] + written.spans["3"]
    assert written.spans["user"][0] > written.spans["system"][-1]


def test_spans_are_positions_of_edits():
    model = load("pydoc-4l")
    one = chat(model, [{"role": "user", "content": "def f"}, {"role": "assistant", "content": "(x)"}],
               template="{% for m in messages %}{{ m.content }} {% endfor %}")  # fmt: skip
    assert one.text == "def f (x) "
    assert one.spans == {
        "user": [0, 1, 2, 3, 4],
        "0": [0, 1, 2, 3, 4],
        "assistant": [6, 7, 8],
        "1": [6, 7, 8],
    }
    runner = HookedRunner(model)
    hooks = {"blocks.1.resid_post": edits.zero(pos=one.spans["assistant"])}
    found = runner.run_with_hooks(one.tokens, hooks=hooks)
    zero = torch.tensor([1.0] * 6 + [0.0] * 3 + [1.0])[:, None]
    by_hand = runner.run_with_hooks(
        one.tokens, hooks={"blocks.1.resid_post": lambda value, point: value * zero}
    )
    assert torch.equal(found, by_hand)


def test_attached_models_read_chats():
    from tests.attachable import made as tiny

    model = tiny("llama")
    with attach(model, tokenizer=made(TEMPLATES["chatml"])):
        assert chat(model, MESSAGES).text.startswith("<|im_start|>system\nbe kind")


def test_what_a_template_refuses_or_changes_is_one_error(tmp_path):
    model = load("pydoc-4l")
    with pytest.raises(ValueError, match="must accept the messages; it says: roles must alternate"):
        chat(model, MESSAGES, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="must accept the messages"):
        chat(model, MESSAGES, template="{% if %}")
    with pytest.raises(ValueError, match="must keep contents as they are"):
        chat(model, MESSAGES, template="{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    with pytest.raises(
        ValueError, match="must have a role and a content, both texts; got {'role': 'user'}"
    ):
        chat(model, [*MESSAGES, {"role": "user"}], template="x")
    with pytest.raises(ValueError, match="the tokenizer's files have none"):
        chat(model, MESSAGES)
    with pytest.raises(ValueError, match="must accept the messages"):  # no way to Python's insides
        ChatTemplate("{{ ''.__class__.__mro__ }}").render(MESSAGES)
    left_out = chat(model, MESSAGES[:2], template="{{ messages[1].content }}")
    assert left_out.spans["system"] == []


def test_of_several_templates_the_default_is_taken(tmp_path):
    made("x").save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = tmp_path / "tokenizer_config.json"
    several = [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]
    described = json.loads(config.read_text())
    config.write_text(json.dumps(described | {"chat_template": several}))
    assert load_tokenizer(tmp_path).chat_template.render([]) == "b"
    config.write_text(json.dumps(described | {"chat_template": several[:1]}))
    with pytest.raises(ValueError, match="must be named default; got tools"):
        load_tokenizer(tmp_path)
    config.write_text(json.dumps(described))
    assert load_tokenizer(tmp_path).chat_template is None
