"""Captures without token ids: the recorded embedding says them, else --ids is asked for.

The runs are transformers' own. Seen red: "no cause of the table fits", and a next command that
ended with 2 for want of ids.
"""

import shlex
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import Diagnosis, diagnose
from aprfmt.model import open_model
from tests.cli.run import aprfmt
from tests.diagnosis.engines import tiny_folder

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

IDS = tuple(int(one) for one in np.random.default_rng(3).permutation(48)[:12])
CUT = 7  # the tokens from here on do not see those before
EMBEDDINGS = ("embed_tokens", "wte")


@cache
def outputs(arch: str, dtype: str, cut: bool, ids: tuple[int, ...] = IDS) -> dict[str, Any]:
    """Return {module: output} of transformers' pass: the embedding and every layer."""
    from transformers import AutoModelForCausalLM

    kind = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(
        tiny_folder(arch), dtype=kind, attn_implementation="eager"
    ).eval()
    found: dict[str, Any] = {}

    def hook(name: str) -> Any:
        def keep(_: Any, __: Any, out: Any) -> None:
            out = out[0] if isinstance(out, tuple) else out
            found[name] = out.detach().float().numpy().copy()

        return keep

    for name, module in model.named_modules():
        above, _, last = name.rpartition(".")
        if last in EMBEDDINGS or (last.isdigit() and above.endswith((".layers", ".h"))):
            module.register_forward_hook(hook(name))
    n = len(ids)
    least = torch.finfo(kind).min
    mask = torch.full((n, n), least, dtype=kind).triu(1)
    if cut:
        mask[CUT:, :CUT] = least
    with torch.no_grad():
        model(torch.tensor([list(ids)]), attention_mask=mask[None, None], use_cache=False)
    return found


def saved(folder: Path, name: str, arrays: dict[str, Any], embedding: bool = True) -> str:
    """Write captured arrays without token ids, with or without the embedding's."""
    path = folder / f"{name}.npz"
    kept = {k: v for k, v in arrays.items() if embedding or not k.endswith(EMBEDDINGS)}
    np.savez(path, **kept)
    return str(path)


def judged(folder: Path, arch: str, dtype: str, embedding: bool) -> Diagnosis:
    """Return what is said of a sound run and one with a cut mask."""
    a, b = (
        saved(folder, name, outputs(arch, dtype, cut), embedding)
        for name, cut in (("a", False), ("b", True))
    )
    return diagnose(a, b, model=str(tiny_folder(arch)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["llama", "gemma", "gpt2"])
def test_a_recorded_embedding_says_the_ids(arch: str, dtype: str, tmp_path: Path) -> None:
    found = judged(tmp_path, arch, dtype, True)
    assert tuple(found.ids) == IDS
    assert found.lead is not None and found.lead.cause == "mask" and found.lead.confirmed


def test_one_trace_against_the_model_takes_its_embedding(tmp_path: Path) -> None:
    for cut, exit_code in ((False, 0), (True, 1)):
        path = saved(tmp_path, f"cut{cut}", outputs("llama", "float32", cut))
        found = diagnose(str(tiny_folder("llama")), path)
        assert found.exit_code == exit_code and tuple(found.ids) == IDS, found.sentence


def test_embeddings_of_other_ids_are_not_compared(tmp_path: Path) -> None:
    other = (*IDS[:5], 50, *IDS[6:])
    a = saved(tmp_path, "a", outputs("llama", "float32", False))
    b = saved(tmp_path, "b", outputs("llama", "float32", False, other))
    found = diagnose(a, b, model=str(tiny_folder("llama")))
    assert found.exit_code == 2 and "first difference at 5" in found.sentence, found.sentence


def changed(arrays: dict[str, Any], how: str) -> dict[str, Any]:
    """Return captures whose embedding says no ids: it is no row of the model's, or zero."""
    made = dict(arrays)
    for name in made:
        if name.endswith(EMBEDDINGS):
            made[name] = made[name] * (0 if how == "zero" else 1.3)
    return made


@pytest.mark.parametrize("how", ["zero", "scaled", "absent"])
def test_without_ids_they_are_asked_for_and_the_first_row_is_named(
    how: str, tmp_path: Path
) -> None:
    arrays = [outputs("llama", "float32", cut) for cut in (False, True)]
    a, b = (
        saved(tmp_path, name, changed(each, how), how != "absent")
        for name, each in zip("ab", arrays, strict=True)
    )
    found = diagnose(a, b, model=str(tiny_folder("llama")))
    assert found.ids == () and found.lead is not None
    assert f"before position {CUT} agree" in found.sentence
    assert "--ids would let it find the cause" in found.sentence
    assert found.lead.next.endswith("--ids IDS")
    if how != "absent":
        return
    words = shlex.split(found.lead.next.replace("IDS", ",".join(map(str, IDS))))[1:]
    done = aprfmt(*words, "--json")
    assert done.code == 1 and done.json["findings"][0]["cause"] == "mask"


def test_a_row_that_two_tokens_have_says_nothing(tmp_path: Path) -> None:
    from aprfmt.diagnosis.recorded_ids import ids_of_embedding
    from aprfmt.inference.engines.opening import open_trace
    from tests.field import hf

    other = next(one for one in range(48) if one not in IDS)

    def double(tensors: dict[str, Any]) -> None:
        name = next(key for key in tensors if key.endswith("embed_tokens.weight"))
        tensors[name][other] = tensors[name][IDS[4]]

    path = Path(saved(tmp_path, "a", outputs("llama", "float32", False)))
    with open_trace(path) as trace:
        with open_model(tiny_folder("llama")) as model:
            assert ids_of_embedding(trace, model) == IDS
        with open_model(hf.copy(tiny_folder("llama"), "ids-doubled", double)) as model:
            assert ids_of_embedding(trace, model) is None
