"""Cards of crosscoders: texts and tokens of either model."""

import pytest
import torch
from torch.testing import assert_close

from hooks import HookedRunner
from interp.features import crosscoder_cards
from tests.interp.features.crosscoders import FEATURES, POINT, random_crosscoder, two_models

TEXTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8], [9, 7, 9, 3], [6, 5, 3, 5, 8]]


@pytest.mark.parametrize("number", [0, 1])
def test_cards_show_texts_and_the_tokens_of_the_chosen_model(number):
    models, crosscoder = two_models(), random_crosscoder()
    models[1].unembedding.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    chosen = [11, 4]
    cards = crosscoder_cards(
        models, crosscoder, TEXTS, chosen, f"model {number}", k=3, pos=slice(1, None), batch=3
    )
    values = []
    for model in models:
        runner = HookedRunner(model)
        values.append([runner.capture(torch.tensor([text]), names=POINT)[POINT] for text in TEXTS])
    features = [crosscoder.encode([*pair])[0] for pair in zip(*values, strict=True)]
    for card, feature in zip(cards, chosen, strict=True):
        of_text = [values_of_text[1:, feature] for values_of_text in features]
        counted = torch.cat(of_text)
        assert card.index == feature
        assert card.n_tokens == 6 + 4 + 3 + 4
        assert card.density == pytest.approx(float((counted != 0).float().mean()))
        assert card.largest == pytest.approx(float(counted.max()), abs=1e-6)
        # The last text is a copy.
        largest = sorted((float(numbers.max()) for numbers in of_text[:3]), reverse=True)
        shown = [example.activations[example.pos] for example in card.examples]
        assert shown == pytest.approx([number for number in largest if number > 0], abs=1e-6)
        rows = crosscoder.W_dec[number]
        row = rows[feature] / crosscoder.scale[number]
        directions = (models[number].unembedding.weight * models[number].ln_final.weight).detach()
        wanted = (directions - directions.mean(1, keepdim=True)) @ row
        wanted -= wanted.mean()
        assert card.top[0][0] == str(int(wanted.argmax()))
        assert card.top[0][1] == pytest.approx(float(wanted.max()), abs=1e-5)
        cosines = torch.cosine_similarity(rows, rows[feature][None])
        cosines[feature] = -2
        assert card.nearest[0][0] == int(cosines.argmax())
        assert_close(card.nearest[0][1], float(cosines.max()), rtol=0, atol=1e-5)


def test_a_feature_must_exist():
    models, crosscoder = two_models(), random_crosscoder()
    with pytest.raises(ValueError, match=rf"\[0, {FEATURES}\)"):
        crosscoder_cards(models, crosscoder, TEXTS, [FEATURES], 0)
    with pytest.raises(ValueError, match="pos must select"):
        crosscoder_cards(models, crosscoder, TEXTS, [0], 0, pos=slice(9, None))
