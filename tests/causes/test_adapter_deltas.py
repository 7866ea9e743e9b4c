"""Two adapters are compared by alpha / r * B @ A, not by their factors.

Seen red: factors compared one by one ("lora_A times 4, bug, confirmed" of an adapter that merges to
equal bytes), a scale without the root of rsLoRA, a key tried on the modules that differ alone.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.run import aprfmt

MODULES = [f"model.layers.{i}.self_attn.{p}" for i in range(3) for p in ("q_proj", "v_proj")]
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": False, "bias": "none",
          "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "org/base",
          "rank_pattern": {}, "alpha_pattern": {}}  # fmt: skip
Arrays = dict[str, Any]
Change = Callable[[Arrays], Arrays]


def factors() -> Arrays:
    """Return the factors of all modules: A [4, 24], B [16, 4]."""
    draw = np.random.default_rng(3)
    found = {}
    for module in MODULES:
        name = f"base_model.model.{module}"
        found[f"{name}.lora_A.weight"] = draw.normal(size=(4, 24)).astype(np.float32)
        found[f"{name}.lora_B.weight"] = draw.normal(size=(16, 4)).astype(np.float32)
    return found


def lengths(found: Arrays) -> Arrays:
    """Return DoRA's lengths for all modules."""
    return {
        key.replace("lora_A.weight", "lora_magnitude_vector"): np.linspace(0.5, 2, 16, dtype="f4")
        for key in found
        if "lora_A" in key
    }


def write(folder: Path, arrays: Arrays, **changed: Any) -> Path:
    """Write an adapter as PEFT does."""
    folder.mkdir()
    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()},
              folder / "adapter_model.safetensors", {"format": "pt"})  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changed))
    return folder


def times(a: float, b: float, only: str = "") -> Change:
    """Return the change that multiplies A and B; only in modules whose name has `only`."""
    return lambda found: {
        key: np.float32(a if "lora_A" in key else b) * value if only in key else value
        for key, value in found.items()
    }


def padded(found: Arrays) -> Arrays:
    """Return the factors with as many ranks of zeros."""
    axis = {"lora_A": 0, "lora_B": 1}
    return {
        key: np.concatenate([value, 0 * value], axis[key.split(".")[-2]])
        for key, value in found.items()
    }


def turned(found: Arrays) -> Arrays:
    """Return the factors in another basis of the ranks."""
    basis = np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))[0].astype(np.float32)
    return {k: basis @ v if "lora_A" in k else v @ basis.T for k, v in found.items()}


def half(found: Arrays) -> Arrays:
    """Return the factors in float16."""
    return {key: value.astype(np.float16) for key, value in found.items()}


def same(found: Arrays) -> Arrays:
    """Return the factors as they are."""
    return found


# What happens to the factors, keys of the configuration, the verdict
INNOCENT: dict[str, tuple[Change, dict[str, Any], str]] = {
    "folded_into_a": (times(2, 1), {"lora_alpha": 4}, "same"),
    "folded_by_rslora": (times(4, 1), {"lora_alpha": 1, "use_rslora": True}, "same"),
    "moved_between": (times(4, 0.25), {}, "same"),
    "moved_by_a_third": (times(3, 1 / 3), {}, "precision"),
    "both_signs": (times(-1, -1), {}, "same"),
    "zero_ranks": (padded, {"r": 8, "lora_alpha": 16}, "same"),
    "other_basis": (turned, {}, "precision"),
    "half": (half, {}, "precision"),
    "alpha_pattern": (times(2, 1, "v_proj"), {"alpha_pattern": {"v_proj": 4}}, "same"),
}


def diagnosed(a: Path, b: Path) -> dict[str, Any]:
    """Return `diagnose --json` of two adapters."""
    return dict(aprfmt("diagnose", a, b, "--json").json)


@pytest.mark.parametrize("name", INNOCENT)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_equal_changes_are_equal(name: str, dora: bool, tmp_path: Path) -> None:
    change, keys, verdict = INNOCENT[name]
    found = factors()
    more = lengths(found) if dora else {}
    a = write(tmp_path / "a", found | more, use_dora=dora)
    b = write(tmp_path / "b", change(found) | more, use_dora=dora, **keys)
    said = diagnosed(a, b)
    assert (said["verdict"], said["exit"], said["not_compared"]) == (verdict, 0, [])
    assert aprfmt("diff", a, b, "--accept", "within").code == 0
    assert aprfmt("diff", a, b).code == (0 if verdict == "same" else 1)


# What happens to the factors, keys, the factor of the changes, what makes them equal
SCALED: dict[str, tuple[Change, dict[str, Any], float, str]] = {
    "alpha_doubled": (same, {"lora_alpha": 16}, 2, "lora_alpha 8"),
    "rslora_in_one": (same, {"use_rslora": True}, 2, "use_rslora false or lora_alpha 4"),
    "rslora_inherited": (times(2, 1), {"lora_alpha": 4, "use_rslora": True}, 2,
                         "use_rslora false or lora_alpha 2"),
    "factor_of_a": (times(3, 1), {}, 3, "lora_alpha"),
    "one_sign": (times(-1, 1), {}, -1, ""),
    "pattern_lost": (times(2, 1, "v_proj"), {}, 2, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_one_factor_is_named_with_the_key_that_takes_it_back(name: str, tmp_path: Path) -> None:
    change, keys, factor, key = SCALED[name]
    a, b = write(tmp_path / "a", factors()), write(tmp_path / "b", change(factors()), **keys)
    answers = [diagnosed(a, b), aprfmt("diff", a, b, "--json").json]
    for said in answers:
        assert said["exit"] == 1
        (cause,) = said["causes"]
        assert (cause["cause"], cause["level"]) == ("delta_scale", "confirmed")
        assert f"is {factor:g} times A's" in cause["says"] and key in cause["says"]
        if not key:
            assert "no single key" in cause["says"] and cause["remedy"] is None
    if key:  # the printed command mends B
        command = answers[0]["causes"][0]["remedy"]["command"]
        assert aprfmt(*command.split()[1:]).code == 0
        assert diagnosed(a, b)["exit"] == 0


def kohya(path: Path, alpha: float | None) -> Path:
    """Write a file of kohya's, with this alpha for every module or none."""
    made = {}
    for name, value in factors().items():
        module, _, side = name.removeprefix("base_model.model.").partition(".lora_")
        flat = f"lora_te_{module.replace('.', '_')}"
        made[f"{flat}.lora_{'down' if side[0] == 'A' else 'up'}.weight"] = value
        if alpha is not None:
            made[f"{flat}.alpha"] = np.array(alpha, np.float32)
    save_file(made, path)
    return path


def mlx(folder: Path, scale: float) -> Path:
    """Write a folder of MLX's with this scale."""
    folder.mkdir()
    made = {
        name.removeprefix("base_model.model.")
        .replace(".lora_A.weight", ".lora_a")
        .replace(".lora_B.weight", ".lora_b"): np.ascontiguousarray(value.T)
        for name, value in factors().items()
    }
    save_file(made, folder / "adapters.safetensors")
    said = {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": scale}}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


OF_TENSORS = "the scale of a pair is its alpha tensor divided by its rank, and 1 without the tensor"
OF_MLX = "the scale is that of lora_parameters in adapter_config.json"


@pytest.mark.parametrize(
    ("write_one", "first", "second", "says"),
    [
        (kohya, None, 1.0, OF_TENSORS),
        (kohya, 4.0, 8.0, OF_TENSORS),
        (kohya, None, 2.0, OF_TENSORS),
        (mlx, 20.0, 10.0, OF_MLX),
    ],
)
def test_a_scale_is_said_to_stand_where_the_adapter_has_it(
    write_one: Callable[..., Path], first: float | None, second: float, says: str, tmp_path: Path
) -> None:
    """Seen red: "no single key of B's adapter_config.json" of files that have no such file."""
    a = write_one(tmp_path / "a.safetensors", first)
    b = write_one(tmp_path / "b.safetensors", second)
    (cause,) = aprfmt("diff", a, b, "--json").json["causes"]
    assert (cause["cause"], cause["level"]) == ("delta_scale", "confirmed")
    assert says in cause["says"] and "no single key" not in cause["says"]


@pytest.mark.parametrize(("write_one", "first", "second"), [(kohya, None, 4.0), (mlx, 2.0, 2.0)])
def test_scales_that_are_equal_are_no_finding(
    write_one: Callable[..., Path], first: float | None, second: float, tmp_path: Path
) -> None:
    a = write_one(tmp_path / "a.safetensors", first)
    b = write_one(tmp_path / "b.safetensors", second)
    assert aprfmt("diff", a, b).code == 0


def test_other_changes_are_compared_by_their_factors(tmp_path: Path) -> None:
    """Where the scales are equal; else the changes alone are spoken of."""
    found = factors()
    first = next(iter(found))
    damaged = {**found, first: np.roll(found[first], 1, axis=0)}
    a = write(tmp_path / "a", found)
    (cause,) = diagnosed(a, write(tmp_path / "b", damaged))["causes"]
    assert cause["where"] == [first] and not cause["cause"].startswith("delta_")
    scaled, left = diagnosed(a, write(tmp_path / "c", damaged, use_rslora=True))["causes"]
    assert (scaled["cause"], scaled["level"]) == ("delta_scale", "confirmed")
    assert "in 5 of 6 modules" in scaled["says"] and "use_rslora false" in scaled["says"]
    assert (left["cause"], left["level"]) == ("delta_change", "located")
    assert first in left["where"] and not set(left["where"]) & set(scaled["where"])


def test_another_change_is_said_to_have_no_command(tmp_path: Path) -> None:
    found = factors()
    first = next(iter(found))
    damaged = {**found, first: np.roll(found[first], 1, axis=0)}
    told = diagnosed(write(tmp_path / "a", found), write(tmp_path / "b", damaged, use_rslora=True))
    (left,) = [row for row in told["causes"] if row["cause"] == "delta_change"]
    assert left["remedy"] is None
    assert told["unmended"].startswith("no command mends delta_change: ")


def drawn(found: Arrays, share: float, only: str = "lora_") -> Arrays:
    """Return factors with noise of a share of each one's deviation; 1 and more: other numbers."""
    draw = np.random.default_rng(8)
    made = {}
    for key, value in found.items():
        noise = draw.normal(size=value.shape).astype(np.float32) * value.std()
        mixed = noise if share >= 1 else value + np.float32(share) * noise
        made[key] = mixed if only in key else value
    return made


# How the factors were drawn anew, keys of the configuration, the class of the answer
TRAINED: dict[str, tuple[Change, dict[str, Any], str]] = {
    "further": (lambda f: drawn(f, 0.1), {}, "derived"),
    "further, by another alpha": (lambda f: drawn(f, 0.1), {"lora_alpha": 16}, "derived"),
    "far, by rslora": (lambda f: drawn(f, 0.5), {"use_rslora": True}, "derived"),
    "of fewer ranks": (lambda f: {k: v[:3] if "lora_A" in k else v[:, :3] for k, v in f.items()},
                       {"r": 3}, "derived"),
    "another": (lambda f: drawn(f, 1), {}, "not_comparable"),
    "another, by another alpha": (lambda f: drawn(f, 1), {"lora_alpha": 16}, "not_comparable"),
    "another, from one start": (lambda f: drawn(f, 1, "lora_B"), {}, "not_comparable"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINED)
def test_a_training_is_no_bug(name: str, tmp_path: Path) -> None:
    """It is a difference, whatever the scales are. Seen red: "bug: delta_change"."""
    change, keys, kind = TRAINED[name]
    a = write(tmp_path / "a", factors())
    said = diagnosed(a, write(tmp_path / "b", change(factors()), **keys))
    assert (said["class"], said["exit"]) == (kind, 1)
    assert {row["cause"] for row in said["causes"]} == ({"derived"} if kind == "derived" else set())


def test_either_side_of_a_scale_may_be_mended(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", factors()), write(tmp_path / "b", factors(), lora_alpha=16)
    (cause,) = diagnosed(a, b)["causes"]
    assert f"{b}" in cause["remedy"]["command"]
    command = cause["says"].rpartition("mend A: ")[2]
    assert aprfmt(*command.split()[1:]).code == 0
    assert json.loads((a / "adapter_config.json").read_text())["lora_alpha"] == 16
    assert diagnosed(a, b)["exit"] == 0


def test_lengths_of_dora_are_tensors_of_their_own(tmp_path: Path) -> None:
    found = factors()
    more = lengths(found)
    a = write(tmp_path / "a", found | more, use_dora=True)
    longer = {key: np.float32(1.5) * value for key, value in more.items()}
    b = write(tmp_path / "b", times(4, 0.25)(found) | longer, use_dora=True)
    (cause,) = diagnosed(a, b)["causes"]
    assert cause["cause"] == "scale" and set(cause["where"]) == set(more)


def test_the_changes_are_those_of_the_definition(tmp_path: Path) -> None:
    """Norms and distances are numpy's of alpha / r * B @ A, although no product is made."""
    from aprfmt.causes.tensor.adapter_deltas import compare_deltas
    from aprfmt.model import open_model

    a = write(tmp_path / "a", factors())
    b = write(tmp_path / "b", turned(times(1.5, 1)(factors())), use_rslora=True)
    with open_model(a) as one, open_model(b) as other:
        compared = compare_deltas(one, other)
    assert compared is not None and compared.complete
    mine, theirs = (load_file(each / "adapter_model.safetensors") for each in (a, b))
    for row in compared.rows:
        name = f"base_model.model.{row.module}.lora_"
        left, right = (
            scale * held[f"{name}B.weight"].astype(float) @ held[f"{name}A.weight"].astype(float)
            for scale, held in ((8 / 4, mine), (8 / math.sqrt(4), theirs))
        )
        expected = (np.linalg.norm(left), np.linalg.norm(right), np.linalg.norm(right - left))
        np.testing.assert_allclose((row.size_a, row.size_b, row.apart), expected, rtol=1e-10)


@pytest.mark.parametrize("lacks", ["A", "B"])
def test_a_module_of_one_adapter_alone_leaves_the_others_compared(
    lacks: str, tmp_path: Path
) -> None:
    whole = factors()
    part = {name: value for name, value in whole.items() if MODULES[2] not in name}
    made = (part, times(2, 1)(whole)) if lacks == "A" else (times(2, 1)(whole), part)
    a, b = (write(tmp_path / name, held) for name, held in zip("ab", made, strict=True))
    found = aprfmt("diff", a, b, "--json")
    assert found.code == 1, found.err
    rows = {row["key"]: row["verdict"] for row in found.json["tensors"]}
    alone = {key for key, verdict in rows.items() if verdict.startswith("ONLY_IN_")}
    assert len(alone) == 2 and all(MODULES[2] in key for key in alone), rows
    text = aprfmt("diff", a, b).out
    assert "scale * B @ A" in text and f"{'0.5' if lacks == 'B' else '2'} times A's" in text


def test_an_adapter_without_any_scale_has_no_file_that_states_it(tmp_path: Path) -> None:
    """Seen red: "no single key of B's adapter_config.json", which the file has not."""
    drawn = np.random.default_rng(9)
    alpha: dict[str, Any] = {}
    bare: dict[str, Any] = {}
    for layer in range(6):
        down, up = (drawn.standard_normal(s).astype(np.float32) for s in ((4, 32), (32, 4)))
        name = f"transformer_blocks_{layer}_attn_to_q"
        alpha |= {
            f"lora_unet_{name}.lora_down.weight": down, f"lora_unet_{name}.lora_up.weight": up,
            f"lora_unet_{name}.alpha": np.asarray(1.0, np.float32),
        }  # fmt: skip
        name = f"transformer.transformer_blocks.{layer}.attn.to_q"
        bare |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    for side, held in (("a", alpha), ("b", bare)):
        save_file(held, tmp_path / f"{side}.safetensors")
    told = aprfmt("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json").json
    (cause,) = told["causes"]
    assert cause["cause"] == "delta_scale" and "B states no scale" in cause["says"], cause
