# %% [markdown]
# # Models that see and hear, encoders and decoders
#
# `attach` puts points into any model of `transformers` whose blocks run one on another. It finds the parts by a run, so a model that reads
# more than tokens needs an `example`: the arguments of one run, such as a processor gives. Then the names are these:
#
# | model | points |
# | --- | --- |
# | decoders (GPT, Llama, ...), encoders (BERT, ViT, ...) | `blocks.*` |
# | an encoder with a decoder (T5, BART, Whisper) | `encoder.blocks.*`, `decoder.blocks.*`, there `cross.*` for attention to the encoder |
# | text with images (LLaVA, Qwen3-VL, PaliGemma, Mistral 3, Idefics 3) | `blocks.*`, `vision.blocks.*`, `vision.projected`, `merged` |
# | text with sounds (Qwen2-Audio, Voxtral) | `blocks.*`, `audio.blocks.*`, `audio.projected`, `merged` |
#
# `cache["resid_post", 3]` is of `blocks`; of another stack its name comes first, as in `cache["vision.resid_post", 3]`, and so it does in
# `activation_patching(model, pairs, "encoder.resid_pre")`.

# %%
import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from hooks import HookedRunner
from interp import Pairs, activation_patching, direct_logit_attribution, edits, pictures
from models import attach

# %% [markdown]
# ## Which patch carries the answer
#
# A small vision transformer learns to say the colour of a square in a noisy image. Its first position is a token for the class, then come
# the patches, from left to right and from top to bottom.

# %%
torch.manual_seed(0)
sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
vit = ViTForImageClassification(ViTConfig(**sizes, image_size=24, patch_size=6, num_labels=3))


def images(colours: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Noise with a square of each colour, 0 to 2, at a patch, 0 to 15."""
    pixels = 0.3 * torch.randn(len(colours), 3, 24, 24)
    for image, colour, place in zip(pixels, colours.tolist(), places.tolist(), strict=True):
        row, column = 6 * (place // 4), 6 * (place % 4)
        image[colour, row : row + 6, column : column + 6] += 2
    return pixels


optimizer = torch.optim.Adam(vit.parameters(), lr=2e-3)
for _ in range(100):
    colours = torch.randint(3, (64,))
    logits = vit(images(colours, torch.randint(16, (64,)))).logits
    loss = torch.nn.functional.cross_entropy(logits, colours)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
vit.eval()
print(f"loss {loss:.3f}")

# %% [markdown]
# Two images that differ in the colour of one square, and the metric: the logit of the right colour less that of the other. A classifier
# has one position, so metrics that read the last one read it. Pairs are of whatever the model reads first, here pixels.

# %%
torch.set_grad_enabled(False)
draw = torch.get_rng_state()
red = images(torch.tensor([0, 0]), torch.tensor([6, 9]))
torch.set_rng_state(draw)  # the same noise
blue = images(torch.tensor([2, 2]), torch.tensor([6, 9]))
attach(vit, example={"pixel_values": red})
pairs = Pairs(red, blue, (0, 2))
restored = activation_patching(vit, pairs, "resid_pre")
print(restored.select(layer=0).top(3))
pictures.image(red[0], restored.values[0, 1:, 0], title="what each patch restores", unit="logits")

# %% [markdown]
# Before the first block the patch with the square restores all; before the second, all of it is with the token for the class.

# %%
print(restored.values[:, [0, 7], 0])  # the class, and the patch of the first pair

# %% [markdown]
# ## Text with an image
#
# A tiny LLaVA of random weights. The projected patches of the image stand in the stream of the text at the places of the image's token, and
# `merged` is the stream with them in it: `embed` at the words, `vision.projected` at the image.

# %%
vision = CLIPVisionConfig(
    **sizes | dict(hidden_size=16), image_size=12, patch_size=4, projection_dim=16
)
text = LlamaConfig(
    vocab_size=40,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=3,
)
config = LlavaConfig(
    vision_config=vision,
    text_config=text,
    image_token_id=39,
    image_seq_length=9,
    vision_feature_layer=-1,
)
llava = LlavaForConditionalGeneration(config).eval()
tokens = torch.tensor([[1, *[39] * 9, 5, 7]])
image, other = torch.rand(2, 1, 3, 12, 12)
attach(llava, example={"input_ids": tokens, "pixel_values": image})
runner = HookedRunner(llava)
output, cache = runner.run_with_cache(input_ids=tokens, pixel_values=image)
print(cache["vision.resid_post", -1].shape, cache["vision.projected"].shape, cache["merged"].shape)
print(torch.equal(cache["merged"][0, 1:10], cache["vision.projected"][0]))

# %% [markdown]
# Direct logit attribution adds up with an image: `input` is what stands at the image's places. Where a model puts more of the image between
# later blocks (DeepStack in Qwen3-VL), `input1` and so on are what is added there.

# %%
parts = direct_logit_attribution(llava, cache, right=8, pos=-1)
print(parts.values.sum().item(), output.logits[0, -1, 8].item())

# %% [markdown]
# Pairs take what a processor gives, all arguments of a run by name. Here the same words with two images: the image of the first pair, patch after patch, in the tower.
# Tensors with a row for each text go with the texts. Models that read the patches of all images in one row (Qwen's) are given a list, with a tensor
# for each text: it is joined when the model runs.

# %%
pairs = Pairs(
    {"input_ids": tokens, "pixel_values": image},
    {"input_ids": tokens, "pixel_values": other},
    (8, 9),
)
effects = activation_patching(llava, pairs, "vision.resid_pre")
print(effects.top(3))

# %% [markdown]
# ## An encoder with a decoder
#
# The decoder's tokens are an argument of the run, `decoder_input_ids`. Metrics read its positions; `pos` of an edit counts those of the stack where it
# acts, padding of each included. Along `encoder_pos` are the encoder's positions in the decoder's `cross.k`, `cross.v`, `cross.scores` and `cross.pattern`.

# %%
t5 = T5ForConditionalGeneration(
    T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
).eval()
attach(t5)
source, decoded = torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([[0, 9, 2]])
texts = {"input_ids": source, "decoder_input_ids": decoded}
pairs = Pairs(texts, source.flip(1), (6, 7))
for site in ("encoder.resid_pre", "decoder.cross_out"):
    print(activation_patching(t5, pairs, site).top(1))
over = ["layer", "encoder_pos"]
print(activation_patching(t5, pairs, "decoder.cross.pattern", over=over).top(1))
later = {"decoder.blocks.0.resid_post": edits.zero(pos=2)}
with HookedRunner(t5).hooks(later):
    print(t5.generate(source, max_new_tokens=4))

# %% [markdown]
# ## What analyses need
#
# | analysis | needs |
# | --- | --- |
# | caches, edits, `sweep`, `activation_patching`, `attribution_patching`, `integrated_gradients` | points, and a metric of the logits, of whatever kind |
# | `logit_lens`, direct logit attribution, `decompose`, circuits and edges, attribution graphs | blocks of a text that a decoder's logits are read from: they work with an image in it, and not inside towers, encoders or encoder-decoders |
# | dictionaries, directions, stores | a point and texts: tokens that the model reads by themselves |
#
# What a model does not show is left out, and `attached.left_out` says why. Stages such as Swin's are blocks with points of their streams
# alone, and an attention that runs once for each window or image has none of its own unless the example has one. Modules that run many times have `calls="all"` and `call=` ([a model of your own](your_model.py)). Adapters, quantised and
# offloaded models were tried one by one: [settings](settings.md).
