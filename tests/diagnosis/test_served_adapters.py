"""A dump of a model that an engine served with an adapter, judged by the base and the adapter.

Seen red: "no cause of the table fits" where rsLoRA was ignored, with no way to name the adapter.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aprfmt.diagnosis import Diagnosis, diagnose
from aprfmt.errors import UsageError
from tests.adapters.test_merged_otherwise import Values, factors, write_adapter, write_merged
from tests.adapters.test_parts import PREFIX, base_folder
from tests.cli.run import aprfmt

IDS = "3,17,5,9,22,8,30,11,2,14"
SCALE = {"": 2.0, "rslora": 4.0}  # alpha 8 and rank 4
Times = Callable[[str], float]


def base_in(folder: Path, dtype: torch.dtype) -> Path:
    """Return a tiny llama whose weights are numbers of a type, stored in it."""
    base = base_folder(folder / "a")
    rows = {name: x.to(dtype) for name, x in load_file(base / "model.safetensors").items()}
    return write_merged(folder / f"base-{dtype}".replace("torch.", ""), base, rows)


def served(
    folder: Path,
    times: Times,
    *,
    stabilised: bool = False,
    points: str = "all",
    dtype: torch.dtype = torch.float32,
    rounded: bool = False,
) -> Diagnosis:
    """Return what is said of a run with the adapter's change multiplied by `times(name)`.

    `rounded`: the merged weights are stored in the type of the base.
    """
    base = base_in(folder, dtype)
    held: dict[str, Values] = factors(base)
    adapter = write_adapter(folder / "adapter", held, use_rslora=stabilised)
    rows = {name: x.float() for name, x in load_file(base / "model.safetensors").items()}
    scale = SCALE["rslora" if stabilised else ""]
    for name, weight in rows.items():
        at = f"{PREFIX}{name.removesuffix('.weight')}.lora_"
        if f"{at}A.weight" in held:
            change = held[f"{at}B.weight"].float() @ held[f"{at}A.weight"].float()
            rows[name] = weight + scale * times(name) * change
            if rounded:
                rows[name] = rows[name].to(dtype).float()
    engine = write_merged(folder / "engine", base, rows)
    saved = folder / "run.safetensors"
    done = aprfmt("trace", engine, "--payload", "--points", points, "--ids", IDS, "-o", saved)
    assert done.code == 0, done.err
    return diagnose(str(base), str(saved), adapter=str(adapter))


@pytest.mark.parametrize("points", ["all", "out", "logits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_that_is_served_as_stated_is_quiet(
    points: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Added at run time, the change is not rounded to the base's type."""
    found = served(tmp_path, lambda name: 1.0, points=points, dtype=dtype)
    assert found.exit_code == 0 and found.verdict in ("same", "precision"), found.sentence


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_merge_that_is_rounded_to_the_bases_type_is_precision(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Seen red: "the bias has other values" of one value of a weight at the next number."""
    found = served(tmp_path, lambda name: 1.0, dtype=dtype, rounded=True)
    assert (found.exit_code, found.verdict) == (0, "precision"), found.sentence
    assert "rounded to the types of the base's" in found.sentence


WRONG: dict[str, tuple[Times, bool, str]] = {
    "rslora ignored": (lambda name: 0.5, True, "0.5 times: use_rslora is ignored: the scale is"),
    "rslora unasked": (lambda name: 2.0, False, "rsLoRA's alpha / sqrt(r), which was not asked"),
    "alpha alone": (lambda name: 4.0, False, "alpha is taken as the scale"),
    "not applied": (lambda name: 0.0, True, "it is not applied: the weights are those of the"),
    "twice": (lambda name: 2.0, True, "alpha is taken as the scale"),
    "solved": (lambda name: 0.65, True, "0.65 times, which none of its numbers gives"),
    "one role": (lambda name: float("v_proj" not in name), False, "not applied to attn_v.weight"),
    "one layer": (lambda name: float("layers.1" not in name), False, "not applied in layer 1"),
}


@pytest.mark.parametrize("points", ["all", "out", "logits"])
@pytest.mark.parametrize("name", WRONG)
def test_what_an_engine_made_of_the_adapter_is_named(
    name: str, points: str, tmp_path: Path
) -> None:
    times, stabilised, says = WRONG[name]
    found = served(tmp_path, times, stabilised=stabilised, points=points)
    (one,) = [one for one in found.findings if one.verdict == "bug"]
    assert (found.exit_code, one.cause) == (1, "served_adapter"), found.sentence
    assert one.certainty == "confirmed" and says in one.says, one.says
    assert "aprfmt trace" not in one.next  # of the base alone, without the adapter


def test_other_weights_are_not_laid_on_the_adapter(tmp_path: Path) -> None:
    """Nor are they where the adapter reads the same input."""
    base = base_in(tmp_path, torch.float32)
    held = factors(base)
    adapter = write_adapter(tmp_path / "adapter", held)
    rows = load_file(base / "model.safetensors")
    for name in list(rows):
        at = f"{PREFIX}{name.removesuffix('.weight')}.lora_"
        if f"{at}A.weight" in held:
            rows[name] = rows[name] + 2 * held[f"{at}B.weight"] @ held[f"{at}A.weight"]
        if name.endswith("layers.0.self_attn.k_proj.weight"):
            rows[name] = torch.flip(rows[name], (0,)).contiguous()
    engine = write_merged(tmp_path / "engine", base, rows)
    saved = tmp_path / "run.safetensors"
    aprfmt("trace", engine, "--payload", "--points", "all", "--ids", IDS, "-o", saved)
    found = diagnose(str(base), str(saved), adapter=str(adapter))
    assert found.findings and all(one.cause != "served_adapter" for one in found.findings)
    assert any("attn_k" in place for one in found.findings for place in one.where)


@pytest.mark.parametrize("kind", ["two models", "a run"])
def test_an_adapter_without_a_trace_is_refused(kind: str, tmp_path: Path) -> None:
    base = base_in(tmp_path, torch.float32)
    adapter = write_adapter(tmp_path / "adapter", factors(base))
    other: Any = f"{base}@numpy" if kind == "a run" else base
    with pytest.raises(UsageError, match="--adapter is for a model and a saved trace"):
        diagnose(str(base), str(other), adapter=str(adapter))


def test_the_command_takes_an_adapter(tmp_path: Path) -> None:
    served(tmp_path, lambda name: 0.5, stabilised=True)
    done = aprfmt("diagnose", tmp_path / "base-float32", tmp_path / "run.safetensors",
                  "--adapter", tmp_path / "adapter")  # fmt: skip
    assert done.code == 1 and "use_rslora is ignored" in done.out
