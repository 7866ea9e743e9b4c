"""Folders as the hub's library, Ollama and people leave them, made of tiny models."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

LLAMA = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 16,
         "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 32,
         "tie_word_embeddings": True}  # fmt: skip


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Return the tensors of a llama of one layer, 8 wide, two heads, one key head."""
    rng = np.random.default_rng(seed)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,),
        layer + "input_layernorm.weight": (8,), layer + "post_attention_layernorm.weight": (8,),
        layer + "self_attn.q_proj.weight": (8, 8), layer + "self_attn.k_proj.weight": (4, 8),
        layer + "self_attn.v_proj.weight": (4, 8), layer + "self_attn.o_proj.weight": (8, 8),
        layer + "mlp.gate_proj.weight": (12, 8), layer + "mlp.up_proj.weight": (12, 8),
        layer + "mlp.down_proj.weight": (8, 12),
    }  # fmt: skip
    return {
        name: (
            1 + 0.1 * rng.standard_normal(shape)
            if len(shape) == 1
            else 0.1 * rng.standard_normal(shape)
        ).astype(np.float32)
        for name, shape in shapes.items()
    }


def folder(path: Path, seed: int = 0) -> Path:
    """Write a folder with config.json and model.safetensors."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(LLAMA))
    save_file(weights(seed), path / "model.safetensors", {"format": "pt"})
    return path


def hub(cache: Path, name: str, model: Path, revisions: int = 1) -> Path:
    """Write `models--NAME` as huggingface_hub does: blobs named by digest, snapshots of links."""
    home = cache / ("models--" + name.replace("/", "--"))
    (home / "blobs").mkdir(parents=True)
    for number in range(revisions):
        snapshot = home / "snapshots" / f"{number:040x}"
        snapshot.mkdir(parents=True)
        for file in model.iterdir():
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            blob = home / "blobs" / digest
            if not blob.exists():
                shutil.copyfile(file, blob)
            (snapshot / file.name).symlink_to(Path("../..") / "blobs" / digest)
    return home


def ollama(store: Path, tags: dict[str, Path]) -> Path:
    """Write Ollama's store: a manifest for each tag, GGUF files as blobs named by digest."""
    (store / "blobs").mkdir(parents=True)
    for tag, gguf in tags.items():
        data = gguf.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        (store / "blobs" / f"sha256-{digest}").write_bytes(data)
        manifest = store / "manifests" / "registry.ollama.ai" / "library" / tag
        manifest.parent.mkdir(parents=True, exist_ok=True)
        layer = {
            "mediaType": "application/vnd.ollama.image.model",
            "digest": f"sha256:{digest}",
            "size": len(data),
        }
        manifest.write_text(
            json.dumps(
                {
                    "schemaVersion": 2,
                    "layers": [
                        layer,
                        {"mediaType": "application/vnd.ollama.image.params", "digest": "sha256:0"},
                    ],
                }
            )
        )
    return store


def sparse(path: Path, size: int) -> Path:
    """Write a safetensors file whose one float32 tensor is a hole of `size` bytes."""
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    return path
