"""Analyses with random combinations of settings, compared with each text alone and plain hooks.

Each seed draws an architecture, the side of the padding, the lengths of the texts, the kind of the
answers, a site, positions, heads and an edit. The expected numbers come from a model of
`transformers` that is not attached. It reads each text alone, without padding, and hooks of PyTorch
change its values.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from hooks import HookedRunner
from interp import Pairs, activation_patching, edits, sweep
from models import attach
from tests import tiny

LAYERS, HEADS, D_HEAD, D_MODEL, VOCAB = 3, 2, 6, 12, 23
ROUNDING = 1e-4


@dataclass
class Plain:
    """A model of `transformers` that runs one text, with changes of its values by plain hooks."""

    model: Any
    layers: Any
    modules: dict[str, str] = field(default_factory=dict)

    def module(self, site, layer):
        block = self.layers[layer]
        return block if site == "resid_post" else block.get_submodule(self.modules[site])

    def run(self, tokens, site=None, layer=0, change=None):
        """Return the logits of a text, with one value changed by `change(value)`."""
        return self._hooked(tokens, site, layer, change)[0]

    def value(self, tokens, site, layer):
        """Return the value at a site, [pos, d_model] or, for `z`, [pos, head, d_head]."""
        return self._hooked(tokens, site, layer, change=lambda value: value)[1]

    def _hooked(self, tokens, site, layer, change):
        seen = []

        def changed(value):
            whole = value.unflatten(-1, (-1, D_HEAD)) if site == "z" else value
            new = change(whole[0].clone())
            seen.append(whole[0].clone())
            return new.reshape(value.shape)

        def after(module, args, output):
            if isinstance(output, tuple):
                return (changed(output[0]), *output[1:])
            return changed(output)

        handles = []
        if site == "z":
            module = self.module(site, layer)
            handles.append(module.register_forward_pre_hook(lambda _, args: (changed(args[0]),)))
        elif site is not None:
            handles.append(self.module(site, layer).register_forward_hook(after))
        logits = self.model(torch.tensor([tokens])).logits[0]
        for handle in handles:
            handle.remove()
        return logits, *seen


def plain(kind):
    """Return a random model with large weights, without points."""
    if kind == "llama":
        model = tiny.redraw(tiny.model("LlamaForCausalLM"), 0.3)
        modules = dict(attn_out="self_attn", mlp_out="mlp", z="self_attn.o_proj")
        return Plain(model, model.model.layers, modules)
    model = tiny.redraw(tiny.model("GPT2LMHeadModel"), 0.3)
    return Plain(model, model.transformer.h, dict(attn_out="attn", mlp_out="mlp", z="attn.c_proj"))


@dataclass
class Setting:
    """Texts and answers of random numbers and lengths, as lists of tokens."""

    rng: random.Random
    clean: list[list[int]]
    corrupted: list[list[int]]
    side: str
    answers: list[tuple[list[int], list[int] | None]]

    @classmethod
    def drawn(cls, rng):
        lengths = [rng.randint(3, 6) for _ in range(rng.randint(2, 4))]
        texts = [[[rng.randrange(1, VOCAB) for _ in range(n)] for n in lengths] for _ in range(2)]
        most = rng.choice([1, 3])
        has_wrong = rng.random() < 0.7

        def answer():
            return [rng.randrange(VOCAB) for _ in range(rng.randint(1, most))]

        answers = []
        for _ in lengths:
            right, wrong = answer(), answer()
            while wrong == right:
                wrong = answer()
            answers.append((right, wrong if has_wrong else None))
        return cls(rng, *texts, rng.choice(["left", "right"]), answers)

    @property
    def width(self):
        return max(map(len, self.clean))

    def padded(self, texts):
        """Return the padded tokens [batch, pos] and their mask."""
        rows, mask = [], []
        for text in texts:
            padding = [0] * (self.width - len(text))
            real = [1] * len(text)
            rows.append(padding + text if self.side == "left" else text + padding)
            mask.append(padding + real if self.side == "left" else real + padding)
        return torch.tensor(rows), torch.tensor(mask)

    def column(self, example, pos):
        """Return the column of a position of a text in the padded batch."""
        padding = self.width - len(self.clean[example])
        return pos + padding if self.side == "left" else pos

    @property
    def is_one_token(self):
        return all(len(part) == 1 for pair in self.answers for part in pair if part is not None)

    def pairs(self):
        """Return the pairs of the package."""
        clean, mask = self.padded(self.clean)
        corrupted, _ = self.padded(self.corrupted)
        if self.is_one_token:
            rows = [[part[0] for part in pair if part is not None] for pair in self.answers]
            answers = torch.tensor(rows)
            answers = answers if answers.shape[1] == 2 else answers[:, 0]
        else:
            answers = [
                tuple(torch.tensor(part) for part in pair if part is not None)
                for pair in self.answers
            ]
            if self.answers[0][1] is None:
                answers = [right for (right,) in answers]
        return Pairs(clean, corrupted, answers, attention_mask=mask)

    def metric(self, example, logits_of):
        """Return the metric of one example.

        Args:
            logits_of: a function that returns the logits of the text with an answer behind it.
        """
        right, wrong = self.answers[example]
        n_text = len(self.clean[example])
        if self.is_one_token:
            last = logits_of([])[n_text - 1]
            if wrong is None:
                return last.log_softmax(-1)[right[0]]
            return last[right[0]] - last[wrong[0]]
        scores = []
        for answer in (right, wrong):
            if answer is not None:
                log_probs = logits_of(answer).log_softmax(-1)[n_text - 1 : -1]
                scores.append(sum(row[token] for row, token in zip(log_probs, answer, strict=True)))
        return scores[0] if len(scores) == 1 else scores[0] - scores[1]


SEEDS = pytest.mark.parametrize("seed", range(120))


@SEEDS
@pytest.mark.sampled(16)
@torch.no_grad()
def test_patching(seed):
    rng = random.Random(seed)
    setting = Setting.drawn(rng)
    model = plain(rng.choice(["llama", "gpt2"]))
    site = rng.choice(["resid_post", "attn_out", "mlp_out", "z"])
    over = ["layer", *(["pos"] if rng.random() < 0.5 else [])]
    over += ["head"] if site == "z" and rng.random() < 0.7 else []
    direction = rng.choice(["denoising", "noising"])
    edited, source = setting.corrupted, setting.clean
    if direction == "noising":
        edited, source = source, edited
    sizes = {"layer": LAYERS, "pos": setting.width, "head": HEADS}
    expected = torch.zeros(*(sizes[axis] for axis in over), len(edited))

    def effect(example, layer, positions, heads):
        def edited_logits(answer):
            value = model.value(source[example] + answer, site, layer)

            def change(old):
                where = range(len(old)) if positions is None else positions
                for pos in where:
                    old[pos, heads] = value[pos, heads]
                return old

            return model.run(edited[example] + answer, site, layer, change)

        base = setting.metric(example, lambda answer: model.run(edited[example] + answer))
        return setting.metric(example, edited_logits) - base

    for example in range(len(edited)):
        for layer in range(LAYERS):
            for pos in range(len(edited[example])) if "pos" in over else [None]:
                for head in range(HEADS) if "head" in over else [None]:
                    heads = slice(None) if head is None else head
                    value = effect(example, layer, None if pos is None else [pos], heads)
                    place = [layer]
                    place += [] if pos is None else [setting.column(example, pos)]
                    place += [] if head is None else [head]
                    expected[(*place, example)] = value
    attach(model.model)
    pairs = setting.pairs()
    result = activation_patching(
        model.model, pairs, site, over, direction=direction, progress=False
    )
    assert result.axes == (*over, "example")
    torch.testing.assert_close(result.values, expected, rtol=ROUNDING, atol=ROUNDING)


def drawn_positions(rng):
    """Return an argument `pos=`, and a function from the length of a text to its positions."""
    return rng.choice(
        [
            (None, lambda n: range(n)),
            (-1, lambda n: [n - 1]),
            (-2, lambda n: [n - 2]),
            (slice(-2, None), lambda n: [n - 2, n - 1]),
            ([-1, -3], lambda n: [n - 3, n - 1]),
            (slice(None, -1), lambda n: range(n - 1)),
        ]
    )


def drawn_edit(rng, setting, site, cache, values):
    """Return an edit, and the same change of one text as a function of (value, example).

    Args:
        rng: the source of the choices.
        setting: the texts.
        site: the site.
        cache: the cache of a run of the corrupted texts, for the package.
        values: the values of the corrupted texts at the site, each without padding.
    """
    pos, positions = drawn_positions(rng)
    head = rng.randrange(HEADS) if site == "z" and rng.random() < 0.7 else None
    heads = slice(None) if head is None else head
    where = {} if pos is None else {"pos": pos}
    where |= {} if head is None else {"head": head}
    vector = torch.randn(D_HEAD if site == "z" else D_MODEL)
    mean = torch.cat(values).mean(0)
    drawn = [
        (edits.zero(**where), lambda old, example: torch.zeros_like(old)),
        (edits.scale(-0.7, **where), lambda old, example: old * -0.7),
        (edits.add(vector, **where), lambda old, example: old + vector),
        (edits.mean(cache, across=("batch", "pos"), **where), lambda old, example: mean + 0 * old),
    ]
    if pos is not None:
        drawn.append((edits.replace(cache, **where), lambda old, example: values[example]))
    edit, new = rng.choice(drawn)

    def change(value, example):
        n_text = len(setting.clean[example])
        n_answer = len(value) - n_text
        changed = new(value[:n_text], example)
        if pos is None and n_answer:
            # An edit without positions also changes the positions of the answer.
            changed = torch.cat([changed, new(value[n_text:], example)])
        for place in [*positions(n_text), *(range(n_text, len(value)) if pos is None else [])]:
            value[place, heads] = changed[place, heads]
        return value

    return edit, change


@SEEDS
@pytest.mark.sampled(16)
@torch.no_grad()
def test_edits(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    setting = Setting.drawn(rng)
    model = plain(rng.choice(["llama", "gpt2"]))
    attached = plain("llama" if model.modules["z"] == "self_attn.o_proj" else "gpt2")
    attach(attached.model)
    clean, mask = setting.padded(setting.clean)
    corrupted, _ = setting.padded(setting.corrupted)
    runner = HookedRunner(attached.model)
    _, cache = runner.run_with_cache(corrupted, attention_mask=mask, lazy=rng.random() < 0.3)
    runs, expected = [], []
    bases = [
        setting.metric(n, lambda answer, text=text: model.run(text + answer))
        for n, text in enumerate(setting.clean)
    ]
    for _ in range(6):
        site, layer = rng.choice(["resid_post", "attn_out", "mlp_out", "z"]), rng.randrange(LAYERS)
        values = [model.value(text, site, layer) for text in setting.corrupted]
        edit, change = drawn_edit(rng, setting, site, cache, values)
        name = f"blocks.{layer}.{'attn.z' if site == 'z' else site}"
        runs.append({name: edit})
        effects = []
        for n, text in enumerate(setting.clean):

            def edited(answer, n=n, text=text, site=site, layer=layer, change=change) -> Tensor:
                return model.run(text + answer, site, layer, lambda value: change(value, n))

            effects.append(setting.metric(n, edited) - bases[n])
        expected.append(torch.stack(effects))
    result = sweep(attached.model, setting.pairs(), runs, progress=False)
    torch.testing.assert_close(result.values, torch.stack(expected), rtol=ROUNDING, atol=ROUNDING)
    if setting.is_one_token:
        # The same edits in a run whose logits contain the mask.
        metric = setting.pairs().metric
        for run, effect in zip(runs, expected, strict=True):
            output = runner.run_with_hooks(clean, attention_mask=mask, hooks=run)
            found = metric(output) - torch.stack(bases)
            torch.testing.assert_close(found, effect, rtol=ROUNDING, atol=ROUNDING)
