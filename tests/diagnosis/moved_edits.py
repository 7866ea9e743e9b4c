"""Edits of a model's tensors: other orders, ranges overwritten, adapters merged, folds."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.conversion.folders import tensors_of, write_mixed
from tests.diagnosis import files
from tests.diagnosis.engines import place, tiny_folder
from tests.diagnosis.fault import Pair

Edit = Callable[[files.Rows], None]
L0, L1, L2 = ("model.layers.0.", "model.layers.1.", "model.layers.2.")
QKV, GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"

# name -> (architecture of tests.models, changed config values)
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    # 6 query heads of 10 in 3 groups, everything odd
    "phi3": ("phi3-plain", {"hidden_size": 60, "num_attention_heads": 6,
                            "num_key_value_heads": 3, "intermediate_size": 70}),
    "phi3-mha": ("phi3-plain", {"hidden_size": 60, "num_attention_heads": 3,
                                "num_key_value_heads": 3}),
    "gpt2": ("gpt2", {"n_embd": 50, "n_head": 5}),
    "qwen2": ("qwen2", {"hidden_size": 70, "num_attention_heads": 7, "num_key_value_heads": 1}),
    "llama": ("llama", {"head_dim": 12, "hidden_size": 60, "num_attention_heads": 6,
                        "num_key_value_heads": 3, "intermediate_size": 100}),
    "llama-bias": ("llama-bias", {"hidden_size": 60, "num_attention_heads": 6, "head_dim": 10,
                                  "num_key_value_heads": 2}),
    "gemma": ("gemma", {"hidden_size": 54, "head_dim": 20, "num_attention_heads": 3}),
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 7}),
    "llama-64": ("llama", {"hidden_size": 64, "intermediate_size": 96}),
    "llama-wide": ("llama", {"hidden_size": 144, "intermediate_size": 320, "vocab_size": 301}),
}  # fmt: skip


def model(name: str, **more: Any) -> Path:
    """Return a tiny model's folder by its name in MODELS."""
    arch, values = MODELS[name]
    return tiny_folder(arch, **{**values, **more})


def rows_in(order: Callable[[int], Any], *names: str) -> Edit:
    """Return an editor that gives rows another order: `order(rows)` are the old numbers."""

    def run(found: files.Rows) -> None:
        for name in names:
            files.edit(name, lambda x: x[order(len(x))])(found)

    return run


def columns_in(order: Callable[[int], Any], *names: str) -> Edit:
    """Return an editor that gives the last axis another order."""

    def run(found: files.Rows) -> None:
        for name in names:
            files.edit(name, lambda x: x[..., order(x.shape[-1])])(found)

    return run


def every_layer(edit: Callable[[str], Edit], count: int = 3) -> Edit:
    """Return an editor of all layers; `edit` takes the start of a layer's names."""

    def run(found: files.Rows) -> None:
        for layer in range(count):
            edit(f"model.layers.{layer}.")(found)

    return run


def both(*edits: Edit) -> Edit:
    """Return an editor that does several edits in order."""

    def run(found: files.Rows) -> None:
        for edit in edits:
            edit(found)

    return run


def grouped(heads: int, kv: int) -> Callable[[int], Any]:
    """Return all q, all k, all v in groups: the queries of a key head, its key, its value."""

    def order(count: int) -> Any:
        size = count // (heads + 2 * kv)
        each = heads // kv
        units = [
            unit
            for g in range(kv)
            for unit in (*range(g * each, (g + 1) * each), heads + g, heads + kv + g)
        ]
        return np.concatenate([np.arange(unit * size, (unit + 1) * size) for unit in units])

    return order


def rotated(by: int) -> Callable[[int], Any]:
    """Return the order of rows that begins `by` rows later."""
    return lambda count: np.roll(np.arange(count), -by)


def parts_in(*sizes: int, order: Sequence[int]) -> Callable[[int], Any]:
    """Return parts of these numbers of rows in another order."""
    starts = np.cumsum((0, *sizes))
    return lambda count: np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order])


def alternating(count: int) -> Any:
    """Return row i of the first half, then of the second, for every i."""
    return np.arange(count).reshape(2, -1).T.reshape(-1)


def pairs(heads: int) -> Callable[[int], Any]:
    """Return each head's split halves as adjacent pairs."""

    def order(count: int) -> Any:
        size = count // heads
        inside = np.arange(size).reshape(2, -1).T.reshape(-1)
        return (np.arange(heads)[:, None] * size + inside).reshape(-1)

    return order


# --- cut and overwritten ------------------------------------------------------------------------


def copied_rows(into: str, rows: slice, source: str, start: int) -> Edit:
    """Return an editor that puts another tensor's rows into some rows."""

    def run(found: files.Rows) -> None:
        there = files.values(found, source)

        def change(x: Any) -> Any:
            count = len(range(*rows.indices(len(x))))
            x[rows] = there[start : start + count]
            return x

        files.edit(into, change)(found)

    return run


def slice_early(found: files.Rows) -> None:
    """Cut k and v out of the fused rows one row too early, as with a bias row counted twice."""
    names = [f"{L1}self_attn.{x}_proj.weight" for x in "qkv"]
    q, k, v = (files.values(found, name) for name in names)
    whole = np.concatenate([q, k, v])
    for name, start, size in (
        (names[1], len(q) - 1, len(k)),
        (names[2], len(q) + len(k) - 1, len(v)),
    ):
        files.edit(name, _instead(whole[start : start + size]))(found)


def _instead(values: Any) -> Callable[[Any], Any]:
    """Return an edit that puts these values in place of the old ones."""
    return lambda old: values


def bytes_in(name: str, start: int, stop: int, what: Callable[[files.Rows], bytes]) -> Edit:
    """Return an editor that overwrites a range of a tensor's bytes."""

    def run(found: files.Rows) -> None:
        new = what(found)
        assert len(new) == stop - start
        files.raw(name, lambda data: data[:start] + new + data[stop:])(found)

    return run


def one_head_row(found: files.Rows) -> None:
    """The head has the embedding's bytes; then one row of it is damaged."""

    def damage(x: Any) -> Any:
        x[7] = np.random.default_rng(4).normal(0, 3.0, x.shape[1])
        return x

    files.edit("lm_head.weight", damage)(found)


def head_is_embedding(found: files.Rows) -> None:
    """Store the embedding's bytes as the head, as untied copies of tied models do."""
    found["lm_head.weight"] = found["model.embed_tokens.weight"]


def fifth_is_fourth(found: files.Rows) -> None:
    """Experts 4 has the bytes of expert 3, in all three matrices."""
    for part in ("gate", "up", "down"):
        name = f"{L1}mlp.experts.{{}}.{part}_proj.weight"
        found[name.format(4)] = found[name.format(3)]


# --- merged and trained on ------------------------------------------------------------------------


def low_rank(rank: int, *names: str, only: tuple[int, ...] = (0, 1, 2)) -> Edit:
    """Return an editor that adds a product of `rank` columns, as merging an adapter does."""

    def run(found: files.Rows) -> None:
        for layer in only:
            for at, part in enumerate(names):
                rng = np.random.default_rng(100 * layer + at)

                def add(x: Any, rng: Any = rng) -> Any:
                    up, down = (
                        rng.normal(size=s) for s in ((x.shape[0], rank), (rank, x.shape[1]))
                    )
                    return x + 0.02 * (up @ down)

                files.edit(f"model.layers.{layer}.{part}", add)(found)

    return run


def trained(size: float) -> Edit:
    """Return an editor that moves every value of every tensor a little."""

    def run(found: files.Rows) -> None:
        for i, name in enumerate(sorted(found)):
            x = files.values(found, name)
            noise = np.random.default_rng(i).normal(size=x.shape)
            files.edit(name, _instead(x + size * x.std() * noise))(found)

    return run


def in_q8(name: str, edit: Edit) -> Callable[[], Pair]:
    """Return a maker of a model and the Q8_0 copy of an edited one."""

    def make() -> Pair:
        source = model("llama-64")
        edited = files.copy(source, f"moved-{name}", tensors=edit)
        return source, files.quantized(edited, f"moved-{name}.gguf", "Q8_0")

    return make


def in_q4(name: str) -> Callable[[], Pair]:
    """Return a maker of a model whose norms are near one, and its Q4_0 copy."""

    def near_one(found: files.Rows) -> None:
        files.edit_all("layernorm.weight", lambda x: 1 + 0.1 * (x - x.mean()))(found)

    def make() -> Pair:
        source = files.copy(model("llama-64"), f"moved-{name}", tensors=near_one)
        return source, files.quantized(source, f"moved-{name}.gguf", "Q4_0")

    return make


def neighbours_bias(found: files.Rows) -> None:
    """Store layer 2's bias of v in layer 1 as well."""
    found[f"{L1}self_attn.v_proj.bias"] = found[f"{L2}self_attn.v_proj.bias"]


def half_as_bf16(found: files.Rows) -> None:
    """Store a matrix in F16 under the label of BF16."""
    name = f"{L1}mlp.up_proj.weight"
    _, shape, _ = found[name]
    found[name] = ("BF16", shape, files.values(found, name).astype("<f2").tobytes())


def in_shards(name: str, base: str, edit: Edit) -> Callable[[], Pair]:
    """Return a maker of a model in two shards (layers 0 and 1; the rest) and an edited copy."""

    def write(source: Path, folder: Path, edit: Edit | None) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        rows = tensors_of(source)
        if edit is not None:
            edit(rows)
        second = {name for name in rows if name.startswith((L2, "lm_head", "model.norm"))}
        where: dict[str, str] = {}
        for number, chosen in enumerate((set(rows) - second, second), 1):
            shard = f"model-0000{number}-of-00002.safetensors"
            write_mixed(folder / shard, {name: rows[name] for name in rows if name in chosen})
            where |= dict.fromkeys(chosen, shard)
        index = {"metadata": {}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        shutil.copy(source / "config.json", folder / "config.json")
        return folder

    def make() -> Pair:
        source = model(base)
        return (
            write(source, place(f"moved-{name}-a"), None),
            write(source, place(f"moved-{name}"), edit),
        )

    return make


# --- folded ---------------------------------------------------------------------------------------

READS = {  # what reads a norm's output
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def folded(
    plus: float = 0.0, *, norms: bool = True, only: Sequence[str] = (), final: bool = True
) -> Edit:
    """Return an editor that multiplies norms into what reads them; `plus` is added to a norm.

    Without `norms` the norms keep their values; `only` leaves out the other products.
    """

    def one(found: files.Rows, name: str, readers: Sequence[str]) -> None:
        gain = files.values(found, name) + plus
        for reader in readers:
            if not only or reader.removesuffix(".weight").endswith(tuple(only)):
                files.edit(reader, lambda x: x * gain)(found)
        if norms:
            files.edit(name, lambda x: np.full_like(x, 1 - plus))(found)

    def run(found: files.Rows) -> None:
        for at in (L0, L1, L2):
            for norm, readers in READS.items():
                if not only or norm == "post_attention_layernorm":
                    one(found, f"{at}{norm}.weight", [f"{at}{x}.weight" for x in readers])
        if final and "lm_head.weight" in found:
            one(found, "model.norm.weight", ["lm_head.weight"])

    return run


def scaled_pair(first: str, second: str, *, back: bool = True, repeat: int = 1) -> Edit:
    """Return an editor of every layer: a tensor's rows times s, the next one's columns over s."""

    def at(start: str) -> Edit:
        def run(found: files.Rows) -> None:
            x = files.values(found, f"{start}{first}.weight")
            s = np.exp(np.random.default_rng(6).normal(0, 0.5, len(x))).astype(np.float32)
            files.edit(f"{start}{first}.weight", lambda y: (y.T * s).T)(found)
            if f"{start}{first}.bias" in found:
                files.edit(f"{start}{first}.bias", lambda y: y * s)(found)
            wide = np.tile(s, repeat)
            if back:
                files.edit(f"{start}{second}.weight", lambda y: y / wide)(found)

        return run

    return every_layer(at)


def smoothed(found: files.Rows) -> None:
    """Divide norms by factors and multiply what reads them, as activation-aware scaling does."""
    rng = np.random.default_rng(8)
    for at in (L0, L1, L2):
        for norm, readers in READS.items():
            s = np.exp(rng.normal(0, 0.4, len(files.values(found, f"{at}{norm}.weight"))))
            names = (f"{at}{norm}.weight", *(f"{at}{reader}.weight" for reader in readers))
            for name, factor in zip(names, (1 / s, *(s for _ in readers)), strict=True):
                files.edit(name, _instead(files.values(found, name) * factor))(found)


def padded(rows: int, fill: Callable[[Any, int], Any]) -> Edit:
    """Return an editor that adds rows to the embedding and the head."""

    def run(found: files.Rows) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in found:
                files.edit(name, lambda x: np.concatenate([x, fill(x, rows)]))(found)

    return run


def zeros(x: Any, rows: int) -> Any:
    return np.zeros((rows, x.shape[1]), np.float32)


def mean(x: Any, rows: int) -> Any:
    return np.repeat(x.mean(0, keepdims=True), rows, 0)


def experts_dead(found: files.Rows) -> None:
    """Leave one expert's matrices at zero."""
    for part in ("gate", "up", "down"):
        files.edit(f"{L1}mlp.experts.2.{part}_proj.weight", lambda x: 0 * x)(found)
