"""Make the fixtures of tests/models/checkpoints/test_gguf_families.py with llama.cpp's converter.

Run it by hand, with transformers 5.24 and the llama.cpp in the source distribution of
llama-cpp-python 0.3.36 (`vendor/llama.cpp`): `python -m tests.gguf.make path/to/llama.cpp`. Each
file contains a small random model of `transformers`. `expected.safetensors` contains the logits
that the model computed in float64, by the name of the file. The converter knows only published
tokenizers, so this script gives each file a small vocabulary.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from tests.gguf.shaken import shaken

HERE = Path(__file__).parent
VOCAB, N_CTX = 53, 64
TOKENS = torch.randint(VOCAB, (1, 19), generator=torch.Generator().manual_seed(1))
# The type and the config of each model. `REFUSED` of the test lists models that are not supported.
# In Gemma 3, five of six layers have a window, and the file does not say which, so the model has
# seven layers.
MODELS = json.loads((HERE / "models.json").read_text())

# Fields in the config.json of published models that the converter reads.
OLDER = {"rotary_pct": 0.5, "n_ctx": N_CTX}


def randomized(kind, options):
    """Return a model whose parameters all matter, and are exact in half precision."""
    config = transformers.AutoConfig.for_model(kind, **options)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    shaken(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    return model


def quantized(model):
    """Round each matrix of a model to the numbers that Q8_0 can store, and return the model."""
    import gguf

    kind = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                blocks = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, kind)))
    return model


def small_vocabulary(self):
    """Write a small vocabulary. This function replaces the method `set_vocab` of a converter.

    The tokens are letters, and tokens for the beginning, the end and the padding of a text.
    """
    tokens = ["<pad>", "<s>", "</s>"] + [chr(ord("A") + place) for place in range(VOCAB - 3)]
    kinds = [3] * 3 + [1] * (VOCAB - 3)
    self.gguf_writer.add_tokenizer_model("gpt2")
    self.gguf_writer.add_tokenizer_pre("gpt-2")
    self.gguf_writer.add_token_list(tokens)
    self.gguf_writer.add_token_types(kinds)
    self.gguf_writer.add_token_merges(["A B"])
    self.gguf_writer.add_bos_token_id(1)
    self.gguf_writer.add_eos_token_id(2)


def convert(directory, file, stored):
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    hparams = OLDER | ModelBase.load_hparams(directory, False)
    architecture = get_model_architecture(hparams, ModelType.TEXT)
    converter = get_model_class(architecture)
    # The converter of Gemma 3 reads the size of the vocabulary from this file.
    vocabulary = {"model": {"vocab": dict.fromkeys(map(str, range(VOCAB)))}, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(vocabulary))
    was, converter.set_vocab = converter.set_vocab, small_vocabulary
    try:
        options = dict(eager=True, model_name="tiny", hparams=hparams)
        converter(directory, gguf.LlamaFileType[stored], file, **options).write()
    finally:
        converter.set_vocab = was


def main(llama_cpp, *names):
    sys.path[:0] = [f"{llama_cpp}/gguf-py", llama_cpp]
    logits = {"tokens": TOKENS}
    for name in names or MODELS:
        kind, options = MODELS[name]
        model, stored = randomized(kind, options), "MOSTLY_F16"
        if name.endswith("q8_0"):
            model, stored = quantized(model), "MOSTLY_Q8_0"
        with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
            model.save_pretrained(directory)
            convert(Path(directory), HERE / f"{name}.gguf", stored)
        with torch.no_grad():
            logits[name] = model.double()(TOKENS, use_cache=False).logits.float()
    if not names:
        save_file(logits, HERE / "expected.safetensors")
    return logits


if __name__ == "__main__":
    main(*sys.argv[1:])
