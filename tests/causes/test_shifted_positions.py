"""Other positions than the tokens' own, seen behind a norm: learned rows by transformers' GPT-2.

Seen red: "no cause of the table fits" for a padding of 5, and two points accused that only follow.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.run import aprfmt

torch: Any = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
transformers: Any = pytest.importorskip("transformers", reason="NOT-RUN: no transformers")

COUNT = 12
# positions that the run gave its tokens, and a part of the answer
POSITIONS: dict[str, tuple[list[int], str]] = {
    "padded on the left by five": ([*range(5, 17)], "counted from 5 instead of 0"),
    "off by one": ([*range(1, 13)], "counted from 1 instead of 0"),
    "padded by more than the text": ([*range(19, 31)], "counted from 19 instead of 0"),
    "zero for what was taken for padding": (
        [0, 0, 0, *range(9)],
        "from token 1 on tokens have positions 0, 0, 0, 1, 2, 3",
    ),
    "begun again in the middle": (
        [*range(7), *range(5)],
        "from token 7 on tokens have positions 0, 1, 2, 3, 4 instead of 7, 8, 9, 10, 11",
    ),
    "one for every token": ([7] * COUNT, "every token has position 7"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    made = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for values in made.parameters():
            values.add_(torch.randn_like(values) * 0.1)
    folder = tmp_path_factory.mktemp("positions") / "gpt2"
    made.save_pretrained(folder)
    return folder, made


def captured(made: Any, ids: Any, positions: list[int], file: Path) -> Path:
    """Save what the norms, attentions and MLPs return, under the names of their modules."""
    found: dict[str, Any] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, given: Any, result: Any) -> None:
            first = result[0] if isinstance(result, tuple) else result
            found[name] = first[0].detach().numpy()

        return hook

    hooks = [
        module.register_forward_hook(keep(name))
        for name, module in made.named_modules()
        if name.endswith(("ln_1", "ln_2", "attn", "mlp", "wte", "ln_f"))
    ]
    with torch.no_grad():
        made(input_ids=ids, position_ids=torch.tensor([positions]))
    for hook in hooks:
        hook.remove()
    np.savez(file, **found)
    return file


@pytest.mark.parametrize("swapped", [False, True], ids=["B is wrong", "A is wrong"])
@pytest.mark.parametrize("case", POSITIONS)
def test_positions_are_named_behind_a_norm(
    case: str, swapped: bool, model: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, made = model
    positions, says = POSITIONS[case]
    ids = torch.randint(1, 96, (1, COUNT), generator=torch.Generator().manual_seed(2))
    np.save(tmp_path / "ids.npy", ids[0].numpy())
    files = [
        captured(made, ids, each, tmp_path / f"{name}.npz")
        for name, each in (("right", [*range(COUNT)]), ("wrong", positions))
    ]
    a, b = reversed(files) if swapped else files
    done = aprfmt("diagnose", a, b, "--model", folder, "--ids", tmp_path / "ids.npy", "--json")
    (cause,) = done.json["causes"]
    assert (cause["cause"], cause["level"]) == ("positions", "confirmed"), cause
    assert says in cause["says"]
