"""The folder that the examples of the commands are of."""

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import aprfmt as aprfmt_package
from tests.cli.run import aprfmt

TEXT = "Once upon a time there was a small model that told the same story twice.\n"
LR, DECAY = 2e-4, 0.1


def make_examples(folder: Path, general_name: str = "") -> None:
    """Fill a folder with the models, texts and parts that examples name.

    `general_name` is the name that model.gguf then has of itself, "" for the model's own.
    """
    assert aprfmt("demo", "--into", folder / "model").code == 0
    plain = folder / ("plain.gguf" if general_name else "model.gguf")
    assert aprfmt("convert", folder / "model", plain).code == 0
    if general_name:
        named = f"general.name={general_name}"
        assert aprfmt("set", plain, named, "-o", folder / "model.gguf").code == 0
    assert aprfmt("quantize", folder / "model", folder / "q4.gguf", "--type", "Q4_0").code == 0
    whole = (folder / "model.gguf").read_bytes()
    (folder / "model.gguf.part").write_bytes(whole[: len(whole) // 2])
    (folder / "text.txt").write_text(TEXT)
    (folder / "parts").mkdir()
    _train_one_step(folder / "model", folder / "before", folder / "after")


def _train_one_step(model: Path, before: Path, after: Path) -> None:
    """Write a folder's weights in float32, and what AdamW's first step makes of them.

    Every element moves by the learning rate, up or down, whatever its gradient was.
    """
    rng = np.random.default_rng(0)
    weights, stepped = {}, {}
    with aprfmt_package.open(model) as opened:
        for name, tensor in opened.items():
            values = weights[name] = tensor.numpy().astype(np.float32)
            step = LR * rng.choice((-1.0, 1.0), values.shape)
            step += LR * DECAY * values * (values.ndim > 1)
            stepped[name] = (values - step).astype(np.float32)
    for folder, tensors in ((before, weights), (after, stepped)):
        folder.mkdir()
        shutil.copy(model / "config.json", folder)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
