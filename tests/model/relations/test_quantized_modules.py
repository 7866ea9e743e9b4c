"""What a quantization says of modules, held against the weights that are there.

Every folder that the product writes for another library is an innocent; each is then broken in the
ways that lists go wrong, and mended by the command that is printed. Seen red: lists not asked.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from aprfmt.codecs.module_lists import METHODS, claims_packed, is_listed
from aprfmt.model import open_model, quantized_modules
from tests.cli.run import aprfmt
from tests.model.relations.edits import remedied, same

TYPES = {
    "compressed-tensors": "COMPRESSED-INT4-g32",
    "awq": "AWQ-g32",
    "modelopt": "MODELOPT-NVFP4",
    "gptq": "GPTQ-g32",
    "bitsandbytes": "NF4",
}
_STALE = {
    "compressed-tensors": "model.layers.0.attention.wo",
    "awq": "model.layers.0.attention.wo",
    "modelopt": "model.layers.0.attention.wo",
}


@pytest.fixture(scope="module")
def folders(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """Return by method a packed folder, and one whose output projections are plain and listed."""
    root = tmp_path_factory.mktemp("claims")
    made = {}
    for method, kind in TYPES.items():
        whole, part = root / f"{method}-whole", root / f"{method}-part"
        command = ("quantize", demo_model, whole, "--type", kind, "--quiet")
        assert aprfmt(*command).code == 0
        command = ("quantize", demo_model, part, "--type", kind, "--quiet")
        assert aprfmt(*command, "--tensor", "re:o_proj.weight=BF16").code == 0
        made[method] = whole, part
    return made


def _section(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    config = json.loads((folder / "config.json").read_text())
    return config, config["quantization_config"]


def _edited(source: Path, target: Path, **keys: Any) -> Path:
    shutil.copytree(source, target)
    config, section = _section(target)
    section.update(keys)
    (target / "config.json").write_text(json.dumps(config))
    return target


def _failed(folder: Path) -> list[str]:
    rows = aprfmt("validate", folder, "--json").json["checks"]
    return [row["name"] for row in rows if row["outcome"] == "FAIL"]


@pytest.mark.parametrize("method", TYPES)
def test_what_libraries_write_contradicts_nothing(
    method: str, folders: dict[str, tuple[Path, Path]]
) -> None:
    for folder in folders[method]:
        with open_model(folder) as model:
            assert model.relations == ()
        assert _failed(folder) == []


@pytest.mark.parametrize("method", [name for name in TYPES if METHODS[name].all_others])
def test_plain_weights_claimed_as_packed_fail(
    method: str, folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    part = folders[method][1]
    keys = METHODS[method].keys
    stale = ["lm_head", _STALE[method]] if method in _STALE else []
    gone: dict[str, Any] = dict.fromkeys(keys, stale)
    if method == "gptq":
        gone = {"dynamic": {}}
    bad = _edited(part, tmp_path / "bad", **gone)
    if method == "modelopt":
        (bad / "hf_quant_config.json").unlink()
    with open_model(bad) as model:
        (relation,) = model.relations
    assert relation.kind == "claims"
    assert all(name.endswith("o_proj.weight") for name in relation.where)
    assert _failed(bad) == ["quantization"]
    said = aprfmt("diagnose", part, bad, "--json").json
    assert [one["cause"] for one in said["causes"]] == ["packing_claim"], said["sentence"]
    assert sorted(said["causes"][0]["where"]) == sorted(relation.where)
    if keys:
        assert _STALE[method] in relation.says and "o_proj" in relation.says
        copy = tmp_path / "mended"
        shutil.copytree(bad, copy)
        remedied(relation.remedy.replace(str(bad), str(copy)), copy)
        with open_model(copy) as model:
            assert model.relations == ()
        same(part, copy)


@pytest.mark.parametrize("method", ["awq", "bitsandbytes"])
def test_packed_weights_that_a_list_leaves_as_they_are_fail(
    method: str, folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    whole = folders[method][0]
    bad = _edited(whole, tmp_path / "bad", **{METHODS[method].keys[0]: ["lm_head", "q_proj"]})
    with open_model(bad) as model:
        (relation,) = model.relations
        assert all(name.endswith("q_proj.weight") for name in relation.where)
        assert relation.count == model.hyper["n_layers"]
    assert _failed(bad) == ["quantization"]
    copy = tmp_path / "mended"
    shutil.copytree(bad, copy)
    remedied(relation.remedy.replace(str(bad), str(copy)), copy)
    same(whole, copy)


def test_targets_that_fit_nothing_fail(
    folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    whole = folders["compressed-tensors"][0]
    section = _section(whole)[1]
    groups = {
        name: {**group, "targets": ["re:.*ffn[.]w1$"]}
        for name, group in section["config_groups"].items()
    }
    bad = _edited(whole, tmp_path / "bad", config_groups=groups)
    with open_model(bad) as model:
        (relation,) = model.relations
        assert "targets of group_0" in relation.says
    copy = tmp_path / "mended"
    shutil.copytree(bad, copy)
    remedied(relation.remedy.replace(str(bad), str(copy)), copy)
    same(whole, copy)


def test_a_listed_name_that_no_module_has_is_warned_of(
    folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    names = ["lm_head", "visual", "re:vision_tower.*", "model.layers.1.self_attn.wq_proj"]
    whole = folders["compressed-tensors"][0]
    odd = _edited(whole, tmp_path / "odd", ignore=names)
    assert _failed(odd) == []
    said = aprfmt("validate", odd).out
    assert said.count(f"lists {names[-1]}") == 1 and "did it mean model.layers.1.self_attn" in said
    assert not any(f"lists {name}" in said for name in names[:-1])
    with open_model(odd) as model:
        assert model.relations == ()


def test_the_other_official_layout_of_a_listed_name_contradicts_nothing(
    folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    part = folders["compressed-tensors"][1]
    other = tmp_path / "other"
    shutil.copytree(part, other)
    held = load_file(other / "model.safetensors")
    save_file(
        {name.replace("model.", "language_model.model."): tensor for name, tensor in held.items()},
        other / "model.safetensors",
    )
    with open_model(other) as model:
        assert [one.kind for one in model.relations if one.kind == "claims"] == []


def test_names_fit_as_transformers_has_it() -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    modules = [
        "model.layers.1.mlp.gate",
        "model.layers.1.mlp.gate_proj",
        "lm_head",
        "model.layers.11.self_attn.q_proj",
        "model.decoder.layers.23.fc1",
    ]
    entries = [
        "lm_head",
        "model.layers.1",
        "mlp.gate",
        "fc1",
        "model.layers.*.self_attn",
        "model.layers.1.mlp.gate",
        "q_proj",
        "gate",
    ]
    for entry in entries:
        section = {"quant_method": "awq", "modules_to_not_convert": [entry]}
        for module in modules:
            packed = should_convert_module(module, [entry])
            assert is_listed(section, module) is not packed, (entry, module)
            if not packed:
                assert not claims_packed(section, module, [module])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, False),
        ({}, False),
        ({"quant_method": "another"}, False),
        ({"quant_method": None}, False),
        ({"quant_method": "awq"}, True),
    ],
)
def test_of_a_method_whose_lists_nobody_knows_nothing_is_said(
    config: dict[str, Any] | None, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`modules_to_convert` says the same of a plain module in each of them."""
    plain, packed = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
    monkeypatch.setattr(
        quantized_modules, "_plain_and_packed", lambda model: ({plain: None}, {packed: None})
    )
    monkeypatch.setattr(quantized_modules, "stale_names", lambda model: [])
    monkeypatch.setattr(quantized_modules, "_remedy_command", lambda *_: "")
    if config:
        config = {"quantization_config": {**config, "modules_to_convert": [plain]}}
    model: Any = SimpleNamespace(config=config)
    found = quantized_modules.wrong_claims(model)
    assert (found is not None) == said
    assert found is None or found.where == (f"{plain}.weight",)
