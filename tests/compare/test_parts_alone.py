"""Parts of a comparison, each by itself.

Seen red: no distance of an infinite norm, a repaired file without its ending, the shape of a record
that keeps the size of its cut rows, a copy's value shown for the original's, and a sample whose
equality is said without its doubt.
"""

import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from aprfmt.arch.spec import HyperParams
from aprfmt.causes import CAUSES
from aprfmt.cli import diff
from aprfmt.compare.diffs import DiffReport
from aprfmt.compare.short_answer import COMMANDS, LINES, short_answer
from aprfmt.diagnosis import forward, model_comparison
from aprfmt.diagnosis.stored_names import _damage_sentence
from aprfmt.errors import ArchError, FormatError
from aprfmt.formats.pytorch import FORMAT as PYTORCH
from aprfmt.measure import trace_rows, traces
from aprfmt.measure.distances import relative_share
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import fixed_name, join_set_commands, short_keys, surplus_command
from aprfmt.measure.records import TENSOR_VERDICTS, FieldDiff
from aprfmt.measure.requantization import RequantizationOracle
from aprfmt.measure.sampling import DifferingRange, SampleReport
from aprfmt.measure.texts import TokensReport, _stored_tokenizer
from aprfmt.measure.trace_rows import TraceOnSharedRows
from aprfmt.model import engine_state


@pytest.mark.parametrize(
    ("distance", "norm", "share"),
    [
        (0.0, 0.0, 0.0), (0.0, math.inf, 0.0), (2.0, 4.0, 0.5), (2.0, 0.0, math.inf),
        (2.0, math.inf, math.inf), (math.inf, 4.0, math.inf), (2.0, math.nan, math.inf),
    ],
)  # fmt: skip
def test_a_share_of_no_norm_or_an_infinite_one_is_infinite(
    distance: float, norm: float, share: float
) -> None:
    assert relative_share(distance, norm) == share


@pytest.mark.parametrize(
    ("name", "folder", "fixed"),
    [
        ("m.gguf", False, "m-fixed.gguf"),
        ("m", False, "m-fixed"),
        ("m.v2", True, "m.v2-fixed"),
        ("a model.apr", False, "'a model-fixed.apr'"),
        *((f"m{suffix}", False, "m-fixed.safetensors") for suffix in PYTORCH.extensions),
        ("m.pt", True, "m.pt-fixed"),
    ],
)
def test_a_repaired_copy_keeps_the_ending_of_a_format_that_is_written(
    name: str, folder: bool, fixed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.mkdir() if folder else path.touch()
    assert fixed_name(path) == fixed
    if folder:
        monkeypatch.chdir(path)
        assert fixed_name(Path(".")) == fixed


class Recorded:
    """A trace of logits at some positions."""

    def __init__(self, positions: tuple[int, ...], width: int = 3) -> None:
        self.values = np.arange(100 * width, dtype=np.float32).reshape(100, width)[list(positions)]
        self.record = SimpleNamespace(
            key="logits", point="logits", shape=self.values.shape, positions=positions, dtype="F32"
        )

    def find_record(self, key: str) -> Any:
        return self.record if key == "logits" else None

    def recorded_values(self, key: str) -> Any:
        return self.values if key == "logits" else None

    def values_mask(self, key: str) -> Any:
        return self.values > 4 if key == "logits" else None


@pytest.mark.parametrize(
    ("mine", "theirs", "kept"),
    [
        ((0, 1, 2), (1, 2), (1, 2)),
        ((0, 1, 2), (0, 1, 2), (0, 1, 2)),
        ((5, 3), (3, 4, 5), (3, 5)),
        ((0, 1), (2, 3), (0, 1)),  # nothing is shared: nothing is cut
    ],
)
def test_logits_are_cut_to_the_positions_that_both_have(
    mine: tuple[int, ...], theirs: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    a: Any = Recorded(mine)
    cut = TraceOnSharedRows(a, Recorded(theirs))  # type: ignore[arg-type]
    record, values, mask = (
        cut.find_record("logits"), cut.recorded_values("logits"), cut.values_mask("logits"),
    )  # fmt: skip
    wanted = Recorded(kept).values
    assert record is not None and values is not None and mask is not None
    assert tuple(record.shape) == values.shape == mask.shape == wanted.shape
    assert tuple(record.positions or ()) == kept and np.array_equal(values, wanted)
    assert np.array_equal(mask, wanted > 4)
    assert cut.find_record("embd") is None and cut.recorded_values("embd") is None
    assert trace_rows.CHOSEN


def test_a_tokenizer_that_cannot_be_read_has_nothing_stored() -> None:
    class Carried:
        @property
        def files(self) -> Any:
            raise FormatError("damaged")

    metadata = {"tokenizer.ggml.tokens": np.array([1, 2]), "general.name": "x"}
    model: Any = SimpleNamespace(carried=Carried(), metadata=metadata)
    assert _stored_tokenizer(model) == {}
    files = {"tokenizer.json": "{}", "vocab.txt": "a", "merges.txt": "b", "config.json": "c"}
    model.carried = SimpleNamespace(files=files)
    assert _stored_tokenizer(model) == {
        "tokenizer.json": "{}", "vocab.txt": "a", "merges.txt": "b",
        "tokenizer.ggml.tokens": [1, 2],
    }  # fmt: skip


@pytest.mark.parametrize("decisive", [False, True])
@pytest.mark.parametrize("size", [3, diff.LONGEST, diff.LONGEST + 1])
def test_a_field_shows_the_value_of_either_side(size: int, decisive: bool) -> None:
    field = FieldDiff("rope_theta", "a" * size, "b" * size, decisive=decisive)
    (row,) = diff._field_rows([field])
    for side in "ab":
        whole = side * size
        shown = whole if size <= diff.LONGEST else whole[: diff.LONGEST - 3] + "..."
        assert row[side] == shown
    said = f"rope_theta: {'a' * size} | {'b' * size}"
    assert row["whole"] == (said if decisive else "")


@pytest.mark.parametrize("differing", [0, 1])
@pytest.mark.parametrize("ranges", [0, 4])
def test_equality_of_a_sample_is_said_with_its_doubt(
    ranges: int, differing: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tuple(DifferingRange("x", 0, 8, 1) for _ in range(differing))
    diff.show_samples(
        SampleReport("a", "b", 1, ranges, 9, 4, 9, 2, found, (), ()), "aprfmt diff a b"
    )
    out = " ".join(capsys.readouterr().out.split())
    assert ("diff without --sample reads everything" in out) is not bool(differing)
    assert ("fewer than" in out) is (ranges > 0 and not differing)
    assert "2 tensors are equal by the digests" in out
    assert ("x: byte 1 differs" in out) is bool(differing)


def test_rows_in_an_engines_order_are_told_of_their_file() -> None:
    """Once for all layers of a kind, and only where the first reading says the published order."""
    held = np.arange(4, dtype=np.float32)

    def reading(number: int, equal: int | None, published: bool) -> Any:
        values = held if equal == number else held + 1
        return SimpleNamespace(
            parameter=SimpleNamespace(published=published is (number == 0)),
            published_tensors=lambda part, hyper: [values],
        )

    part = SimpleNamespace(stored=("h.0.qkv", "h.1.qkv"))
    tensor: Any = SimpleNamespace(raw=lambda: memoryview(held.tobytes()))
    for equal, published in product((None, 0, 1), (False, True)):
        reader: Any = SimpleNamespace(_chosen={}, _hyper=None, _path=Path("s.pt"), notes=[])
        readings: Any = [(reading(i, equal, published), part) for i in range(2)]
        for name in ("h.0.qkv", "h.0.qkv"):
            found = engine_state._StateReader._choose_order(reader, name, tensor, readings)
            assert found == (equal or 0)
        assert len(reader.notes) == (equal == 1 and published)
        for note in reader.notes:
            assert (note.level, note.where, note.key) == ("note", "s.pt", "remark")
            assert note.text.startswith("h.#.qkv: rows stand in the order of an engine's")
        assert engine_state._StateReader._choose_order(reader, "x", tensor, readings[:1]) == 0


@pytest.mark.parametrize("roles", [1, 3, 4, 5, 7])
def test_four_roles_are_named_and_the_others_counted(roles: int) -> None:
    keys = [f"L{layer}.r{i}.weight" for i in range(roles) for layer in (0, 1, 2, 5)]
    text = short_keys([*keys, "output.weight"] if roles == 3 else keys)
    for i in range(roles):
        assert (f"r{i}.weight in layers 0" in text) is (i < 4)
    assert ("output.weight" in text) is (roles == 3)
    more = max(0, roles - 4)
    assert text.endswith(f" and {more} more role{'s' if more > 1 else ''}") is (more > 0)


@pytest.mark.parametrize("scaling", [None, "linear", "yarn", "dynamic"])
@pytest.mark.parametrize("turned", [False, True])
def test_only_dynamic_scaling_depends_on_the_length(turned: bool, scaling: str | None) -> None:
    one: Any = SimpleNamespace(hyper={"rope_scaling": scaling and {"type": scaling}})
    other: Any = SimpleNamespace(hyper={"rope_scaling": None})
    pair = (other, one) if turned else (one, other)
    assert model_comparison._differs_by_length(*pair) is (scaling == "dynamic")


@pytest.mark.parametrize(
    ("file", "b", "target"),
    [
        ("m.gguf", "m.gguf", "m-fixed.gguf"),
        ("m/model.safetensors", "m", "m/model.safetensors --force"),
        ("m/model.safetensors", "m/model.safetensors", "m/model.safetensors --force"),
        ("a b.apr", "a b.apr", "'a b-fixed.apr'"),
    ],
)
def test_a_file_of_a_folder_is_repaired_in_its_place(file: str, b: str, target: str) -> None:
    """The other files of the folder belong to it: another name would be read by nobody."""
    quoted = f"'{file}'" if " " in file else file
    assert surplus_command(file, b) == f"aprfmt repair {quoted} --partial -o {target}"


@pytest.mark.parametrize("left", [0, 1, 3])
@pytest.mark.parametrize("commands", [0, 1, COMMANDS, COMMANDS + 2])
@pytest.mark.parametrize("others", [0, 1, LINES + 5])
def test_a_short_answer_shows_what_counts_and_counts_the_rest(
    others: int, commands: int, left: int
) -> None:
    differing = [(f"  {chr(97 + i % 26) * (i + 1)} differs", "bad") for i in range(others)]
    lines = short_answer(
        ("verdict", "bad"), (), first_said=True, others=differing,
        not_compared=[f"l{i}" for i in range(left)], unrun=["u0"], unmended="nothing mends x",
        commands=[f"c{i}" for i in range(commands)],
    )  # fmt: skip
    texts = [text for text, _ in lines]
    assert texts[0] == "verdict" and len(texts) <= LINES
    more = f"; {left - 1} more (-v)" if left > 1 else ""
    assert [text for text in texts if text.startswith("not compared: ")] == (
        [f"not compared: l0{more}"] if left else []
    )
    assert "not reached by a pass: u0" in texts and "nothing mends x" in texts
    assert [text for text in texts if text.startswith("next: ")] == [
        f"next: c{i}" for i in range(min(commands, COMMANDS))
    ]
    hidden = commands - COMMANDS
    assert (f"      ... {hidden} more commands (-v)" in texts) is (hidden > 0)
    cut = [int(text.split()[1]) for text in texts if text.endswith("more lines (-v)")]
    shown = sum(text.endswith(" differs") for text in texts)
    assert shown + sum(cut) == others and (len(cut) == 1) is (shown < others)


@pytest.mark.parametrize("unread", [0, 1, 4, 5])
@pytest.mark.parametrize("broken", [{}, {"A": (), "B": ()}, {"A": ("cut",), "B": ("cut", "odd")}])
def test_what_damage_cost_a_comparison_is_said(
    broken: dict[str, tuple[str, ...]], unread: int
) -> None:
    report: Any = SimpleNamespace(tensors=[0] * 9)
    said = _damage_sentence(report, broken, [f"t{i}" for i in range(unread)])
    if not any(broken.values()):
        assert said == ""
        return
    assert said.startswith(
        "a file is not whole: A: cut; B: cut (and 1 more); equal in what was compared"
    )
    assert f"compared: {9 - unread} tensors by their stored names" in said
    names = ", ".join(f"t{i}" for i in range(min(unread, 4))) + (", ..." if unread > 4 else "")
    assert (f"not compared: {unread} tensors ({names})" in said) is (unread > 0)


@pytest.mark.parametrize(("cause", "values", "where"), [
    ("a", {"x": 1}, ("w",)), ("b", {"x": 1}, ("w",)), ("a", {"x": 2}, ("w",)),
    ("a", {"x": 1}, ("v",)),
])  # fmt: skip
def test_a_finding_of_both_sides_is_the_same_in_all(
    cause: str, values: dict[str, int], where: tuple[str, ...]
) -> None:
    mine: Any = SimpleNamespace(cause="a", values={"x": 1}, where=("w",), says="x is 1")
    other: Any = SimpleNamespace(cause=cause, values=values, where=where, says="x is 1")
    same = (cause, values, where) == ("a", {"x": 1}, ("w",))
    assert forward.shared_findings([mine], [other]) == ([mine] if same else [])
    assert forward._is_same_cause(mine, other) is (values == {"x": 1})


@pytest.mark.parametrize(("commands", "joined"), [
    (("aprfmt set b a=1 -o c", "aprfmt set b d=2 -o c"), "aprfmt set b a=1 d=2 -o c"),
    (("aprfmt set b 'k=[1, 2]' -o c", "aprfmt set b k=1 -o c"), "aprfmt set b 'k=[1, 2]' -o c"),
    (("aprfmt set b a=1 k=3 -o c", "aprfmt set b k=4 x=5 -o c"), "aprfmt set b a=1 k=3 x=5 -o c"),
    (("aprfmt set b --remove k -o c", "aprfmt set b --remove m -o c"),
     "aprfmt set b --remove k --remove m -o c"),
    (("aprfmt set b --remove k -o c", "aprfmt set b k=4 -o c"), "aprfmt set b --remove k -o c"),
    (("aprfmt set b a=1 -o c", "aprfmt convert b c"), ""),
])  # fmt: skip
def test_a_key_is_set_once_by_joined_commands(commands: tuple[str, ...], joined: str) -> None:
    """Seen red: "eos_token_id: is named twice" of the command that was printed."""
    assert join_set_commands(commands) == joined


@pytest.mark.parametrize("tied", [True, False, None])
@pytest.mark.parametrize(
    "key", ["output.weight", "token_embd.weight", "output_norm.weight", "L0.attn_v.bias"]
)
def test_only_a_tied_head_is_the_embedding_of_a_base(key: str, tied: bool | None) -> None:
    """What quantizers store apart is made of the embedding; another missing tensor of nothing."""

    class Hyper(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            raise ArchError("unknown")

    roles = {name: name for name in ("token_embd.weight", "output_norm.weight")}
    hyper = Hyper() if tied is None else Hyper(tied_embeddings=tied)
    base: Any = SimpleNamespace(find=roles.get, roles=roles, hyper=hyper)
    head = "token_embd.weight" if tied else None
    oracle: Any = RequantizationOracle(base)
    assert oracle.base_tensor(key) == (head if key == "output.weight" else roles.get(key))
    roles["output.weight"] = "its own"
    assert oracle.base_tensor("output.weight") == "its own"


@pytest.mark.parametrize("suffix", [".pt", ".ckpt", ".bin"])
@pytest.mark.parametrize("known", [0, 2, 3, 4])
@pytest.mark.parametrize("config", [None, {}, "no folder"])
def test_a_saved_state_has_the_names_of_a_model_with_a_configuration(
    config: Any, known: int, suffix: str, tmp_path: Path
) -> None:
    """A file of torch.save of which most tensors have published names; a file of a model has not.

    Without a configuration nothing says what the names are.
    """
    path = tmp_path / f"state{suffix}"
    names = [f"w{i}" if i < known else f"own{i}" for i in range(4)]
    torch.save({name: torch.zeros(2) for name in names}, path)
    folder = None if config == "no folder" else SimpleNamespace(config=config)
    published: Any = SimpleNamespace(
        folder=folder, source=SimpleNamespace(tensors={f"w{i}": 0 for i in range(9)})
    )
    wanted = config == {} and known > 2 and suffix != ".bin"
    assert engine_state.is_saved_state(path, published) is wanted


@pytest.mark.parametrize(
    ("cause", "confirmed", "values", "mended"),
    [
        ("transpose", True, {}, True),
        ("transpose", False, {}, False),
        ("bit_rot", False, {}, True),
        ("nonfinite", False, {}, False),
        ("nonfinite", False, {"nonfinite": {"w": {"a": 0, "both": 0}}}, True),
        ("nonfinite", False, {"nonfinite": {"w": {"a": 1, "both": 0}}}, False),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_tensors_are_written_again_where_that_mends_them(
    own: bool, cause: str, confirmed: bool, values: Any, mended: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A cause that is only located is mended by nothing; nor is a part that B alone has."""
    monkeypatch.setattr(DiffReport, "rewriting_command", "aprfmt convert A B")
    finding = Finding(cause, "says", "tensor", "bug", ("w",), confirmed, values=values)
    report = DiffReport(
        "a", "b", (), (), (), (), findings=(finding,), own_parts=(cause,) if own else ()
    )
    (found,) = report.causes
    bug = CAUSES[cause].verdict == "bug"
    assert (found.remedy is not None) is (mended and bug and not own)
    assert found.remedy is None or found.remedy.command == "aprfmt convert A B"


def test_the_base_of_a_head_is_the_embedding_where_they_are_one() -> None:
    embedding, own = object(), object()

    def base(found: dict[str, Any], tied: bool | None) -> Any:
        hyper: Any = {"tied_embeddings": tied}
        if tied is None:
            hyper = HyperParams({})
        roles = {"token_embd.weight": embedding}
        return RequantizationOracle(SimpleNamespace(find=found.get, hyper=hyper, roles=roles))  # type: ignore[arg-type]

    head = "output.weight"
    for tied in (True, False, None):
        assert base({head: own}, tied).base_tensor(head) is own
        assert base({}, tied).base_tensor("L0.attn_q.weight") is None
    assert base({}, True).base_tensor(head) is embedding
    assert base({}, False).base_tensor(head) is base({}, None).base_tensor(head) is None


def test_parts_of_either_side_are_told_before_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    from aprfmt import compare

    a, b = (cast(Any, SimpleNamespace(hyper={"n_layers": n})) for n in (2, 3))
    rows: Any = [SimpleNamespace(verdict="SAME_BYTES")]
    taken: dict[Any, str] = {}
    said: list[Any] = []

    def parts(x: Any, y: Any, labels: Any = ("A", "B")) -> str:
        said.append((x is a, labels))
        return taken.get(id(x), "")

    monkeypatch.setattr("aprfmt.compare.taken_parts.taken_parts_text", parts)
    monkeypatch.setattr(
        "aprfmt.compare.other_models.other_model_sentence",
        lambda *given: "others" if given[0] is a and given[1] is b and given[2] is rows else "?",
    )
    assert compare._identity_sentences(a, b, rows) == ("", "others")
    assert said == [(True, ("A", "B")), (False, ("B", "A"))]
    for side, text in ((a, "A has B"), (b, "B has A")):
        taken = {id(side): text}
        assert compare._identity_sentences(a, b, rows) == (text, "")


@pytest.mark.parametrize("name", ["hidden_size", "n_layers", "ffn_size", "vocab_size", "n_experts"])
def test_models_of_equal_sizes_with_an_equal_tensor_are_no_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: a size left out of those that are compared, and `all` for `any`."""
    from aprfmt import compare

    monkeypatch.setattr("aprfmt.compare.taken_parts.taken_parts_text", lambda *given: "taken")
    a, b, c = (cast(Any, SimpleNamespace(hyper={name: n, "eps": n - 1})) for n in (2, 3, 2))
    less: Any = SimpleNamespace(hyper={})
    rows: Any = [SimpleNamespace(verdict=one) for one in ("DIFFERENT", "SAME_VALUES")]
    for other in (b, less):
        assert compare._identity_sentences(a, other, rows) == ("taken", "")
    assert compare._identity_sentences(a, c, rows[:1]) == ("taken", "")
    assert compare._identity_sentences(a, c, rows) == ("", "")


@pytest.mark.parametrize("carried", ["A", "B", "AB", ""])
def test_a_tokenizer_of_one_side_is_present_there(
    carried: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aprfmt import compare

    report = TokensReport(carried=carried, remarks=("r",), not_checked=("n",), checked=("c",))
    monkeypatch.setattr(compare, "compare_equal_tokenizers", lambda a, b: None)
    monkeypatch.setattr("aprfmt.causes.tokenizer.comparison.compare_tokens", lambda a, b: report)
    monkeypatch.setattr(compare, "compare_texts", lambda a, b, report: None)
    monkeypatch.setattr(compare, "uncompared_tokenizers", lambda a, b, report: ("left",))
    side: Any = SimpleNamespace()
    found: Any = compare._compare_tokenizers(side, side)
    rows = [(row.name, row.a, row.b) for row in found.rows]
    expected = {"A": ("present", "absent"), "B": ("absent", "present")}.get(carried)
    assert rows == ([("tokenizer", *expected)] if expected else [])
    assert found.remarks == {"AB": ("r", "n"), "": ("r",)}.get(carried, ())
    assert found.both is (carried == "AB") and found.left == ("left",)


def test_experts_of_one_rank_in_two_files_are_there_twice() -> None:
    """Though no name is, since each rank has one stack; equal bytes are no excuse for it."""

    def source(name: str, *tensors: str) -> Any:
        info = SimpleNamespace(shape=(2,), encoding="F32")
        held = SimpleNamespace(info=info, raw=lambda: memoryview(b"12345678"))
        return SimpleNamespace(path=Path(name), tensors=dict.fromkeys(tensors, held), metadata={})

    expert = "decoder.layers.0.mlp.experts.linear_fc1.weight{}"
    group: Any = engine_state._group_by_name
    two = [(source(f"r{i}.pt", expert.format(i)), {"tp": 0}) for i in range(2)]
    with pytest.raises(FormatError, match=r"of tp rank 0 is there twice, the second in r1\.pt$"):
        group(Path("s"), two)
    found = group(Path("s"), [(source("r.pt", expert.format(0), expert.format(1)), {"tp": 0})])
    assert len(found) == 1 and found.popitem()[1].ranks == (0,)


def test_records_of_other_rows_or_counts_are_not_compared() -> None:
    def told(a: Any, b: Any, rows_a: Any = None, rows_b: Any = None) -> str:
        records = (
            SimpleNamespace(shape=shape, positions=rows)
            for shape, rows in ((a, rows_a), (b, rows_b))
        )
        return traces._reason_not_comparable(*records)

    assert told((2, 3), (2, 3)) == told((2, 3), (6,)) == told((), (1,)) == ""
    assert told((2, 3), (2, 4)) == "6 values [2, 3] against 8 [2, 4]"
    assert told((2, 3), (3, 3)) == "6 values [2, 3] against 9 [3, 3]"
    assert told((2, 3), (2, 3), (0, 1), (0, 1)) == told((2, 3), (2, 3), (0, 1)) == ""
    assert told((2, 3), (3, 3), (0, 1), (0, 1, 2)) == "rows of 2 positions against 3"
    assert told((1, 3), (1, 3), (4,), (5,)) == "row of position 4 against position 5"
    both = told((2, 3), (2, 3), (0, 1), (0, 2))
    assert both == "2 rows each, but row 1 is of position 1 against 2"


def test_the_worst_tensors_come_first_and_so_many() -> None:
    def tensor(key: str, verdict: str, rel: float | None = None, alone: bool = False) -> Any:
        stats = None if rel is None else SimpleNamespace(rel_l2=rel, alone=alone)
        return SimpleNamespace(key=key, verdict=verdict, stats=stats)

    rows = [
        tensor("same", "SAME_BYTES"),
        tensor("near", "WITHIN", 1e-6),
        tensor("far", "DIFFERENT", 0.5),
        tensor("nan", "DIFFERENT", 0.1, True),
        tensor("farther", "DIFFERENT", 0.7),
        tensor("plain", "DIFFERENT"),
    ]
    order = {verdict: at for at, verdict in enumerate(TENSOR_VERDICTS)}
    report: Any = SimpleNamespace(tensors=rows)
    found = [row.key for row in DiffReport.worst(report)]
    different = [key for key in found if key not in ("same", "near")]
    assert different == ["nan", "farther", "far", "plain"] and len(found) == len(rows)
    assert [order[row.verdict] for row in DiffReport.worst(report)] == sorted(
        order[row.verdict] for row in rows
    )
    for count in (0, 1, 3, 9):
        assert [row.key for row in DiffReport.worst(report, count)] == found[:count]
