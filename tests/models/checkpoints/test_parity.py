"""Every family, compared with `transformers`: logits, hidden states and patterns.

Texts are also padded, read in pieces, and run in bfloat16.
"""

import pytest
import torch

from hooks import HookedRunner
from models import KVCache
from models.checkpoints import from_hf, load
from models.checkpoints.huggingface.families import FAMILIES
from tests.models.checkpoints.gemma3 import values_by_hand
from tests.models.checkpoints.pair import BATCH, LAYERS, N_CTX, POS, ROWS, VOCAB, Pair

transformers = pytest.importorskip("transformers")

# The lengths of the rows of a padded batch.
LENGTHS = (23, 9, 14)
# The lengths of the parts in which a sequence is read.
PIECES = (7, 1, 2, 13)
POINTS = ["blocks.*.resid_pre", "blocks.*.resid_post", "*.attn.pattern"]


@pytest.fixture(scope="module", params=ROWS)
def pair(request, tmp_path_factory):
    transformers.utils.logging.disable_progress_bar()
    return Pair(request.param, tmp_path_factory.mktemp("pair"))


@pytest.fixture
def tokens():
    return torch.randint(VOCAB, (BATCH, POS), generator=torch.Generator().manual_seed(5))


def close(ours, theirs, name=None, atol=1e-5):
    torch.testing.assert_close(
        ours, theirs, atol=atol, rtol=0, msg=name and (lambda why: f"{name}: {why}")
    )


def seen(model, *args, **kwargs):
    """Run our model, and return its logits and the values that a reference has too."""
    names = POINTS + ["ln_final.normalized"] * model.config.final_norm
    logits, cache = HookedRunner(model).run_with_cache(*args, names=names, **kwargs)
    return {"logits": logits, **cache}


def close_throughout(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        close(ours[name], value, name)


def alone(values, row, real):
    """Return the values of a row at its real positions and real keys, as a batch of one."""
    part = {name: value[row : row + 1] for name, value in values.items()}
    return {
        name: value[:, :, real][..., real] if name.endswith("pattern") else value[:, real]
        for name, value in part.items()
    }


@pytest.mark.sampled(8)
def test_logits_streams_and_patterns(pair, tokens):
    ours, theirs = seen(pair.ours, tokens), pair.reference(tokens)
    close_throughout(ours, theirs)
    # Without hooks, the model uses the fused kernels.
    close(pair.ours(tokens), theirs["logits"])
    assert 1 < ours["logits"].abs().max() < 30
    for layer in range(LAYERS):
        pattern = ours[f"blocks.{layer}.attn.pattern"]
        assert pattern[:, :, -1].max() > 2 / POS  # attention is not uniform


@pytest.mark.parametrize("pair", ["gemma3_text", "gemma3_text linear"], indirect=True)
def test_every_point_of_gemma_3_against_hooks_of_pytorch(pair, tokens):
    with torch.no_grad():
        theirs = values_by_hand(pair.theirs, tokens)
    logits, cache = HookedRunner(pair.ours).run_with_cache(tokens, mode="full")
    assert cache.keys() | {"logits"} == theirs.keys()
    for name, value in theirs.items():
        ours = logits if name == "logits" else cache[name]
        assert ours.shape == value.shape, name
        assert (ours - value).abs().max() < 1e-5 * value.abs().max(), name


@pytest.mark.sampled(24)
def test_a_model_in_memory_is_copied(pair, tokens):
    copied = from_hf(pair.theirs)
    assert copied.config == pair.ours.config
    assert torch.equal(copied(tokens), pair.ours(tokens))
    theirs = {parameter.untyped_storage().data_ptr() for parameter in pair.theirs.parameters()}
    ours = {parameter.untyped_storage().data_ptr() for parameter in copied.parameters()}
    assert not theirs & ours


@pytest.mark.sampled(8)
@pytest.mark.parametrize("pair", FAMILIES, indirect=True)
def test_half_precision(pair, tokens):
    """bfloat16 rounds the values of both models at every step, by up to 2^-9.

    The error of our model may be 1.5 times the error of the reference, plus 0.3 logits.
    """
    with torch.no_grad():
        exact = pair.theirs(tokens).logits
        theirs = from_config_like(pair.theirs)(tokens).logits.float()
    model = load(pair.directory, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    ours = model(tokens).float()
    error, usual = (ours - exact).abs(), (theirs - exact).abs()
    assert error.square().mean().sqrt() <= 1.5 * usual.square().mean().sqrt()
    assert error.max() < 0.3


def from_config_like(model, dtype=torch.bfloat16):
    """Return a copy in another dtype, like `from_pretrained(dtype=...)`."""
    other = type(model)._from_config(model.config, attn_implementation="eager", dtype=dtype).eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("pair", "dtype"),
    [*((family, torch.bfloat16) for family in FAMILIES), ("gemma2", torch.float16)],
    indirect=["pair"],
    ids=str,
)
def test_a_file_in_half_precision_is_read_as_float32(pair, dtype, tokens, tmp_path):
    """The numbers in the file are rounded, but not numbers computed from them, such as 1 + gain in
    Gemma 2.
    """
    from_config_like(pair.theirs, dtype).save_pretrained(tmp_path)
    theirs = type(pair.theirs).from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
        rounding = (pair.theirs(tokens).logits - expected).abs().max()
    # The file in half precision really contains other numbers.
    assert rounding > 1e-4
    close(load(tmp_path, dtype=torch.float32)(tokens), expected)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(pair, side):
    rows, padded, mask = padded_batch(side)
    # Without hooks, the model uses the fused kernels.
    logits = pair.ours(padded, attention_mask=mask)
    ours = seen(pair.ours, padded, attention_mask=mask)
    for row, tokens in enumerate(rows):
        theirs = pair.reference(tokens[None])
        close(logits[row, mask[row]], theirs["logits"][0])
        close_throughout(alone(ours, row, mask[row]), theirs)


@torch.no_grad()
def read(model, pieces, mask=None):
    """Return the logits of tokens that are read piece by piece into a cache of keys and values."""
    cache, parts = KVCache(max_context=N_CTX), []
    for piece in pieces:
        now = None if mask is None else mask[:, : cache.length + piece.shape[1]]
        parts.append(model(piece, attention_mask=now, kv_cache=cache))
    assert cache.length == POS
    return torch.cat(parts, 1)


@pytest.mark.sampled(8)
def test_a_sequence_is_read_in_pieces(pair, tokens):
    pieces, theirs = tokens.split(PIECES, 1), pair.reference(tokens)
    close(read(pair.ours, pieces), theirs["logits"])
    close_throughout(seen(pair.ours, pair.ours, pieces, run=read), theirs)


@pytest.mark.sampled(8)
def test_a_padded_batch_is_read_in_pieces(pair):
    rows, padded, mask = padded_batch("left")
    pieces = padded.split((15, *PIECES[:2]), 1)  # the first piece contains real tokens of every row
    logits = read(pair.ours, pieces, mask)
    ours = seen(pair.ours, pair.ours, pieces, mask, run=read)
    for row, tokens in enumerate(rows):
        theirs = pair.reference(tokens[None])
        close(logits[row, mask[row]], theirs["logits"][0])
        close_throughout(alone(ours, row, mask[row]), theirs)


def padded_batch(side):
    generator = torch.Generator().manual_seed(11)
    rows = [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]
    padded = torch.full((len(rows), max(LENGTHS)), 7)
    mask = torch.zeros(padded.shape, dtype=torch.bool)
    for place, row in enumerate(rows):
        real = slice(-len(row), None) if side == "left" else slice(len(row))
        padded[place, real], mask[place, real] = row, True
    return rows, padded, mask
