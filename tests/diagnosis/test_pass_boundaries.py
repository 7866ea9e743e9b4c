"""A later pass that reads a cache of other requests: the pass is named, and no weight or adapter.

Seen red: "any of these operations may be wrong" with the output's weight, and an adapter of rank 8.
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose
from aprfmt.diagnosis import search as searching
from aprfmt.diagnosis.pass_boundaries import later_pass_clause
from tests.diagnosis.engines import LONG, tiny_folder
from tests.models import VOCAB

IDS, BEGINS = LONG[:20], 12
OTHERS = [(7 * one + 11) % VOCAB for one in IDS]
NAMES = ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp", "q_proj", "k_proj",
         "v_proj", "o_proj", "norm")  # fmt: skip


def keep(found: dict[str, Any], name: str, rows: int, module: Any, given: Any, y: Any) -> None:
    """Keep what a module gave, as [rows, width]."""
    value = y[0] if isinstance(y, tuple) else y
    found[name] = value.detach().reshape(rows, -1).clone()


def served(folder: Path, cached: list[int], out: Path) -> Path:
    """Save two passes of transformers' model; the second reads the cache of `cached` ids."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    for step, (first, stop) in enumerate(((0, BEGINS), (BEGINS, len(IDS)))):
        cache = DynamicCache(config=model.config)
        found: dict[str, Any] = {}
        with torch.no_grad():
            if first:
                model(torch.tensor([cached[:first]]), past_key_values=cache, use_cache=True)
            hooks = [
                module.register_forward_hook(partial(keep, found, name, stop - first))
                for name, module in model.named_modules()
                if name.endswith(NAMES) or name.split(".")[-1].isdigit()
            ]
            ids, at = torch.tensor([IDS[first:stop]]), torch.arange(first, stop)
            made = model(ids, position_ids=at[None], past_key_values=cache, use_cache=True)
        for hook in hooks:
            hook.remove()
        found |= {"logits": made.logits[0], "input_ids": ids[0], "positions": at}
        place = out / f"step_{step}"
        place.mkdir(parents=True)
        torch.save(found, place / "dump.pt")
    return out


def test_a_cache_of_another_request_is_in_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "RUNS", 24)
    folder = tiny_folder("llama")
    found = diagnose(str(folder), str(served(folder, OTHERS, tmp_path / "other")))
    assert found.verdict == "bug"
    (finding,) = [one for one in found.findings if one.verdict == "bug"]
    assert finding.certainty == "located"
    says = (
        "tokens before 12 agree, and those from 12 on, where pass 1 begins, do not, though "
        "their own q, k and v are right: cached keys and values of the tokens before 12"
    )
    assert says in finding.says, finding.says
    assert "adapter" not in finding.says and not any("weight" in key for key in finding.where)
    right = diagnose(str(folder), str(served(folder, list(IDS), tmp_path / "own")))
    assert right.verdict in ("precision", "same")


def case(late: int, steps: list[int], op: str = "mix", after: tuple[str, ...] = ()) -> Any:
    """Return a mismatch of 6 tokens whose rows differ from `late` on."""
    rows = np.where(np.arange(6) >= late, 1.0, 0.0)
    return cast(Any, SimpleNamespace(
        recorded=SimpleNamespace(trace=SimpleNamespace(run={"dump": {"steps": steps}})),
        view=SimpleNamespace(calls=(SimpleNamespace(op=op),), after=after, tolerance=1e-4),
        rows=np.arange(6), tokens=6, distances_by_row=lambda view: rows,
    ))  # fmt: skip


@pytest.mark.parametrize(("given", "says"), [
    (case(4, [0, 0, 0, 0, 1, 1]), "cached keys and values of the tokens before 4"),
    (case(4, [0, 0, 0, 0, 1, 1], "scan"), "the state of the tokens before 4"),
    (case(4, [0, 0, 0, 0, 1, 1], after=("L0.k", "L0.v")), "though their own q, k and v are right"),
    (case(3, [0, 0, 0, 0, 1, 1]), ""),  # inside a pass
    (case(0, [0, 0, 0, 0, 1, 1]), ""),  # from the start on
    (case(4, [0] * 6), ""),  # one pass
    (case(4, [0, 0, 0, 0, 1, 1], "linear"), ""),  # nothing reads earlier tokens
    (case(4, []), ""),  # passes are not known
])  # fmt: skip
def test_the_clause_is_said_where_a_pass_begins(given: Any, says: str) -> None:
    found = later_pass_clause(given)
    assert says in found and bool(says) == bool(found)
