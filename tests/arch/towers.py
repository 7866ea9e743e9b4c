"""Tiny models that see or hear, and what transformers makes of an image or a sound with them.

Sizes are those that llama.cpp's graphs take; the text is as wide as the demo model's embedding,
which lends its vocabulary to the library. llama.cpp rounds what a convolution multiplies to
float16: kernels are drawn so, and transformers is given pixels rounded so.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from aprfmt.arch.pixtral_vision import DEVIATION, MEAN
from tests.arch.listed import HOMELESS, LISTED, cut, save

WIDTH = 256  # of the demo model
_TEXT = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_SEES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40}
_QWEN = {"patch_size": 14, "num_heads": 2, "depth": 4}
_HALF = [0.5] * 3
# label -> (changes below text_config, below the tower's section, beside them)
CHANGED: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]] = {
    "gemma3_vision": (_TEXT, _SEES, {}),
    "pixtral_vision": (_TEXT, {**_SEES, "head_dim": 8},
                       {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}),
    "mistral3_vision": (_TEXT, {**_SEES, "head_dim": 8, "hidden_act": "silu"},
                        {"vision_feature_layer": -1}),
    "qwen2_vl_vision": (_TEXT, {**_QWEN, "embed_dim": 32, "hidden_size": WIDTH}, {}),
    "qwen2_5_vl_vision": (_TEXT, {**_QWEN, "hidden_size": 32, "out_hidden_size": WIDTH}, {}),
    "qwen3_vl_vision": (_TEXT, {
        **_QWEN, "patch_size": 16, "hidden_size": 32, "out_hidden_size": WIDTH // 4,
        "deepstack_visual_indexes": [0, 1, 3],
    }, {}),
    "qwen3_vl_moe_vision": (_TEXT, {
        **_QWEN, "patch_size": 16, "hidden_size": 32, "out_hidden_size": WIDTH,
    }, {}),
    "qwen2_audio_tower": (_TEXT, {
        "d_model": 32, "encoder_attention_heads": 4, "max_source_positions": 1500,
        "num_mel_bins": 128,
    }, {}),
    "voxtral_tower": (_TEXT, {
        "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 128,
        "max_source_positions": 1500, "num_mel_bins": 128,
    }, {}),
}  # fmt: skip


def made(label: str, folder: Path) -> Any:
    """Write a tiny model's tower as a folder, and return the whole model."""
    import torch
    import transformers

    auto: Any = transformers
    auto.logging.set_verbosity_error()
    _, kind, loader, values = LISTED[label]
    text, tower, beside = CHANGED[label]
    section = "audio_config" if "audio_config" in values else "vision_config"
    values = {
        **values,
        **beside,
        "text_config": {**values["text_config"], **text},
        section: {**values[section], **tower},
    }
    config = auto.AutoConfig.for_model(kind, **values)
    torch.manual_seed(3)
    how = getattr(auto, loader)
    model = getattr(how, "from_config", how)(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            shift = 1.0 if "norm" in name and tensor.ndim == 1 and "bias" not in name else 0.0
            fan = tensor[0].numel() if tensor.ndim > 1 else 100
            drawn = torch.randn(tensor.shape) * fan**-0.5 + shift
            tensor.copy_(drawn.half() if tensor.ndim > 2 else drawn)
    model = model.float().eval()
    model.save_pretrained(folder)
    cut(label, folder)
    return model


def given(label: str) -> Any:
    """Return an image [y, x, 3] of bytes that is not resized, or 30 s of noise.

    llama.cpp's mels of silence have another floor than transformers'.
    """
    rng = np.random.default_rng(7)
    if LISTED[label][3].get("audio_config"):
        return (rng.standard_normal(16000 * 30) * 0.1).astype(np.float32)
    sides = {
        "gemma3_vision": (16, 16),
        "pixtral_vision": (16, 12),
        "mistral3_vision": (32, 24),
        "qwen3_vl_vision": (128, 160),
        "qwen3_vl_moe_vision": (128, 160),
    }
    return rng.integers(0, 256, (*sides.get(label, (140, 196)), 3), np.uint8)


def theirs(label: str, model: Any, image: Any) -> Any:
    """Return transformers' rows [tokens, width]."""
    import torch

    with torch.no_grad():
        if image.ndim == 1:
            return _heard(model, image).numpy()
        colours = (_HALF, _HALF) if label == "gemma3_vision" else (MEAN, DEVIATION)
        mean, deviation = (np.array(row, np.float32) for row in colours)
        pixels = torch.from_numpy((image / np.float32(255) - mean) / deviation).permute(2, 0, 1)
        pixels = pixels.half().float()
        if "qwen" in label:
            return _patched(model.model, pixels)
        sizes = {} if label == "gemma3_vision" else {"image_sizes": [image.shape[:2]]}
        found = model.model.get_image_features(pixels[None], **sizes).pooler_output
    return torch.cat(list(found)).reshape(-1, WIDTH).numpy()


def _patched(model: Any, pixels: Any) -> Any:
    """Return a Qwen tower's rows; of one with mergers these stand behind each, in its order."""
    import torch

    tower = model.visual
    size, merge = tower.config.patch_size, tower.config.spatial_merge_size
    rows, columns = (side // size for side in pixels.shape[1:])
    x = pixels[None].repeat(2, 1, 1, 1)
    x = x.reshape(1, 2, 3, rows // merge, merge, size, columns // merge, merge, size)
    x = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(rows * columns, -1)
    found = model.get_image_features(x, torch.tensor([[1, rows, columns]]))
    deep = getattr(found, "deepstack_features", None) or ()
    return torch.cat([found.pooler_output[0], *(part[0] for part in deep)], dim=1).numpy()


def _heard(model: Any, sound: Any) -> Any:
    import transformers

    tower = model.audio_tower if hasattr(model, "audio_tower") else model.model.audio_tower
    makes = transformers.WhisperFeatureExtractor(feature_size=tower.config.num_mel_bins)
    mels = makes(sound, sampling_rate=16000, return_tensors="pt").input_features.half().float()
    whole = model.model if hasattr(model, "model") else model
    if hasattr(whole, "get_audio_features"):
        return whole.get_audio_features(mels).pooler_output.reshape(-1, WIDTH)
    return whole.multi_modal_projector(tower(mels).last_hidden_state)[0]


BROKEN = ("pixtral_vision", "mistral3_vision")  # a token ends each line of patches but the last


def _with_break(source: Path, target: Path) -> None:
    """Add what is not of the tower's folder: the text's row of the token that ends a line."""
    import gguf

    kinds = gguf.GGUFValueType
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "clip")
    for name, field in reader.fields.items():
        if name.startswith(("general.type", "clip.")):
            inner = field.types[1] if field.types[0] == kinds.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.add_tensor("v.token_embd.img_break", np.zeros(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def look(label: str, scratch: Path) -> Mapping[str, Any]:
    """Return the row of one tower: its distance from transformers, or why it is not loaded."""
    import aprfmt
    from aprfmt.errors import AprfmtError
    from tests.arch.mtmd import encoded

    demo = Path(aprfmt.__file__).parent / "demo_model"
    aprfmt.convert(demo, scratch / "text.gguf")
    whole = label in CHANGED  # not a tower alone
    model = made(label, scratch / "m") if whole else save(label, scratch / "m")
    drop = (HOMELESS[label],) if label in HOMELESS else ()
    aprfmt.convert(scratch / "m", scratch / "m.gguf", drop=drop)
    if label in BROKEN:
        (scratch / "m.gguf").rename(scratch / "bare.gguf")
        _with_break(scratch / "bare.gguf", scratch / "m.gguf")
    image = given(label)
    expected = theirs(label, model, image) if whole else None
    try:
        found = encoded(scratch / "m.gguf", scratch / "text.gguf", image, WIDTH)
    except AprfmtError as error:
        return {"loads": False, "why": str(error).split(";")[0].rpartition("': ")[2]}
    assert expected is not None
    found = found[found.any(1)] if label in BROKEN else found[: len(expected)]  # then silence
    distance = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    return {"loads": True, "distance": float(f"{distance:.1e}")}
