"""Tiny random models of `transformers` that read images or sounds, or have two stacks of blocks.

The two stacks are an encoder and a decoder. Each model comes with the input of a run.
"""

import functools

import pytest
import torch

from tests import tiny

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

WIDTH, IMAGE, SOUND = 24, 60, 60
TEXT = tiny.SIZES | dict(
    vocab_size=61,
    hidden_size=WIDTH,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    pad_token_id=0,
    bos_token_id=1,
)
PATCHES = dict(hidden_size=16, patch_size=4)
TOWER = PATCHES | dict(num_hidden_layers=2)
EARS = dict(
    num_mel_bins=8, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=14, d_model=16
)
BOTH = dict(
    vocab_size=61,
    hidden_size=16,
    encoder_layers=2,
    decoder_start_token_id=2,
    pad_token_id=0,
    bos_token_id=1,
    forced_eos_token_id=None,
)
T5 = dict(
    vocab_size=61,
    hidden_size=16,
    d_ff=13,
    num_hidden_layers=2,
    decoder_start_token_id=0,
    pad_token_id=0,
)


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def tokens_with(n, mark=IMAGE, rows=2):
    """Return rows of tokens. `n` of the tokens stand for the features of an image or a sound."""
    draw = torch.Generator().manual_seed(2)
    words = torch.randint(3, 50, (rows, 6), generator=draw)
    return torch.cat([words[:, :3], torch.full((rows, n), mark), words[:, 3:]], 1)


def llava():
    vision = tiny.config("CLIPVisionConfig", **TOWER, image_size=12)
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE,
        image_seq_length=9,
        vision_feature_layer=-1,
    )
    given = dict(input_ids=tokens_with(9), pixel_values=drawn(2, 3, 12, 12))
    return transformers.LlavaForConditionalGeneration(config), given


def paligemma():
    vision = tiny.config("SiglipVisionConfig", **TOWER, image_size=12)
    config = transformers.PaliGemmaConfig(
        vision_config=vision.to_dict() | {"projection_dim": WIDTH},
        text_config=transformers.GemmaConfig(**TEXT).to_dict(),
        image_token_id=IMAGE,
        projection_dim=WIDTH,
    )
    tokens = tokens_with(9)
    given = dict(
        input_ids=tokens, pixel_values=drawn(2, 3, 12, 12), token_type_ids=torch.zeros_like(tokens)
    )
    return transformers.PaliGemmaForConditionalGeneration(config), given


def mistral3():
    vision = tiny.config("PixtralVisionConfig", **TOWER, image_size=16, head_dim=8)
    config = transformers.Mistral3Config(
        vision_config=vision,
        text_config=transformers.MistralConfig(**TEXT),
        image_token_id=IMAGE,
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )
    given = dict(
        input_ids=tokens_with(4),
        pixel_values=drawn(2, 3, 16, 16),
        image_sizes=torch.tensor([[16, 16]] * 2),
    )
    return transformers.Mistral3ForConditionalGeneration(config), given


def idefics3():
    config = transformers.Idefics3Config(
        vision_config=tiny.config("Idefics3VisionConfig", **TOWER, image_size=16),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE,
        scale_factor=2,
    )
    given = dict(input_ids=tokens_with(4), pixel_values=drawn(2, 1, 3, 16, 16))
    return transformers.Idefics3ForConditionalGeneration(config), given


QWEN_TOWER = PATCHES | dict(
    depth=3,
    num_heads=2,
    spatial_merge_size=2,
    temporal_patch_size=1,
    out_hidden_size=WIDTH,
    num_position_embeddings=16,
)
QWEN = dict(
    image_token_id=IMAGE, video_token_id=59, vision_start_token_id=58, vision_end_token_id=57
)


def of_qwen(rows):
    """Return the input of Qwen's models, with the patches of all images in one axis."""
    row = [1, 5, 58, IMAGE, IMAGE, IMAGE, IMAGE, 57, 7, 8]
    return dict(
        input_ids=torch.tensor([row] * rows),
        mm_token_type_ids=torch.tensor([[int(token == IMAGE) for token in row]] * rows),
        pixel_values=drawn(16 * rows, 3 * 16),
        image_grid_thw=torch.tensor([[1, 4, 4]] * rows),
    )


def qwen3_vl(rows=1):
    rope = dict(
        rope_type="default", mrope_section=[2, 1, 1], mrope_interleaved=True, rope_theta=10000.0
    )
    config = transformers.Qwen3VLConfig(
        text_config=TEXT | dict(rope_parameters=rope),
        vision_config=tiny.config(
            "Qwen3VLVisionConfig", **QWEN_TOWER, deepstack_visual_indexes=[0, 1]
        ),
        **QWEN,
    )
    return transformers.Qwen3VLForConditionalGeneration(config), of_qwen(rows)


def qwen3_5(rows=1):
    rope = dict(
        rope_type="default",
        mrope_section=[1, 1, 0],
        mrope_interleaved=True,
        rope_theta=10000.0,
        partial_rotary_factor=0.5,
    )
    linear = dict(
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=6,
        linear_value_head_dim=6,
    )
    config = transformers.Qwen3_5Config(
        text_config=TEXT | linear | dict(rope_parameters=rope),
        vision_config=tiny.config("Qwen3_5VisionConfig", **QWEN_TOWER),
        **QWEN,
    )
    return transformers.Qwen3_5ForConditionalGeneration(config), of_qwen(rows)


def qwen2_audio():
    config = transformers.Qwen2AudioConfig(
        audio_config=EARS | dict(max_source_positions=12),
        text_config=transformers.Qwen2Config(**TEXT),
        audio_token_id=SOUND,
    )
    given = dict(
        input_ids=tokens_with(6, SOUND),
        input_features=drawn(2, 8, 24),
        feature_attention_mask=torch.ones(2, 24, dtype=torch.long),
        attention_mask=torch.ones(2, 12, dtype=torch.long),
    )
    return transformers.Qwen2AudioForConditionalGeneration(config), given


def voxtral():
    sizes = dict(hidden_size=16, intermediate_size=64, head_dim=8)
    config = transformers.VoxtralConfig(
        audio_config=tiny.config(
            "VoxtralEncoderConfig", num_mel_bins=8, max_source_positions=12, **sizes
        ),
        text_config=transformers.LlamaConfig(**TEXT),
        audio_token_id=SOUND,
    )
    given = dict(input_ids=tokens_with(3, SOUND), input_features=drawn(2, 8, 24))
    return transformers.VoxtralForConditionalGeneration(config), given


def t5(**more):
    return tiny.model("T5ForConditionalGeneration", **T5, **more), None


def gated_t5():
    return t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False, num_decoder_layers=3)


def bart():
    return tiny.model("BartForConditionalGeneration", **BOTH), None


def mbart():
    return tiny.model("MBartForConditionalGeneration", **BOTH, decoder_layers=3), None


def whisper():
    model = tiny.model(
        "WhisperForConditionalGeneration",
        **BOTH,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=20,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    given = dict(input_features=drawn(2, 8, 24), decoder_input_ids=tokens_with(0)[:, :5])
    return model, given


def vit():
    model = tiny.model("ViTForImageClassification", **TOWER, image_size=12, num_labels=9)
    return model, dict(pixel_values=drawn(2, 3, 12, 12))


def clip():
    tokens = dict(vocab_size=61, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config = transformers.CLIPConfig(
        text_config=tiny.config("CLIPTextConfig", hidden_size=16, **tokens),
        vision_config=tiny.config("CLIPVisionConfig", **TOWER, image_size=12),
        projection_dim=12,
    )
    given = dict(input_ids=tokens_with(1), pixel_values=drawn(2, 3, 12, 12))
    return transformers.CLIPModel(config), given


TOWERS = (llava, paligemma, mistral3, idefics3, qwen3_vl, qwen3_5, qwen2_audio, voxtral)
PAIRED = (t5, gated_t5, bart, mbart, whisper)
ALL = {make.__name__: make for make in (*TOWERS, *PAIRED, vit, clip)}
"""The makers, by the names of the models."""


def made(make, **options):
    """Return a model, the example that `attach` needs, and the input of a run."""
    torch.manual_seed(0)
    model, example = make(**options)
    tokens = tokens_with(1)
    given = example or dict(input_ids=tokens, decoder_input_ids=(tokens[:, :5] + 1) % 50)
    return tiny.redraw(model, 0.2).eval(), example, given


@functools.cache
def is_there(name):
    """Return True if this version of `transformers` has the model."""
    try:
        ALL[name]()
    except AttributeError:
        return False
    return True
