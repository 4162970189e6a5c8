"""Small real model files: a byte-level vocabulary, GGUF files, wheels."""

import hashlib
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from northchat.model.fetch import WheelFile

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
CORPUS = (
    "def reverse(text: str) -> str:\n\treturn text[::-1]  # 12345 digits\r\n",
    "It's what they'd said: WE'LL see, the thing and the other thing, 3.14159!",
    "日本語の文章と中文的句子。 Ελληνικά, русский текст 🎉👩‍👩‍👧",
)
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS = 256, 4, 2, 64, 512, 2


@cache
def byte_level_bpe() -> Tokenizer:
    """A trained byte-level BPE of 400 entries, MARKERS first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(MARKERS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def vocabulary() -> dict[str, Any]:
    """The GGUF fields of `byte_level_bpe`."""
    import json

    model = json.loads(byte_level_bpe().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in MARKERS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }


def header() -> dict[str, Any]:
    return {
        "llama.block_count": LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": WIDTH,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.vocab_size": 400,
    }


def tensors(vocab: int = 400) -> dict[str, np.ndarray]:
    """float32, by GGUF's names."""
    random = np.random.default_rng(5)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (WIDTH, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (WIDTH, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, WIDTH),
        }
    return {name: random.standard_normal(shape).astype(np.float32) * 0.05 for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    fields: dict[str, Any] | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.Q4_1,
    values: dict[str, np.ndarray] | None = None,
    architecture: str = "llama",
) -> Path:
    """A tiny llama; `fields` replace header entries, None removes one. Matrices are stored as `kind`."""
    writer = GGUFWriter(path, architecture)
    for key, value in (header() | vocabulary() | (fields or {})).items():
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, value in (tensors() if values is None else values).items():
        if value.ndim == 1:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder: Path, content: bytes) -> WheelFile:
    """A wheel with one file in it, such as pip accepts."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tinymodel-1.0-py3-none-any.whl"
    info = "tinymodel-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tinymodel/model.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelFile(
        requirement="tinymodel==1.0",
        wheel_bytes=wheel.stat().st_size,
        member="tinymodel/model.gguf",
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
