"""Writes a GGUF model in the forms that other engines read, with the same weights.

    python -m benchmarks.checkpoints [--model FILE.gguf] --output DIR

DIR/hf-DTYPE is a Hugging Face folder (config.json, tokenizer, model.safetensors), DIR/model-DTYPE.gguf a GGUF
file without quantisation, for DTYPE float32 and bfloat16. What is there already is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.gguf_tokenizer import build_tokenizer
from models.config import ModelConfig
from models.gguf_file import GGUFFile
from models.gguf_loader import GGUFSource, config_from_gguf
from models.loading import default_model_path
from models.weights import expected_tensors

DTYPES = ("float32", "bfloat16")


def hugging_face_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json of a Llama model. Raises ValueError for a family this tool does not write."""
    if config.family != "llama" or config.rope_scaling is not None:
        raise ValueError(f"only plain Llama models can be written, not {config.family}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }


def write_hugging_face(gguf: pathlib.Path, folder: pathlib.Path, dtype: str) -> None:
    """Writes a folder that transformers and vLLM load; q and k in Hugging Face's row order."""
    from safetensors.numpy import save_file

    file = GGUFFile(gguf)
    config = config_from_gguf(file)
    source = GGUFSource(file, config)
    tensors = {
        name: np.ascontiguousarray(source.read(name).astype(_numpy_dtype(dtype)))
        for name in expected_tensors(config)
    }
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "model.safetensors.part"
    save_file(tensors, temporary, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hugging_face_config(config, dtype), indent=1))
    build_tokenizer(file.metadata).save(str(folder / "tokenizer.json"))
    tokens = file.metadata["tokenizer.ggml.tokens"]
    names = {"tokenizer_class": "PreTrainedTokenizerFast"} | {
        f"{name}_token": tokens[file.metadata[f"tokenizer.ggml.{name}_token_id"]]
        for name in ("bos", "eos")
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    # Last: a folder with this file is complete.
    os.replace(temporary, folder / "model.safetensors")


def write_gguf(gguf: pathlib.Path, output: pathlib.Path, dtype: str) -> None:
    """Writes the same GGUF file with its matrices in `dtype` and its vectors in float32."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType

    reader, file = GGUFReader(gguf), GGUFFile(gguf)
    kind, file_type = {
        "float32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
        "bfloat16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    }[dtype]
    temporary = output.with_suffix(".part")
    writer = GGUFWriter(temporary, file.metadata["general.architecture"])
    skip = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if name.startswith(skip):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, file.metadata[name], field.types[0], sub_type=inner)
    writer.add_file_type(file_type)
    for name in file.tensors:
        tensor: NDArray[Any] = file.read(name)
        if tensor.ndim > 1 and kind == GGMLQuantizationType.BF16:
            bits = tensor.astype(ml_dtypes.bfloat16).view(np.uint8)
            writer.add_tensor(name, bits, raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(temporary, output)


def prepare(gguf: pathlib.Path, folder: pathlib.Path, dtype: str) -> dict[str, str]:
    """Paths of both forms in `dtype`, written if they are not there: {"hf": ..., "gguf": ...}."""
    folder.mkdir(parents=True, exist_ok=True)
    hf, plain = folder / f"hf-{dtype}", folder / f"model-{dtype}.gguf"
    if not (hf / "model.safetensors").exists():
        write_hugging_face(gguf, hf, dtype)
    if not plain.exists():
        write_gguf(gguf, plain, dtype)
    return {"hf": str(hf), "gguf": str(plain)}


def _numpy_dtype(dtype: str) -> Any:
    return ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=pathlib.Path, help="GGUF file; the default model if absent")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    for dtype in DTYPES:
        print(prepare(arguments.model or default_model_path(), arguments.output, dtype))


if __name__ == "__main__":
    main()
