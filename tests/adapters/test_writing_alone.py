"""How an adapter's pairs are named, and its rank and alpha stated, in each of three spellings."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.adapters import writing
from aprfmt.adapters.writing import SPELLINGS
from aprfmt.base.protocols import TypedValue
from aprfmt.errors import ConversionError, OutputError

A, B = (
    np.arange(6.0, dtype=np.float32).reshape(2, 3),
    np.arange(8.0, dtype=np.float32).reshape(4, 2),
)
MAGNITUDE = np.arange(4.0, dtype=np.float32)
NAME = "model.layers.0.mlp.up_proj.weight"


def names(extension: str, *, embedding: bool = False, magnitude: Any = None) -> dict[str, Any]:
    """Return {tensor name: (part, values)} of a pair of rank 2 and scale 1.5."""
    pair: Any = SimpleNamespace(a=A, b=B, scale=1.5, rank=2, magnitude=magnitude)
    stored: Any = SimpleNamespace(embedding=embedding, rank=2)
    rows = list(SPELLINGS[extension].names(NAME, pair, stored))
    assert len({name for name, _, _ in rows}) == len(rows)
    return {name: (part, values) for name, part, values in rows}


def same(found: dict[str, Any], expected: dict[str, tuple[str, Any]]) -> bool:
    return found.keys() == expected.keys() and all(
        found[key][0] == part and np.array_equal(found[key][1], values)
        for key, (part, values) in expected.items()
    )


def test_gguf_has_both_factors_and_an_embeddings_turned() -> None:
    expected = {f"{NAME}.lora_a": ("a", A), f"{NAME}.lora_b": ("b", B)}
    assert same(names(".gguf"), expected)
    turned = {f"{NAME}.lora_a": ("a", B), f"{NAME}.lora_b": ("b", A.T)}
    assert same(names(".gguf", embedding=True), turned)


def test_peft_has_modules_under_its_prefix() -> None:
    start = "base_model.model.model.layers.0.mlp.up_proj"
    both = {f"{start}.lora_A.weight": ("a", A), f"{start}.lora_B.weight": ("b", B)}
    assert same(names(""), both)
    vector = {f"{start}.lora_magnitude_vector": ("magnitude", MAGNITUDE)}
    assert same(names("", magnitude=MAGNITUDE), both | vector)
    table = {f"{start}.lora_embedding_A": ("a", B.T), f"{start}.lora_embedding_B": ("b", A.T)}
    assert same(names("", embedding=True), table)


def test_kohya_has_modules_without_dots_and_an_alpha() -> None:
    start = "lora_te_model_layers_0_mlp_up_proj"
    both = {
        f"{start}.lora_down.weight": ("a", A), f"{start}.lora_up.weight": ("b", B),
        f"{start}.alpha": ("alpha", np.array(3.0)),
    }  # fmt: skip
    assert same(names(".safetensors"), both)
    column = {f"{start}.dora_scale": ("magnitude", MAGNITUDE[:, None])}
    assert same(names(".safetensors", magnitude=MAGNITUDE), both | column)


def test_what_each_spelling_can_say() -> None:
    held = {end: set(row.holds) for end, row in SPELLINGS.items()}
    assert held == {".gguf": {"embedding"}, ".safetensors": {"DoRA"}, "": {"DoRA", "embedding"}}
    assert {end: row.container for end, row in SPELLINGS.items()} == {
        ".gguf": "gguf", ".safetensors": "safetensors", "": "safetensors"
    }  # fmt: skip


def adapter(*pairs: tuple[int, float], **config: Any) -> Any:
    """Return an adapter of pairs (rank, scale)."""
    rows = {str(n): SimpleNamespace(rank=r, scale=s) for n, (r, s) in enumerate(pairs)}
    return SimpleNamespace(pairs=rows, config=config, path="adapter")


def test_one_alpha_gives_every_scale_or_none_does() -> None:
    assert writing._common_alpha(adapter((8, 2.0), (4, 4.0))) == 16
    close = writing._common_alpha(adapter((8, 2.0), (8, 2.0 * (1 + 9e-8))))
    assert close == pytest.approx(16)
    for scale in (2.0 * (1 + 2e-7), 4.0):
        with pytest.raises(ConversionError, match="are no one alpha divided by their ranks"):
            writing._common_alpha(adapter((8, 2.0), (8, scale)))


def test_a_gguf_names_its_architecture_and_its_base() -> None:
    model: Any = SimpleNamespace(spec=SimpleNamespace(called={"gguf": ("qwen2", "other")}))
    plain = {
        "general.architecture": "qwen2", "general.type": "adapter", "adapter.type": "lora",
        "adapter.lora.alpha": TypedValue(16.0, "float32"),
    }  # fmt: skip
    assert writing._gguf_facts(adapter((8, 2.0)), model, {}) == (plain, {})
    named, _ = writing._gguf_facts(adapter((8, 2.0), base_model_name_or_path="b"), model, {})
    count = TypedValue(1, "uint32")
    assert named == plain | {
        "general.base_model.count": count, "general.base_model.0.name": "b"
    }  # fmt: skip


def test_kohya_states_a_rank_that_all_pairs_have() -> None:
    model: Any = None
    for pairs, dim in ((((8, 1.0), (8, 2.0)), "8"), (((8, 1.0), (4, 1.0)), "Dynamic")):
        found, texts = writing._kohya_facts(adapter(*pairs), model, {})
        assert found == {"ss_network_module": "networks.lora", "ss_network_dim": dim}
        assert not texts


def test_peft_states_the_usual_rank_and_the_others_by_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = adapter((8, 2.0), (8, 2.0), (4, 2.0), base_model_name_or_path="b")
    stored = [f"m{n}.up_proj.weight" for n in range(3)]
    spelled = {name: f"x.{name}" for name in stored}
    monkeypatch.setattr(writing, "_names_in_style", lambda model, style: spelled)
    monkeypatch.setattr(writing, "place_pairs", lambda adapter, model: dict.fromkeys(stored))
    model: Any = None
    metadata, texts = writing._peft_facts(made, model, {"a.lora_A.weight": None})  # type: ignore[dict-item]
    config = json.loads(texts["adapter_config.json"])
    assert metadata == {"format": "pt"} and list(texts) == ["adapter_config.json"]
    assert (config["r"], config["lora_alpha"]) == (8, 16)
    assert config["rank_pattern"] == {"x.m2.up_proj": 4}
    assert config["alpha_pattern"] == {"x.m2.up_proj": 8}
    assert config["target_modules"] == ["up_proj"] and config["use_dora"] is False
    assert config["base_model_name_or_path"] == "b" and config["use_rslora"] is False
    _, texts = writing._peft_facts(made, model, {"a.lora_magnitude_vector": None})  # type: ignore[dict-item]
    assert json.loads(texts["adapter_config.json"])["use_dora"] is True


def test_whole_numbers_are_written_as_such() -> None:
    for value, written in (
        (16.0, 16),
        (16 * (1 + 5e-13), 16),
        (16 * (1 + 2e-12), 16 * (1 + 2e-12)),
    ):
        found = writing._json_number(value)
        assert found == written and isinstance(found, type(written))
    assert writing._most_common({"a": 4, "b": 8, "c": 8, "d": 4, "e": 8}) == 8


def test_factors_keep_the_dtype_of_their_part() -> None:
    def encoded(part: str, **parts: str) -> tuple[str, bytes]:
        held = {name: SimpleNamespace(encoding=encoding) for name, encoding in parts.items()}
        stored: Any = SimpleNamespace(parts=held)
        info, raw = writing._encode_tensor("n", stored, part, A.T)
        assert info.name == "n" and info.shape == (3, 2)
        return info.encoding, bytes(raw)

    assert encoded("a", a="F16", b="F32") == ("F16", A.T.astype("<f2").tobytes())
    assert encoded("b", a="F16", b="F32") == ("F32", A.T.astype("<f4").tobytes())
    assert encoded("a", embedding_a="F16")[0] == "F16"
    assert encoded("alpha", a="F16")[0] == "F32"


def test_an_output_of_no_spelling_is_refused_before_anything_is_read(tmp_path: Any) -> None:
    lost = tmp_path / "nothing"
    with pytest.raises(ConversionError, match=r"an adapter is written as \.gguf, as"):
        writing.convert_adapter(lost, tmp_path / "out.bin", lost)


def test_a_folder_that_exists_is_kept_without_force(tmp_path: Any) -> None:
    def write(dst: Any, *, force: bool, dry_run: bool) -> Any:
        return writing._write_adapter(dst, {}, {}, {"a.json": "{}"}, SPELLINGS[""], force, dry_run)

    with pytest.raises(OutputError, match="exists; use --force to replace it"):
        write(tmp_path, force=False, dry_run=True)
    new = tmp_path / "new"
    files, sizes = write(new, force=False, dry_run=True)
    weights = new / "adapter_model.safetensors"
    assert files == (weights, new / "a.json") and sizes == {weights: 0, new / "a.json": 2}
    assert not new.exists()
    assert write(tmp_path, force=True, dry_run=True)[0][0] == tmp_path / weights.name
