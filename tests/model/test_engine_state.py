"""Whether an engine loaded what was published: its state is read under the published names."""

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from aprfmt import convert
from aprfmt.model import open_model
from aprfmt.model.engine_state import is_engine_state, is_saved_state
from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder, tensors_of
from tests.diagnosis.engines import tiny_folder
from tests.docs.examples import DOCS, blocks
from tests.model.engine_states import JOINED, State, of_rank, published, save, sglang
from tests.models import save_tiny

torch = pytest.importorskip("torch")
HEADS = {"llama": 16, "qwen2": 12, "mixtral": 12}
Q = "model.layers.1.self_attn.qkv_proj.weight"
OUT = "model.layers.1.self_attn.o_proj.weight"
GATE = "model.layers.1.mlp.gate_up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


def states(arch: str, ranks: int, experts: bool = False) -> list[State]:
    """Return the state of every rank of a tiny model."""
    given = published(tiny_folder(arch))
    return [of_rank(given, rank, ranks, HEADS[arch], experts) for rank in range(ranks)]


@pytest.mark.parametrize(
    "arch, ranks, experts",
    [
        ("llama", 1, False),
        ("llama", 2, False),
        ("llama", 4, False),
        ("qwen2", 2, False),
        ("mixtral", 1, False),
        ("mixtral", 2, False),
        ("mixtral", 2, True),
    ],
)
def test_what_was_loaded_is_equal(arch: str, ranks: int, experts: bool, tmp_path: Path) -> None:
    path = save(tmp_path / "s", states(arch, ranks, experts))
    done = aprfmt("diff", tiny_folder(arch), path, "--json")
    assert done.code == 0, done.out[:2000]
    assert {one["verdict"] for one in done.json["tensors"]} == {"SAME_BYTES"}
    with open_model(tiny_folder(arch)) as model:
        assert len(done.json["tensors"]) == len(model.roles)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "own, other", [("model.", "ema."), ("", "ema."), ("module_ema.", "module.")]
)
def test_a_model_and_its_average_are_named_and_one_is_read(
    own: str, other: str, ranks: int, tmp_path: Path
) -> None:
    """The other copy is not compared, and never said to be equal."""
    read, aside = (other, own) if own == "module_ema." else (own, other)
    both = [
        {f"{read}{name}": value for name, value in held.items()}
        | {f"{aside}{name}": value * 1.01 for name, value in held.items()}
        for held in states("llama", ranks)
    ]
    state = save(tmp_path / "state", both)
    done = aprfmt("diff", tiny_folder("llama"), state, "--format", "agent")
    said = done.err + done.out
    compared = f"those under {read} are" if read else "those without a prefix are"
    assert f"under {aside}" in said and f"{compared} compared" in said, said
    assert ("aprfmt convert" in said) == (ranks == 1)
    assert "equal in what was compared: 30 of 51 tensors" in said
    assert f"21 tensors only in B: {aside}" in said and done.code != 0


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """NVFP4 experts as ModelOpt publishes them, and all values of the same in bfloat16."""
    above = tmp_path_factory.mktemp("packed")
    save_tiny("mixtral", above / "base", "bfloat16", hidden_size=64, intermediate_size=96)
    for words in (
        ("quantize", above / "base", above / "nvfp4", "--type", "MODELOPT-NVFP4"),
        ("convert", above / "nvfp4", above / "plain", "--encoding", "BF16"),
    ):
        done = aprfmt(*words)
        assert done.code == 0, done.err
    return above / "nvfp4", published(above / "plain")


def stacked(given: State, rank: int, ranks: int) -> State:
    """Return a rank's share of published NVFP4 codes and scales, as vLLM holds them."""
    made: State = {}
    groups: dict[str, dict[tuple[str, int], Any]] = {}
    for name, tensor in given.items():
        above, expert, below = name.partition(".experts.")
        if not expert:
            joined = next((key for key, parts in JOINED.items() if f".{parts[0]}." in name), "")
            if joined:
                parts = [given[name.replace(JOINED[joined][0], one)] for one in JOINED[joined]]
                cat = [torch.atleast_1d(one).chunk(ranks if one.ndim else 1) for one in parts]
                made[name.replace(JOINED[joined][0], joined)] = torch.cat(
                    [each[rank % len(each)] for each in cat]
                )
            elif not any(f".{one}." in name for parts in JOINED.values() for one in parts):
                axis = 1 if "o_proj" in name else 0
                whole = tensor.ndim < 2 or "gate" in name
                made[name] = tensor if whole else tensor.chunk(ranks, axis)[rank].clone()
            continue
        number, module, leaf = below.split(".")
        stack = "w2" if module == "w2" else "w13"
        share = tensor
        if tensor.ndim:
            share = tensor.chunk(ranks, int(stack == "w2"))[rank]
        groups.setdefault(f"{above}.experts.{stack}_{leaf}", {})[module, int(number)] = share
    for name, held in groups.items():
        count = 1 + max(number for _, number in held)
        each = [[held[m, e] for m in ("w1", "w3", "w2") if (m, e) in held] for e in range(count)]
        made[name] = torch.stack(
            [torch.cat([torch.atleast_1d(one) for one in parts]) for parts in each]
        )
        if name.endswith("w2_weight_scale_2"):
            made[name] = made[name][:, 0]
    return made


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_values_of_packed_weights_are_equal(
    ranks: int, packed: tuple[Path, State], tmp_path: Path
) -> None:
    """Seen red: the rows of the stack, counted once for each expert, were said to be moved."""
    path = save(tmp_path / "s", [of_rank(packed[1], n, ranks, 16, False) for n in range(ranks)])
    done = aprfmt("diff", packed[0], path, "--accept", "within", "--json")
    assert (done.code, done.json["causes"]) == (0, []), done.out[:2000]
    assert {one["verdict"] for one in done.json["tensors"]} == {"SAME_BYTES", "WITHIN"}


def test_a_scale_of_another_part_is_one_factor_for_each_expert(
    packed: tuple[Path, State], tmp_path: Path
) -> None:
    """Seen red: "several groups share one"; factors up to 17 % were within the rounding."""
    held = of_rank(packed[1], 0, 1, 16, False)
    name = next(name for name in held if ".1." in name and name.endswith("w13_weight"))
    count = len(held[name])
    for expert in range(count):
        held[name][expert, 96:] *= 0.9 + 0.2 * expert / (count - 1)
    path = save(tmp_path / "s", [held])
    done = aprfmt("diff", packed[0], path, "--accept", "within", "--json")
    (cause,) = done.json["causes"]
    assert (cause["cause"], cause["roles"]) == ("quant_scale", ["L1.ffn_up_exps.weight"])
    assert "each expert" in cause["says"] and "B's numbers" in cause["says"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_joined_codes_and_scales_are_equal(
    ranks: int, packed: tuple[Path, State], tmp_path: Path
) -> None:
    """Seen red: exit code 2, since the scales of the experts were not found."""
    given = published(packed[0])
    held = [stacked(given, n, ranks) for n in range(ranks)]
    path = save(tmp_path / "s", held)
    done = aprfmt("diff", packed[0], path, "--json")
    assert done.code == 0, done.out[:2000]
    assert {one["verdict"] for one in done.json["tensors"]} == {"SAME_BYTES"}
    name = next(name for name in held[0] if name.endswith("w13_weight_scale_2"))
    for one in held:
        one[name][1, 1] *= 2
    done = aprfmt("diff", packed[0], save(tmp_path / "t", held), "--json")
    assert done.code == 1, (done.code, done.out[-900:], done.err[-900:])
    apart = [one["key"] for one in done.json["tensors"] if one["verdict"] != "SAME_BYTES"]
    assert (done.code, apart) == (1, ["L0.ffn_up_exps.weight"])


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of models whose queries, keys and values are published as one matrix."""
    above = tmp_path_factory.mktemp("joined")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    save_tiny("phi3", above / "base", "bfloat16", **sizes)
    for name in ("MODELOPT-NVFP4", "COMPRESSED-NVFP4"):
        done = aprfmt("quantize", above / "base", above / name, "--type", name)
        assert done.code == 0, done.err
    return above


# Which slots of the factor are what: published (1), never loaded (0), another number (2).
@pytest.mark.parametrize(
    ("slots", "code"),
    [((1, 1, 1), 0), ((1, 0, 0), 0), ((0, 1, 1), 0), ((1, 1, 2), 1), ((0, 0, 0), 2)],
)
@pytest.mark.parametrize("kind", ["MODELOPT-NVFP4", "COMPRESSED-NVFP4"])
def test_a_joined_matrix_has_a_slot_of_the_factor_for_each_part(
    kind: str, slots: tuple[int, ...], code: int, joined: Path, tmp_path: Path
) -> None:
    """Seen red: "part '.weight_scale_2' has shape [3], expected [1]", exit code 2."""
    held = published(joined / kind)
    for name in [one for one in held if one.endswith(("weight_scale_2", "weight_global_scale"))]:
        count = 3 if "qkv" in name else 2 if "gate_up" in name else 0
        if count:
            every = torch.tensor([torch.finfo(torch.float32).min, float(held[name]), 7.5])
            held[name] = every[list(slots[:count])]
    done = aprfmt("diff", joined / kind, save(tmp_path / "s", [held]), "--json")
    assert done.code == code, done.out[:2000]
    apart = {one["key"] for one in done.json["tensors"] if one["verdict"] != "SAME_BYTES"}
    if code and slots[0]:
        assert apart == {f"L0.attn_{one}.weight" for one in "qkv"}
        assert "part 3 has other values" in done.out + done.err


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_is_diagnosed_as_it_is_compared(ranks: int, tmp_path: Path) -> None:
    """Seen red: a bug without a cause, of a state with all that was published; ranks as a trace."""
    held = states("llama", ranks)
    path = save(tmp_path / "s", held)
    told = aprfmt("diagnose", tiny_folder("llama"), path, "--json").json
    assert (told["verdict"], told["exit"]) == ("same", 0)
    held[0][Q] = held[0][Q].flip(0)
    path = save(tmp_path / "t", held)
    told = aprfmt("diagnose", tiny_folder("llama"), path, "--json").json
    assert (told["verdict"], told["exit"]) == ("bug", 1)
    assert {name for row in told["causes"] for name in row["where"]} >= {"L1.attn_q.weight"}


@pytest.mark.parametrize("form", ["ranks", "one file"])
def test_a_stale_head_of_a_state_is_no_key_to_set(form: str, tmp_path: Path) -> None:
    """Seen red: `set STATE tie_word_embeddings=false`, which cannot run and keeps the fault."""
    folder = tiny_folder("llama", tie_word_embeddings=True)
    held = published(folder)
    assert "lm_head.weight" not in held
    table = held["model.embed_tokens.weight"]
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(1))
    held["lm_head.weight"] = (table + 0.02 * table.std() * noise).to(table.dtype)
    path = tmp_path / "s"
    path.mkdir()
    file = path / ("state.pt" if form == "one file" else "tp_rank_0.pt")
    path = file if form == "one file" else path
    torch.save(held, file)
    told = aprfmt("diff", folder, path, "--json").json
    (cause,) = told["causes"]
    assert (cause["cause"], cause["level"]) == ("tied_embedding", "confirmed")
    assert "B's head is stale" in cause["says"] and cause["remedy"] is None
    assert not any(f" {path} " in one and " set " in one for one in told["next"])
    torch.save(held | {"lm_head.weight": table.clone()}, file)
    assert aprfmt("diff", folder, path).code == 0


def test_axes_that_an_engine_flattens_are_layout(tmp_path: Path) -> None:
    """Seen red: SHAPE_DIFFERS for a patch embedding as a matrix, whatever its values are."""
    from safetensors.torch import save_file

    shapes = {  # (published, on a rank)
        "visual.conv3d.weight": ((16, 3, 2, 4, 4), (16, 96)),
        "visual.conv2d.weight": ((16, 3, 4, 4), (16, 48)),
        "visual.linear.weight": ((16, 48), (16, 3, 4, 4)),
        "mixer.taps.weight": ((16, 1, 4), (16, 4)),
        "mixer.short.weight": ((16, 4), (16, 1, 4)),
        "visual.row.bias": ((16,), (1, 16)),
        "visual.other.weight": ((16, 48), (48, 16)),
        "visual.drawn.weight": ((32, 3, 4, 4), (32, 48)),
    }
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("llama"), folder)
    given = published(folder)
    for name, (shape, _) in shapes.items():
        given[name] = torch.randn(shape, generator=torch.Generator().manual_seed(len(given)))
    save_file(given, folder / "model.safetensors", {"format": "pt"})
    held = given | {name: given[name].reshape(flat) for name, (_, flat) in shapes.items()}
    torch.manual_seed(3)
    held["visual.drawn.weight"] = torch.nn.Linear(48, 32).weight.detach()
    path = save(tmp_path / "s", [held])
    told = aprfmt("diff", folder, path, "--json").json
    assert any("(1/sqrt(48), as torch.nn.Linear)" in one["says"] for one in told["causes"])
    rows = told["tensors"]
    apart = {row["name_a"]: row["verdict"] for row in rows if row["verdict"] != "SAME_BYTES"}
    assert apart == {"visual.other.weight": "SHAPE_DIFFERS", "visual.drawn.weight": "DIFFERENT"}


def test_a_state_with_a_tensor_rounded_to_bf16_is_precision(tmp_path: Path) -> None:
    """Seen red: "no cause of the table fits", and `diff` did not name the tensor."""
    held = states("llama", 1)
    name = "model.layers.1.input_layernorm.weight"
    held[0][name] = held[0][name].bfloat16()
    path = save(tmp_path / "s", held)
    told = aprfmt("diagnose", tiny_folder("llama"), path, "--json").json
    assert (told["verdict"], told["exit"]) == ("precision", 0)
    assert [row["cause"] for row in told["causes"]] == ["rounding"]
    assert "one step of BF16, F32 | BF16" in aprfmt("diff", tiny_folder("llama"), path).out


def both(name: str, change: Callable[[Any], Any]) -> Callable[[list[State]], None]:
    """Return what changes a tensor on every rank."""

    def apply(held: list[State]) -> None:
        for state in held:
            state[name] = change(state[name])

    return apply


def exchanged(name: str) -> Callable[[list[State]], None]:
    """Return what gives each of two ranks the other's share."""

    def apply(held: list[State]) -> None:
        held[0][name], held[1][name] = held[1][name], held[0][name]

    return apply


def on_second(name: str, change: Callable[[Any], Any]) -> Callable[[list[State]], None]:
    """Return what changes a tensor on the second rank alone."""

    def apply(held: list[State]) -> None:
        held[1][name] = change(held[1][name])

    return apply


def without(name: str) -> Callable[[list[State]], None]:
    """Return what removes a tensor."""

    def apply(held: list[State]) -> None:
        for state in held:
            del state[name]

    return apply


def old_layer(held: list[State]) -> None:
    """Leave layer 0's q, k and v in layer 1."""
    for state in held:
        state[Q] = state[Q.replace("1", "0")]


def key_first(x: Any) -> Any:
    """Return the rows of k, q and v: half of them are those of q."""
    size = len(x) // 4
    return torch.cat([x[2 * size : 3 * size], x[: 2 * size], x[3 * size :]])


def random(x: Any) -> Any:
    """Return other numbers, as of initialisation."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(x.shape, generator=generator) * x.std()


def turned(x: Any) -> Any:
    """Return up before gate."""
    return torch.cat(x.chunk(2)[::-1])


def even_shares(name: str) -> Callable[[list[State]], None]:
    """Return what divides q, k and v evenly as one matrix; their rows are 2 : 1 : 1."""

    def apply(held: list[State]) -> None:
        parts = [state[name].split([len(state[name]) // 4] * 4) for state in held]
        q = [torch.cat(one[:2]) for one in parts]
        whole = torch.cat([*q, *(one[2] for one in parts), *(one[3] for one in parts)])
        for state, share in zip(held, whole.chunk(len(held)), strict=True):
            state[name] = share.clone()

    return apply


def even_halves(held: list[State]) -> None:
    """Divide gate and up evenly as one matrix: two parts, and as many ranks."""
    parts = [state[GATE].chunk(2) for state in held]
    for state, one in zip(held, zip(*parts, strict=True), strict=True):
        state[GATE] = torch.cat(one)


def alternating(x: Any) -> Any:
    """Return the rows of gate and up in turn."""
    return torch.stack(x.chunk(2), 1).reshape(x.shape)


WRONG: dict[str, tuple[Callable[[list[State]], None], str, str]] = {
    # what an engine holds -> how, the cause, one of the places
    "shares of q, k and v": (exchanged(Q), "shard_order", "q_proj"),
    "even shares of all three": (even_shares(Q), "shard_order", "k_proj"),
    "even shares of gate and up": (even_halves, "shard_order", "up_proj"),
    "gate and up in turn": (both(GATE, alternating), "fused_order", "gate_proj"),
    "shares of o": (exchanged(OUT), "shard_order", "o_proj"),
    "never filled": (both(GATE, torch.zeros_like), "stale_tensor", "gate_proj"),
    "not a number": (both(OUT, lambda x: x * float("nan")), "nonfinite", "o_proj"),
    "random": (both(GATE, random), "stale_tensor", "up_proj"),
    "gate for up": (both(GATE, lambda x: torch.cat(x.chunk(2)[::-1])), "fused_order", "up_proj"),
    "k before q": (both(Q, key_first), "fused_order", "q_proj"),
    "a norm of one rank": (on_second(NORM, lambda x: x * 2), "scale", "input_layernorm"),
    "a rank's share of o, times": (on_second(OUT, lambda x: x * 0.37), "scale", "o_proj"),
    "a rank's share of qkv, times": (on_second(Q, lambda x: x * 2), "scale", "k_proj"),
    "an old layer": (old_layer, "layer_order", "k_proj"),
    "not there": (without(OUT), "", "o_proj"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_was_not_loaded_is_named(fault: str, tmp_path: Path) -> None:
    change, cause, where = WRONG[fault]
    held = states("llama", 2)
    change(held)
    done = aprfmt("diff", tiny_folder("llama"), save(tmp_path / "s", held), "--json")
    assert done.code == 1
    wrong = [one for one in done.json["tensors"] if not one["verdict"].startswith("SAME")]
    assert any(where in (one["name_a"] or "") for one in wrong), wrong
    assert len(wrong) <= 3
    if cause:
        assert [one["cause"] for one in done.json["causes"]] == [cause]
    if cause == "scale":  # of one rank: not of rows or columns of a weight
        assert "of 2 ranks' parts rank 1's is " in done.json["causes"][0]["says"]
    for said in done.json["next"]:  # seen red: `diagnose`, which takes no such state
        assert aprfmt(*shlex.split(said)[1:]).code == 1, said
    assert not cause or [one["remedy"] for one in done.json["causes"]] == [None]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_order_of_unequal_matrices_is_said_as_the_engine_has_it(
    ranks: int, tmp_path: Path
) -> None:
    """Not as an order of the rows that are put together of all ranks."""
    held = states("llama", ranks)
    both(Q, key_first)(held)
    done = aprfmt("diff", tiny_folder("llama"), save(tmp_path / "s", held), "--json")
    (cause,) = done.json["causes"]
    assert cause["level"] == "confirmed"
    assert "k, q, v are joined in this order, where an engine has q, k, v" in cause["says"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_by_key_head_are_said_of_each_ranks_part(ranks: int, tmp_path: Path) -> None:
    """Seen red: "blocks of 8 rows in another order, by numbers of A: 0, 1, 8, ...", of 2 ranks."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "hidden_size": 64}
    base = tiny_folder("llama", "float32", **sizes)
    given = published(base)
    held = [of_rank(given, rank, ranks, 8, False) for rank in range(ranks)]
    groups = 4 // ranks
    for state in held:
        q, k, v = state[Q].split([16 * groups, 8 * groups, 8 * groups])
        cut = [part.reshape(groups, -1, part.shape[1]) for part in (q, k, v)]
        state[Q] = torch.cat(cut, 1).reshape(state[Q].shape)
    done = aprfmt("diff", base, save(tmp_path / "s", held), "--json")
    (cause,) = done.json["causes"]
    assert (cause["cause"], cause["level"]) == ("fused_order", "confirmed")
    each = " of each rank" if ranks > 1 else ""
    said = f"[q k v]{each}: all q, then all k, then all v in A became [q k v] per KV group in B"
    assert said in cause["says"]


def test_a_key_head_that_ranks_share_and_hold_unlike(tmp_path: Path) -> None:
    """Four ranks share two key heads; the second copy of the first is another."""
    held = states("llama", 4)
    held[1][Q] = held[1][Q].clone()
    held[1][Q][16:32] *= 1.5
    done = aprfmt("diff", tiny_folder("llama"), save(tmp_path / "s", held), "--json")
    assert done.code == 1
    wrong = [one["name_a"] for one in done.json["tensors"] if one["verdict"] == "DIFFERENT"]
    assert wrong == ["model.layers.1.self_attn.k_proj.weight"]


def test_an_expert_on_the_wrong_rank(tmp_path: Path) -> None:
    held = states("mixtral", 2, True)
    for name in [
        key
        for key in held[0]
        if (key.startswith("model.layers.1.") and "w13" in key)
        or (key.startswith("model.layers.1.") and "w2_" in key)
    ]:
        exchanged(name)(held)
    done = aprfmt("diff", tiny_folder("mixtral"), save(tmp_path / "s", held), "--json")
    assert done.code == 1
    cause = done.json["causes"][0]
    assert len(done.json["causes"]) == 1 and cause["cause"] == "expert_order"
    assert "experts stand on other ranks: those of ranks 0 and 1 are exchanged" in cause["says"]
    assert "layers.1" in str(cause["where"])


def test_parameters_that_an_engine_packed_away_are_not_compared(tmp_path: Path) -> None:
    """As vLLM on a CPU leaves them: no numbers, and scales of attention that nothing set."""
    held = states("llama", 1)
    for name in list(held[0]):
        if name.endswith("qkv_proj.weight"):
            held[0][name] = torch.empty(0)
            for scale in ("k", "v", "q", "prob"):
                above = name.removesuffix("qkv_proj.weight")
                held[0][f"{above}attn._{scale}_scale"] = torch.tensor(1.0)
    done = aprfmt("diff", tiny_folder("llama"), save(tmp_path / "s", held), "--json")
    assert done.code == 2
    assert "parameters hold no numbers, as the engine packed them" in done.err
    verdicts = [one["verdict"] for one in done.json["tensors"]]
    assert set(verdicts) == {"SAME_BYTES", "UNREADABLE"}
    assert verdicts.count("UNREADABLE") == 3 * sum("qkv_proj" in name for name in held[0])
    # A difference of what is there is found all the same, and a scale that was set is listed.
    held[0][NORM] = held[0][NORM] * 2
    held[0]["model.layers.1.self_attn.attn._k_scale"] = torch.tensor(0.5)
    done = aprfmt("diff", tiny_folder("llama"), save(tmp_path / "t", held), "--json")
    assert done.code == 1
    found = [one["name_b"] for one in done.json["tensors"] if one["verdict"] == "ONLY_IN_B"]
    assert found == ["model.layers.1.self_attn.attn._k_scale"]


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("zeroed", [False, True])
def test_codes_beside_the_scale_of_a_joined_matrix_are_not_accused(
    zeroed: bool, transposed: bool, tmp_path: Path
) -> None:
    """No config.json says that the state is FP8, as an engine's `state_dict()` has none.

    Seen red: "B's scales are wrong: they are ignored", confirmed, and `--drop` of the scales.
    """
    (state,) = states("llama", 1)
    for name in [one for one in state if one.endswith("_proj.weight")]:
        values = state[name].float()
        scale = values.abs().max() / 448
        codes = (values / scale).to(torch.float8_e4m3fn)
        state[name] = codes.t().contiguous() if transposed else codes
        state[name.replace(".weight", ".weight_scale")] = scale
    if zeroed:
        state[NORM] = state[NORM] * 0
    path = save(tmp_path / "s", [state])
    told = aprfmt("diagnose", tiny_folder("llama"), path, "--json").json
    assert [one["where"] for one in told["causes"]] == [["L1.attn_norm.weight"]] * zeroed, told[
        "causes"
    ]
    assert told["exit"] == (1 if zeroed else 2)
    said = aprfmt("diagnose", tiny_folder("llama"), path).out
    assert "get the config.json that belongs to them" in said and "--drop" not in said


def doubled(name: str) -> Callable[[list[State]], None]:
    """Return what gives the second rank the first one's share."""

    def apply(held: list[State]) -> None:
        held[1][name] = held[0][name].clone()

    return apply


def doubled_expert(held: list[State]) -> None:
    """Leave the second rank's first expert in its second place."""
    for end in ("w13_weight", "w2_weight"):
        name = next(key for key in held[1] if key.startswith("model.layers.1.") and end in key)
        held[1][name][1] = held[1][name][0]


def other_key_head(held: list[State]) -> None:
    """Share key heads by rank modulo heads: 0, 1, 0, 1 where 0, 0, 1, 1 is right."""
    held[1][Q], held[2][Q] = held[1][Q].clone(), held[2][Q].clone()
    size = held[1][Q].shape[0] - 32
    one, two = held[1][Q][size:].clone(), held[2][Q][size:].clone()
    held[1][Q][size:], held[2][Q][size:] = two, one


TWICE: dict[str, tuple[str, int, bool, Callable[[list[State]], None], str, str]] = {
    # what is there twice -> model, ranks, whole experts by rank, how, a place, what is said
    "a share of o": (
        "llama",
        2,
        False,
        doubled(OUT),
        "layers.1.self_attn.o_proj",
        "rank 1 has that of rank 0; that of rank 1 is nowhere",
    ),
    "a share of q, k and v": (
        "llama",
        2,
        False,
        doubled(Q),
        "layers.1.self_attn.q_proj",
        "rank 1 has that of rank 0; that of rank 1 is nowhere",
    ),
    "an expert": (
        "mixtral",
        2,
        True,
        doubled_expert,
        "layers.1.",
        "expert 4 is expert 3; expert 4 is nowhere",
    ),
    "key heads on other ranks": (
        "llama",
        4,
        False,
        other_key_head,
        "layers.1.self_attn.k_proj",
        "ranks share other heads of k and v than theirs: those of ranks 1 and 2 are exchanged",
    ),
}


@pytest.mark.parametrize("fault", TWICE)
def test_what_is_there_twice_is_placed(fault: str, tmp_path: Path) -> None:
    """It differs in the layer it is in and nowhere else; what is said of it holds for all of it."""
    arch, ranks, experts, change, where, said = TWICE[fault]
    held = states(arch, ranks, experts)
    change(held)
    done = aprfmt("diff", tiny_folder(arch), save(tmp_path / "s", held), "--json")
    assert done.code == 1
    wrong = [one["name_a"] for one in done.json["tensors"] if one["verdict"] == "DIFFERENT"]
    assert any(where in name for name in wrong) and all("layers.1." in name for name in wrong)
    if fault.startswith("a share"):
        assert "ranks 0, 1 hold the same share of it" in done.err
    assert [said in one["says"] for one in done.json["causes"]] == [True]
    assert done.json["causes"][0]["level"] == "confirmed"


# Files beside tp_rank_0 and tp_rank_1 -> (name, the rank whose state it holds), what is said.
BESIDE: dict[str, tuple[tuple[str, int], str]] = {
    "a rank by another word": (("other_rank_0.pt", 0), "count ranks by rank and tp"),
    "another rank's by another word": (("rank_1.pt", 1), "count ranks by rank and tp"),
    "an older copy": (("old_tp_rank_1.pt", 1), "of tp rank 1 is there twice: old_tp_rank_1.pt and"),
    "a number with a zero": (("tp_rank_01.pt", 1), "tp rank 1 is there twice: tp_rank_01.pt and"),
    "more of its axes": (("tp_rank_0_pp_rank_0.pt", 0), "count ranks by"),
    "in a folder": (("backup/tp_rank_1.pt", 1), "of tp rank 1 is there twice: backup/"),
}


@pytest.mark.parametrize("kind", BESIDE)
def test_a_rank_that_is_there_twice_is_refused(kind: str, tmp_path: Path) -> None:
    """Its bytes are equal, and nothing says which of the two was loaded."""
    (name, rank), said = BESIDE[kind]
    held = states("llama", 2)
    path = save(tmp_path / "s", held)
    (path / name).parent.mkdir(exist_ok=True)
    torch.save(held[rank], path / name)
    done = aprfmt("diff", tiny_folder("llama"), path)
    assert done.code == 2 and said in done.err, done.err


@pytest.mark.parametrize("name", ["s/tp_rank_0.pt", "s/model_rank_0.pt", "state.pt", "state.pth"])
@pytest.mark.parametrize("whole", [True, False])
def test_one_ranks_state_of_published_names_is_a_state(
    name: str, whole: bool, tmp_path: Path
) -> None:
    """It has no tokenizer and no configuration, and is not held to these; its tensors are."""
    held = {one: tensor.clone() for one, tensor in published(tiny_folder("llama")).items()}
    held["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    if not whole:
        held[OUT] += 1
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    torch.save(held, path)
    state = path.parent if name.startswith("s/") else path
    done = aprfmt("diff", tiny_folder("llama"), state, "--json")
    assert done.code == (0 if whole else 1), (done.out, done.err)
    wrong = [one["name_a"] for one in done.json["tensors"] if one["verdict"] != "SAME_BYTES"]
    assert wrong == ([] if whole else [OUT])


@pytest.mark.parametrize("whole", [True, False])
def test_decoded_weights_of_one_rank_are_no_trace(whole: bool, tmp_path: Path) -> None:
    """Seen red: the parts of packed weights were counted, and the state was taken for a trace."""
    llama_folder(tmp_path / "src", "BF16", hidden=64, layers=2, ffn=96, heads=4, kv_heads=2)
    convert(tmp_path / "src", tmp_path / "nf4", encoding="NF4")
    with open_model(tmp_path / "nf4") as model:
        held = {name: torch.from_numpy(view.numpy().copy()) for name, view in model.items()}
    assert len(held) < len(tensors_of(tmp_path / "nf4")) / 2
    if not whole:
        held["model.layers.1.self_attn.o_proj.weight"] *= 3
    (tmp_path / "s").mkdir()
    torch.save(held, tmp_path / "s" / "tp_rank_0.pt")
    told = aprfmt("diagnose", tmp_path / "nf4", tmp_path / "s", "--json")
    assert told.code == (0 if whole else 1), (told.out, told.err)
    assert [one["where"] for one in told.json["findings"]] == [["L1.attn_output.weight"]] * (
        not whole
    )


ALONE: dict[str, tuple[str, ...]] = {
    "by torch.save": ("state.pt",),
    "by torch.save, of another name": ("weights.ckpt",),
    "as Hugging Face names it": ("model.safetensors",),
    "as it was named": ("pytorch_model.bin",),
    "in shards": ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    "in shards with an index": (
        "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin",
    ),
}  # fmt: skip


def written_alone(folder: Path, files: tuple[str, ...], held: State, *, index: bool = True) -> Path:
    """Write a state without a rank in a name, each file with a share of the tensors.

    `index`: parts named `-00001-of-00002` get an index.
    """
    from safetensors.torch import save_file

    folder.mkdir()
    shares = {
        name: {key: held[key].clone() for key in list(held)[at :: len(files)]}
        for at, name in enumerate(files)
    }
    for name, share in shares.items():
        store = save_file if name.endswith(".safetensors") else torch.save
        store(share, folder / name)
    if index and "-of-" in files[0]:
        kind = "model.safetensors" if files[0].endswith(".safetensors") else "pytorch_model.bin"
        places = {key: name for name, share in shares.items() for key in share}
        (folder / f"{kind}.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize("form", ALONE)
def test_the_only_state_of_a_folder_is_read_as_by_its_own_path(form: str, tmp_path: Path) -> None:
    """Seen red: a sound state had joined tensors confirmed, or rows moved behind a padded head."""
    (held,) = states("llama", 1)
    path = written_alone(tmp_path / "s", ALONE[form], held)
    torch.save({"lr": 0.1}, path / "optimizer.pt")
    done = aprfmt("diff", tiny_folder("llama"), path, "--json")
    assert (done.code, done.json["causes"]) == (0, []), done.out[:2000]
    assert {one["verdict"] for one in done.json["tensors"]} == {"SAME_BYTES"}
    told = aprfmt("diagnose", tiny_folder("llama"), path, "--json").json
    assert (told["verdict"], told["exit"]) == ("same", 0)
    held[Q] = held[Q].flip(0)
    done = aprfmt("diff", tiny_folder("llama"), written_alone(tmp_path / "t", ALONE[form], held))
    assert done.code == 1 and "L1.attn_q" in done.out


def test_a_folder_of_published_names_or_of_outputs_is_no_state(tmp_path: Path) -> None:
    """Names that no engine joined are a model's; outputs of joined modules are a trace."""
    given = published(tiny_folder("llama"))
    assert not is_engine_state(written_alone(tmp_path / "p", ("model.safetensors",), given))
    outputs = {name.removesuffix(".weight"): torch.rand(1, 3, 8) for name in states("llama", 1)[0]}
    dump = written_alone(tmp_path / "d", ("Pass0.pt",), outputs)
    told = aprfmt("diagnose", tiny_folder("llama"), dump, "--json").json
    assert told["exit"] == 2 and "17 arrays are one rank's share" in told["error"]["message"]


PARTS: dict[str, tuple[str, ...]] = {
    "numbered": ("state_0.pt", "state_1.pt", "state_2.pt"),
    "by layer": tuple(f"layer_{number:02d}.ckpt" for number in range(4)),
    "as Hugging Face names them": (
        "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin",
    ),
    "in another format": ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("joined", [True, False], ids=["an engine's names", "published names"])
@pytest.mark.parametrize("form", PARTS)
def test_a_state_in_several_files_is_one(form: str, joined: bool, tmp_path: Path) -> None:
    """Seen red: "holds several files of torch.save; name one", or half of the tensors missing."""
    held = states("llama", 1)[0] if joined else published(tiny_folder("llama"))
    path = written_alone(tmp_path / "s", PARTS[form], held, index=False)
    torch.save({"lr": 0.1}, path / "optimizer.pt")
    done = aprfmt("diff", tiny_folder("llama"), path, "--json")
    assert (done.code, done.json["causes"]) == (0, []), done.out[:2000]
    assert {one["verdict"] for one in done.json["tensors"]} == {"SAME_BYTES"}
    assert any(one.endswith("optimizer.pt: not read") for one in done.json["notes"])
    told = aprfmt("diagnose", tiny_folder("llama"), path, "--json").json
    assert (told["verdict"], told["exit"]) == ("same", 0)
    held[OUT] = held[OUT].roll(1, 0)
    other = written_alone(tmp_path / "t", PARTS[form], held, index=False)
    done = aprfmt("diff", tiny_folder("llama"), other, "--json")
    assert done.code == 1
    assert [one["name_a"] for one in done.json["tensors"] if one["verdict"] == "DIFFERENT"] == [OUT]


@pytest.mark.parametrize("name", [OUT, NORM])
def test_a_name_in_two_files_of_a_state_has_one_value(name: str, tmp_path: Path) -> None:
    """The same values twice are one tensor; other values are two states, or two ranks."""
    (held,) = states("llama", 1)
    path = written_alone(tmp_path / "s", ("a.pt", "b.pt"), held, index=False)
    again = {name: held[name].clone()}
    torch.save(again, path / "c.pt")
    assert aprfmt("diff", tiny_folder("llama"), path).code == 0
    torch.save({name: held[name] + 1}, path / "c.pt")
    for command in ("diff", "diagnose"):
        done = aprfmt(command, tiny_folder("llama"), path)
        assert done.code == 2, done.out
    done = aprfmt("diff", tiny_folder("llama"), path)
    assert f"'{name}' is in " in done.err and "c.pt, with other values" in done.err


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_part_of_a_rank_is_refused(rank: int, lost: int, tmp_path: Path) -> None:
    """Seen red: rows were said to be other tensors' rows, confirmed, where a file was missing."""
    for number, held in enumerate(states("llama", 2)):
        names = tuple(f"model-rank-{number}-part-{part}.safetensors" for part in range(3))
        for file in written_alone(tmp_path / f"r{number}", names, held, index=False).iterdir():
            (tmp_path / "s").mkdir(exist_ok=True)
            file.rename(tmp_path / "s" / file.name)
    done = aprfmt("diff", tiny_folder("llama"), tmp_path / "s")
    assert (done.code, "equal, 30 tensors" in done.out) == (0, True), done.out
    (tmp_path / "s" / f"model-rank-{rank}-part-{lost}.safetensors").unlink()
    done = aprfmt("diff", tiny_folder("llama"), tmp_path / "s")
    assert done.code == 2, done.out
    assert f"rank {rank} lacks 7 tensors that another rank has" in done.err


WRAPPERS: dict[str, Callable[[State], Any]] = {
    "compiled": lambda held: {"state_dict": {f"_orig_mod.{key}": held[key] for key in held}},
    "sharded": lambda held: {f"_fsdp_wrapped_module.{key}": held[key] for key in held},
    "of an actor": lambda held: {f"actor.module.{key}": held[key] for key in held},
    "as pairs": lambda held: list(held.items()),
}


@pytest.mark.parametrize("form", WRAPPERS)
def test_published_names_behind_a_wrapper_are_a_state(form: str, tmp_path: Path) -> None:
    """In one file the prefix is said, as no loader takes it off; in several it is taken off."""
    held = published(tiny_folder("llama"))
    torch.save(WRAPPERS[form](held), tmp_path / "s.pt")
    done = aprfmt("diff", tiny_folder("llama"), tmp_path / "s.pt", "--json")
    said = [] if form == "as pairs" else ["tensor_names"]
    assert [one["cause"] for one in done.json["causes"]] == said, done.out[:2000]
    assert done.code == len(said)
    held[OUT] = held[OUT] + 1
    torch.save(WRAPPERS[form](held), tmp_path / "s.pt")
    done = aprfmt("diff", tiny_folder("llama"), tmp_path / "s.pt", "--json")
    assert [one["name_a"] for one in done.json["tensors"] if one["verdict"] == "DIFFERENT"] == [OUT]


@pytest.mark.parametrize("joined", [True, False])
def test_a_file_for_each_parameter_is_a_state(joined: bool, tmp_path: Path) -> None:
    """A tensor that is saved alone has the name of its file; outputs saved so are no state."""
    held = states("llama", 1)[0] if joined else published(tiny_folder("llama"))
    (tmp_path / "s").mkdir()
    (tmp_path / "d").mkdir()
    for name, tensor in held.items():
        torch.save(tensor.clone(), tmp_path / "s" / f"{name}.pt")
        output = torch.rand(1, 3, 8)
        torch.save(output, tmp_path / "d" / f"{name.removesuffix('.weight')}.pt")
    done = aprfmt("diff", tiny_folder("llama"), tmp_path / "s", "--json")
    assert (done.code, done.json["causes"]) == (0, []), done.out[:2000]
    assert not is_engine_state(tmp_path / "d")


@pytest.mark.parametrize("first", [1, 0])
def test_a_missing_part_of_a_state_is_refused(first: int, tmp_path: Path) -> None:
    names = tuple(f"state-{number:05d}-of-00003.pt" for number in range(first, first + 3))
    path = written_alone(tmp_path / "s", names, states("llama", 1)[0], index=False)
    assert aprfmt("diff", tiny_folder("llama"), path).code == 0
    (path / names[1]).unlink()
    done = aprfmt("diff", tiny_folder("llama"), path)
    said = f"of the 3 parts of 'state' {first + 1} is missing; get all of them"
    assert done.code == 2 and said in done.err


def test_passes_and_other_models_are_no_parts_of_a_state(tmp_path: Path) -> None:
    """Files of passes are a dump; a folder with a configuration or an index is a model."""
    outputs = {name.removesuffix(".weight"): torch.rand(1, 3, 8) for name in states("llama", 1)[0]}
    for number in range(2):
        (tmp_path / "d").mkdir(exist_ok=True)
        torch.save(outputs, tmp_path / "d" / f"Pass{number:05d}.pt")
    assert not is_engine_state(tmp_path / "d")
    given = published(tiny_folder("llama"))
    two = written_alone(tmp_path / "p", ("a.pt", "b.pt"), given)
    assert not is_engine_state(two)
    named = {name.replace("weight", "grad"): tensor for name, tensor in given.items()}
    other = written_alone(tmp_path / "o", ("a.pt", "b.pt"), named)
    with open_model(tiny_folder("llama")) as model:
        assert is_saved_state(two, model)
        assert not is_saved_state(other, model)
        (two / "config.json").write_text((tiny_folder("llama") / "config.json").read_text())
        assert not is_saved_state(two, model)


def _up_first(x: Any) -> Any:
    """Return a rank's stack [experts, 2 * rows, columns] with up before gate."""
    return torch.cat(x.chunk(2, 1)[::-1], 1).contiguous()


def _turned(x: Any) -> Any:
    return x.transpose(-1, -2).contiguous()


def _is_dense(name: str, x: Any) -> bool:
    return ".layers." in name and x.ndim == 2


LAID_OUT: dict[str, tuple[str, Callable[[str, Any], bool], Callable[[Any], Any], str]] = {
    # what an engine's kernels want -> a model, the parameters, how they are laid out, what is said
    "up before gate": (
        "mixtral", lambda name, x: name.endswith("w13_weight"), _up_first,
        "3 stacks of experts hold up before gate: right for FlashInfer's kernels",
    ),
    "experts by columns": (
        "mixtral", lambda name, x: x.ndim == 3, _turned, "stacks of experts hold each expert's",
    ),
    "matrices by columns": (
        "llama", _is_dense, _turned, "matrices hold rows and columns exchanged, [in, out]",
    ),
}  # fmt: skip


def laid_out(kind: str, ranks: int, only: Sequence[str] = ("",)) -> list[State]:
    """Return the ranks' states in an engine's layout, where one of `only` is in the name."""
    arch, chosen, change, _ = LAID_OUT[kind]
    return [
        {
            name: change(x) if chosen(name, x) and any(one in name for one in only) else x
            for name, x in held.items()
        }
        for held in states(arch, ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", LAID_OUT)
def test_a_layout_of_all_matrices_is_the_engines(kind: str, ranks: int, tmp_path: Path) -> None:
    """Seen red: fused_order, transpose, or shapes that differ, of a state as kernels want it."""
    arch, *_, says = LAID_OUT[kind]
    path = save(tmp_path / "s", laid_out(kind, ranks))
    done = aprfmt("diff", tiny_folder(arch), path, "--json")
    assert (done.code, done.json["causes"]) == (0, []), done.out[:2000]
    assert {one["verdict"] for one in done.json["tensors"]} == {"SAME_BYTES"}
    assert says in done.err, done.err
    plain = aprfmt("diff", tiny_folder(arch), save(tmp_path / "t", states(arch, ranks)))
    assert plain.code == 0 and says not in plain.err


@pytest.mark.parametrize("kind", LAID_OUT)
def test_a_layout_of_some_matrices_is_a_fault(kind: str, tmp_path: Path) -> None:
    assert_layers_are_faults(kind, (1,), tmp_path)


def test_a_layout_of_most_matrices_is_a_fault(tmp_path: Path) -> None:
    """One that stands as published says that the engine wants that. Seen red without the rule."""
    assert_layers_are_faults("matrices by columns", (1, 2), tmp_path)


def assert_layers_are_faults(kind: str, layers: Sequence[int], folder: Path) -> None:
    """Assert that `diff` names just these layers, where theirs alone stand as kernels want it."""
    arch, *_, says = LAID_OUT[kind]
    path = save(folder / "s", laid_out(kind, 1, [f".layers.{n}." for n in layers]))
    done = aprfmt("diff", tiny_folder(arch), path, "--json")
    assert done.code == 1 and says not in done.err
    apart = {one["key"] for one in done.json["tensors"] if one["verdict"] != "SAME_BYTES"}
    assert apart and {key.partition(".")[0] for key in apart} == {f"L{n}" for n in layers}


@pytest.mark.parametrize("kind", LAID_OUT)
def test_another_value_in_an_engines_layout_is_the_only_difference(
    kind: str, tmp_path: Path
) -> None:
    """Seen red: one stale matrix made a fault of the layout of all."""
    arch, chosen, *_, says = LAID_OUT[kind]
    held = laid_out(kind, 1)
    name = next(name for name, x in held[0].items() if ".2." in name and chosen(name, x))
    held[0][name][..., 0] += 1
    done = aprfmt("diff", tiny_folder(arch), save(tmp_path / "s", held), "--json")
    apart = {one["key"] for one in done.json["tensors"] if one["verdict"] != "SAME_BYTES"}
    assert done.code == 1 and says in done.err
    assert apart and {key.partition(".")[0] for key in apart} == {"L2"}


def test_ranks_of_two_axes_are_one_run(tmp_path: Path) -> None:
    """Processes that hold one tensor-parallel rank hold the same: else it is another run's."""
    held, path = states("llama", 2), tmp_path / "s"
    path.mkdir()
    for rank in range(4):
        torch.save(held[rank % 2], path / f"TP{rank % 2}_Rank{rank}.pt")
    assert aprfmt("diff", tiny_folder("llama"), path).code == 0
    torch.save({**held[1], OUT: held[1][OUT] + 1}, path / "TP1_Rank3.pt")
    done = aprfmt("diff", tiny_folder("llama"), path)
    assert done.code == 2 and f"{OUT!r} of tp rank 1 is there twice" in done.err
    assert "with other values" in done.err


def test_files_without_a_rank_are_said(tmp_path: Path) -> None:
    path = save(tmp_path / "s", states("llama", 2))
    torch.save({"lr": 0.1, "step": torch.tensor(3)}, path / "optimizer.pt")
    done = aprfmt("diff", tiny_folder("llama"), path)
    assert done.code == 0 and "optimizer.pt: not read, no rank in the name" in done.err


def test_a_missing_rank_and_foreign_names_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "s", states("llama", 4))
    (path / "tp_rank_1.pt").unlink()
    done = aprfmt("diff", tiny_folder("llama"), path)
    assert (
        done.code == 2 and "tp rank 1 is missing; there are 0, 2, 3, and perhaps more" in done.err
    )
    odd = save(tmp_path / "t", [{"a.qkv_proj.weight": torch.ones(3, 2)}])
    done = aprfmt("diff", tiny_folder("llama"), odd)
    assert done.code == 2 and "none of its 1 tensors is one of" in done.err
    assert "a.qkv_proj.weight [3, 2]" in done.err


@pytest.mark.parametrize(
    "arch, ranks, kept",
    [("llama", 2, 1), ("llama", 4, 1), ("llama", 4, 2), ("mixtral", 2, 1), ("qwen2", 2, 1)],
)
def test_ranks_without_the_others_are_no_model(
    arch: str, ranks: int, kept: int, tmp_path: Path
) -> None:
    """Names that count fewer ranks than there were are no cause of anything."""
    path = save(tmp_path / "s", states(arch, ranks)[-kept:])
    done = aprfmt("diff", tiny_folder(arch), path)
    assert done.code == 2 and f"holds {kept} of {ranks} ranks: " in done.err, done.out


@pytest.mark.parametrize("kept", [(0,), (3,), (0, 1), (1, 3), (2, 3), (0, 2, 3)])
@pytest.mark.parametrize("odd", ["experts", "a matrix"])
def test_missing_ranks_are_no_cause_beside_a_tensor_of_no_share(
    odd: str, kept: tuple[int, ...], tmp_path: Path
) -> None:
    """Six experts on four ranks, or one matrix of another shape, fit no number of ranks."""
    held = [states("mixtral", 4, odd == "experts")[rank] for rank in kept]
    if odd == "a matrix":
        held = [{**one, OUT: one[OUT][:, :5].clone()} for one in held]
    done = aprfmt("diff", tiny_folder("mixtral"), save(tmp_path / "s", held))
    assert done.code == 2 and f"holds {len(kept)} of 4 ranks: " in done.err, (done.out, done.err)


ODD: dict[str, tuple[Callable[[list[State]], None], str]] = {
    "a rank lacks a tensor": (lambda held: held[1].pop(OUT), f"{OUT}: rank 1 of 2 does not have"),
    "a share of zeros": (lambda held: held[1][OUT].zero_(), f"{OUT}: the share of rank 1 is zeros"),
    "a share of q, k, v of zeros": (lambda held: held[0][Q].zero_(), f"{Q}: the share of rank 0"),
}


@pytest.mark.parametrize("fault", ODD)
def test_what_one_rank_did_not_load_is_said(fault: str, tmp_path: Path) -> None:
    held = states("llama", 2)
    ODD[fault][0](held)
    done = aprfmt("diff", tiny_folder("llama"), save(tmp_path / "s", held))
    assert done.code == 1 and ODD[fault][1] in done.err


def test_a_layer_that_the_model_has_not_is_listed(tmp_path: Path) -> None:
    held = states("llama", 1)
    held[0]["model.layers.3.input_layernorm.weight"] = torch.ones(48)
    done = aprfmt("diff", tiny_folder("llama"), save(tmp_path / "s", held), "--json")
    assert done.code == 1
    odd = [one["name_b"] for one in done.json["tensors"] if one["verdict"] == "ONLY_IN_B"]
    assert odd == ["model.layers.3.input_layernorm.weight"]


def script() -> Callable[[State, Path, int], tuple[list[str], list[str]]]:
    """Return the function of the how-to page, which needs torch and the standard library."""
    page = next(
        block
        for block in blocks(DOCS / "how-to" / "engine_weights.md")
        if block.title == "loaded.py"
    )
    held: dict[str, Any] = {}
    exec(compile(page.text, "loaded.py", "exec"), held)
    found: Callable[[State, Path, int], tuple[list[str], list[str]]] = held["differing"]
    return found


@pytest.mark.parametrize("arch, ranks", [("llama", 1), ("llama", 2), ("llama", 4), ("mixtral", 2)])
def test_the_script_of_the_page_agrees_by_digest(arch: str, ranks: int, tmp_path: Path) -> None:
    """Every parameter of every rank has its digest in the manifest; a changed one has not."""
    folder = tmp_path / "m"
    shutil.copytree(tiny_folder(arch), folder)
    done = aprfmt("hash", folder, "--roles", "--ranks", ranks, "--json")
    assert done.code == 0, done.err
    manifest = Path(done.json["written"])
    for rank, state in enumerate(states(arch, ranks)):
        assert script()(state, manifest, rank) == ([], [])
        changed = {**state, OUT: state[OUT] * 1.01, "rotary.cos_sin_cache": state[OUT]}
        assert script()(changed, manifest, rank) == ([OUT], ["rotary.cos_sin_cache"])
    assert aprfmt("validate", folder).code == 0


def test_a_manifest_of_roles_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_folder("llama"), folder)
    done = aprfmt("hash", folder, "--roles", "--ranks", 5)
    assert done.code == 2 and "no such number of equal shares" in done.err
    assert aprfmt("hash", folder, "--ranks", 2).code == 2
    assert aprfmt("hash", folder, "--roles").code == 0
    again = aprfmt("hash", folder, "--roles")
    assert again.code == 2 and "--force" in again.err


# Rows of keys in the layers of the tiny models that use another layer's.
SHARED = {"gemma3n": {3: 10, 4: 10, 5: 10}, "gemma4": {3: 10, 4: 10, 5: 14}}
L5 = "model.layers.5.self_attn.qkv_proj.weight"
L2 = "model.layers.2.self_attn.qkv_proj.weight"


def added(name: str, row: int) -> Callable[[State], None]:
    """Return what changes one row of a parameter."""

    def apply(held: State) -> None:
        held[name] = held[name].clone()
        held[name][row] += 1

    return apply


def emptied(name: str) -> Callable[[State], None]:
    """Return what takes a parameter away."""
    return lambda held: held.pop(name)


# Architecture, what an engine did wrong, the roles that differ.
SGLANG: list[tuple[str, Callable[[State], None] | None, set[str]]] = [
    ("gemma3n", None, set()),
    ("gemma4", None, set()),
    ("gemma4_unified", None, set()),
    ("deepseek_v4", None, set()),
    ("gemma3n", added(L5, -1), set()),  # nothing uses the rows that stand for keys
    ("gemma3n", added(L5, 39), {"L5.attn_q.weight"}),
    ("gemma4", added(L5, 0), {"L5.attn_q.weight"}),
    ("gemma4", emptied(L5), {"L5.attn_q.weight"}),
    ("gemma4_unified", added(L2, 56), {"L2.attn_k.weight"}),
    ("gemma4_unified", added(L2, -1), {"L2.attn_k.weight"}),
    ("deepseek_v4", added("model.layers.2.self_attn.wqkv_a.weight", -1), {"L2.attn_kv.weight"}),
    (
        "deepseek_v4",
        added("model.layers.2.self_attn.indexer.compressor.wkv_gate.weight", 0),
        {"L2.indexer.compressor_kv.weight"},
    ),
    (
        "deepseek_v4",
        added("model.layers.2.self_attn.compressor.ape", 1),
        {"L2.attn_compressor_ape.weight"},
    ),
    (
        "deepseek_v4",
        added("model.layers.0.mlp.experts.w13_weight", 2),
        {"L0.ffn_gate_exps.weight", "L0.ffn_up_exps.weight"},
    ),
]


@pytest.mark.parametrize("arch, wrong, differ", SGLANG)
def test_states_of_sglang(
    arch: str, wrong: Callable[[State], None] | None, differ: set[str], tmp_path: Path
) -> None:
    """Layers that share keys, keys that are values, and deepseek_v4's names and order."""
    folder = tiny_folder(arch)
    held = sglang(published(folder), SHARED.get(arch))
    if wrong is not None:
        wrong(held)
    done = aprfmt("diff", folder, save(tmp_path / "s", [held]), "--json")
    assert done.code == (1 if differ else 0), done.out[:2000] + done.err
    found = {one["key"] for one in done.json["tensors"] if one["verdict"] != "SAME_BYTES"}
    assert found == differ


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("other", [False, True], ids=["the same bytes", "other bytes"])
def test_a_module_that_two_ways_lead_to_is_in_a_state_twice(
    other: bool, ranks: int, tmp_path: Path
) -> None:
    """What was read already under a published name is no tensor of its own; other bytes are."""
    held = states("llama", ranks)
    name = "model.layers.1.mlp.down_proj.weight"
    for state in held:
        state["drafter.down.weight"] = state[name] + 1 if other else state[name].clone()
    done = aprfmt("diff", tiny_folder("llama"), save(tmp_path / "s", held), "--json")
    alone = [row["name_b"] for row in done.json["tensors"] if row["verdict"] == "ONLY_IN_B"]
    assert (alone, done.code) == ((["drafter.down.weight"], 1) if other else ([], 0))


@pytest.mark.parametrize("at", [None, 0, -1])
def test_rows_behind_the_vocabulary_are_zeros_or_not_compared(
    at: int | None, tmp_path: Path
) -> None:
    held = states("llama", 2)
    given = published(tiny_folder("llama"))["lm_head.weight"].shape[0]
    rows = held[0]["lm_head.weight"].shape[0]
    behind = 2 * rows - given
    assert 0 < behind < rows
    if at is not None:
        held[1]["lm_head.weight"][rows - behind :][at, 3] = 0.5
    path = save(tmp_path / "s", held)
    done = aprfmt("diff", tiny_folder("llama"), path, "--json")
    assert done.code == 0
    assert {one["verdict"] for one in done.json["tensors"]} == {"SAME_BYTES"}
    (said,) = (text for text in done.json["notes"] if "lm_head.weight: " in text)
    kind = "zeros" if at is None else "no zeros, and were not compared"
    assert said.endswith(f"{behind} rows after the vocabulary are {kind}")
