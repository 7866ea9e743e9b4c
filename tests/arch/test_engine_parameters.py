"""The parameters of engines, by the table of architectures.

fixtures/vllm/parameters.json has digests of what vLLM's own classes held after loading tiny models.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.arch.binding import bind_names
from aprfmt.arch.element_moves import to_logical
from aprfmt.arch.engine_parameters import (
    EngineParameter,
    Section,
    divide_parameter,
    list_parameters,
)
from aprfmt.compare import diff, diff_models
from aprfmt.model import Model, open_model
from aprfmt.model.engine_state import is_engine_state, open_engine_state
from aprfmt.model.rank_tensors import element_array
from aprfmt.model.role_manifest import PADDED, parameter_rows
from tests.approved import check
from tests.diagnosis.engines import tiny_folder
from tests.model.engine_states import megatron_rank, pipeline_stage, published, save

TABLES = ("llama", "gpt2", "gpt_neox", "qwen3_next", "qwen3_moe", "deepseek_v3", "mamba2")
torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file
HELD: Mapping[str, Any] = json.loads(Path("fixtures/vllm/parameters.json").read_text())
SGLANG_HELD: Mapping[str, Any] = json.loads(Path("fixtures/sglang/parameters.json").read_text())
# What SGLang 0.5.23 holds otherwise: other dtypes, norms to which 1 was added, experts that its
# class for text alone does not load, a bias that one rank adds, other divisions of convolutions
# and of query, key and value, an embedding whole on every rank.
OTHERWISE_IN_SGLANG = {
    "apertus": (".act_fn.",),
    "gemma": ("norm.",),
    "gemma3": (".embed_tokens.",),
    "gpt_oss": (".sinks", ".w2_weight_bias"),
    "lfm2": (".conv.",),
    "lfm2_moe": (".conv.",),
    "llama4": (".qkv_proj.", ".experts."),
}
# What vLLM holds otherwise than the manifest says: it runs gpt_neox by transformers' classes, and
# the first of gpt_oss's ranks alone adds the experts' bias.
OTHERWISE = {"gpt_neox": ("query_key_value",), "gpt_oss": ("w2_bias",)}


@pytest.mark.parametrize("arch", HELD)
def test_parameters_are_those_of_vllm(arch: str) -> None:
    """Each parameter of each rank has its digest in the manifest, by name or by another of it."""
    compared = 0
    with open_model(tiny_folder(arch)) as model:
        for ranks, held in HELD[arch].items():
            made = parameter_rows(model, int(ranks))
            for name, digests in held.items():
                if any(one in name for one in OTHERWISE.get(arch, ())):
                    continue
                for rank in range(int(ranks)):
                    digest = digests if isinstance(digests, str) else digests[rank]
                    of_name = [made[name]] if name in made else made.values()
                    found = {one["sha256"][rank][:12] for one in of_name}
                    assert digest in found, (name, ranks, rank)
                    compared += 1
    assert compared > 10


@pytest.mark.parametrize("arch", SGLANG_HELD["2"])
def test_parameters_are_those_of_sglang(arch: str) -> None:
    """Each share of two ranks is in the manifest, and so is read by its own loader's division."""
    with open_model(tiny_folder(arch)) as model:
        made = parameter_rows(model, 2)
        for name, digests in SGLANG_HELD["2"][arch].items():
            if any(one in name for one in OTHERWISE_IN_SGLANG.get(arch, ())):
                continue
            for rank, digest in enumerate(digests):
                found = {one["sha256"][rank][:12] for one in made.values()}
                assert digest in found, (name, rank)


@pytest.mark.parametrize("arch", SGLANG_HELD["2"])
def test_a_state_covers_what_was_published(arch: str) -> None:
    """A whole state has every published tensor in some parameter; one that lacks one has not."""
    with open_model(tiny_folder(arch)) as model:
        made = parameter_rows(model, 1)
    published = {one for row in made.values() for one in row["of"]}
    held = [name for name in SGLANG_HELD["2"][arch] if name in made]
    covered = {one for name in held for one in made[name]["of"]}
    # SGLang has two numbers of apertus's activation as buffers, in no state.
    assert {one for one in published - covered if ".act_fn." not in one} == set()
    without = {one for name in held[1:] for one in made[name]["of"]}
    assert covered - without


def state_of(model: Model, ranks: int, megatron: bool) -> list[dict[str, Any]]:
    """Return what ranks hold of a model, each published tensor in one parameter; [] if they cannot.

    In the form with most tensors joined, or in Megatron Core's.
    """
    tensors = model.source.tensors
    shapes = {name: tensor.info.shape for name, tensor in tensors.items()}
    groups = bind_names(model.spec, "hf", tensors).groups
    listed = list_parameters(model.spec, groups, shapes, model.hyper)

    def rank_of(one: EngineParameter) -> tuple[bool, int]:
        return one.megatron != megatron, -sum(len(part.stored) for part in one.parts)

    made: list[dict[str, Any]] = [{} for _ in range(ranks)]
    done: set[str] = set()
    for parameter in sorted(listed, key=rank_of):
        stored = {name for part in parameter.parts for name in part.stored}
        layout = divide_parameter(parameter, ranks, PADDED)
        if not done.isdisjoint(stored) or parameter.regrouped:
            continue
        if layout is None:
            return []
        if parameter.megatron and not megatron:
            continue
        done |= stored
        arrays = [
            array
            for part in parameter.parts
            for array in to_logical(
                part.steps, [element_array(tensors[name]) for name in part.stored], model.hyper
            )
        ]
        for rank in range(ranks):
            array = layout.rank_array(arrays, rank)
            if layout.padding:
                rows = (parameter.shape[0] + layout.padding) // ranks
                whole = np.zeros((rows, *array.shape[1:]), array.dtype)
                whole[: len(array)] = array
                array = whole
            numbers = np.frombuffer(array.tobytes(), "<f4").copy().reshape(array.shape)
            made[rank][parameter.names[0]] = torch.from_numpy(numbers)
    return made


@cache
def tiny_model(arch: str) -> Model:
    """Return a tiny model, opened once."""
    return open_model(tiny_folder(arch))


@pytest.mark.parametrize("arch", HELD)
def test_a_state_reads_back(arch: str, tmp_path: Path) -> None:
    """Joined and in Megatron Core's form, of 1, 2 and 4 ranks: every tensor has its bytes."""
    model = tiny_model(arch)
    for number, (ranks, megatron) in enumerate(
        [(1, False), (2, False), (4, False), (1, True), (2, True)]
    ):
        states = state_of(model, ranks, megatron)
        if not states:
            assert ranks > 1
            continue  # some heads or widths are no multiple of the ranks
        path = save(tmp_path / str(number), states)
        with open_engine_state(path, model) as state:
            report = diff_models(model, state, only=("tensors",), explain=False)
        wrong = [row.key for row in report.tensors if row.verdict != "SAME_BYTES"]
        assert not wrong and report.tensors, (ranks, megatron, wrong[:4])


# Names that SGLang's load_weights alone makes of published ones (sglang 0.5.23, srt/models).
SGLANG: Mapping[str, tuple[tuple[str, str], ...]] = {
    "gpt_oss": (
        ("experts.gate_up_proj_bias", "experts.w13_weight_bias"),
        ("experts.down_proj_bias", "experts.w2_weight_bias"),
    ),
    "hunyuan_v1_moe": ((".gate.wg.", ".gate."),),
    "granitemoe": ((".router.layer.", ".gate."),),
    "granite_hybrid": ((".A_log", ".A"),),
    **{
        arch: (
            ("backbone.", "model."),
            (".embeddings.", ".embed_tokens."),
            (".norm_f.", ".norm."),
            (".A_log", ".A"),
        )
        for arch in ("mamba", "mamba2", "falcon_mamba")
    },
    "nemotron_h": (("backbone.", "model."), (".embeddings.", ".embed_tokens."), (".A_log", ".A")),
    "lfm2_moe": ((".conv.conv.", ".conv.conv_"), ("feed_forward.w2", "feed_forward.down_proj")),
    "qwen3_next": ((".self_attn.", "."),),
}


@pytest.mark.parametrize("arch", SGLANG)
def test_names_of_sglang_are_found(arch: str, tmp_path: Path) -> None:
    """A state under SGLang's names, saved in one file, is the published model."""
    state = {}
    for name, tensor in load_file(Path(tiny_folder(arch)) / "model.safetensors").items():
        own = reduce(lambda text, pair: text.replace(*pair), SGLANG[arch], name)
        if own.endswith(".A"):
            tensor = -torch.exp(tensor.float())
        state[own] = tensor.squeeze(1) if own.endswith(".conv_weight") else tensor
    assert state.keys() - tiny_model(arch).source.tensors.keys()
    torch.save(state, tmp_path / "state.pt")
    with open_engine_state(tmp_path / "state.pt", tiny_model(arch)) as held:
        assert held.source.tensors.keys() <= tiny_model(arch).source.tensors.keys()
        report = diff_models(tiny_model(arch), held, only=("tensors",), explain=False)
    assert report.tensors and all(row.verdict == "SAME_BYTES" for row in report.tensors)


def test_a_state_of_decays_is_an_engines(tmp_path: Path) -> None:
    """A mamba has no joined module: its decay, which no checkpoint has, says what it is."""
    torch.save({"model.layers.0.mixer.A": torch.ones(4, 4)}, tmp_path / "state.pt")
    torch.save({"model.layers.0.mixer.A_log": torch.ones(4, 4)}, tmp_path / "published.pt")
    assert is_engine_state(tmp_path / "state.pt")
    assert not is_engine_state(tmp_path / "published.pt")


@pytest.mark.parametrize(
    "rows, unit, ranks, share, copies",
    [
        (64, 16, 2, 32, 1),
        (64, 16, 4, 16, 1),
        (32, 16, 4, 16, 2),
        (16, 16, 8, 16, 8),
        (48, 16, 2, -1, 1),
        (48, 1, 4, 12, 1),
    ],
)
def test_units_are_divided_or_shared(
    rows: int, unit: int, ranks: int, share: int, copies: int
) -> None:
    section = Section(rows, unit)
    assert section.share(ranks) == share and section.copies(ranks) == copies
    if share > 0:  # together the ranks have every row, each as often
        held = [
            row
            for rank in range(ranks)
            for row in range(section.start(rank, ranks), section.start(rank, ranks) + share)
        ]
        assert sorted(held) == sorted([*range(rows)] * copies)


@pytest.mark.parametrize(
    "arch, ranks, stages, experts",
    [
        ("llama", 1, 1, False),
        ("llama", 2, 3, False),
        ("qwen3_moe", 2, 1, False),
        ("qwen3_moe", 2, 1, True),
    ],
)
def test_a_checkpoint_of_megatron_reads_back(
    arch: str, ranks: int, stages: int, experts: bool, tmp_path: Path
) -> None:
    """Its file names, joined matrices, experts and the numbers of a pipeline's layers."""
    folder = tiny_folder(arch)
    config = json.loads((folder / "config.json").read_text())
    given = published(folder)
    for rank in range(ranks):
        held = megatron_rank(given, config, rank, ranks, experts)
        for stage in range(stages):
            part = pipeline_stage(held, stage, stages, config["num_hidden_layers"])
            more = f"_{stage:03d}" if stages > 1 else ""
            place = f"mp_rank_00_{rank:03d}" if experts else f"mp_rank_{rank:02d}{more}"
            (tmp_path / place).mkdir()
            saved = {"model": part, "iteration": 7, "args": {"tp": ranks}}
            torch.save(saved, tmp_path / place / "model_optim_rng.pt")
    assert is_engine_state(tmp_path)
    report = diff(folder, tmp_path, explain=False)
    assert {row.verdict for row in report.tensors} == {"SAME_BYTES"}
    with open_model(folder) as model:
        assert len(report.tensors) == len(model.roles)


def _short_convolution(name: str, value: Any, rank: int, ranks: int) -> tuple[str, Any]:
    """Return the name and the share of one of lfm2's tensors as SGLang has them."""
    if name.endswith(".conv.conv.weight"):
        return name.replace(".conv.conv.", ".conv.conv_"), value[:, 0].chunk(ranks)[rank]
    if name.endswith(".conv.in_proj.weight"):
        return name, torch.cat([one.chunk(ranks)[rank] for one in value.chunk(3)])
    if name.endswith(".conv.out_proj.weight"):
        return name, value.chunk(ranks, 1)[rank]
    return name, value


@pytest.mark.parametrize("arch", ["lfm2", "lfm2_moe"])
def test_short_convolutions_of_two_ranks_are_read(arch: str, tmp_path: Path) -> None:
    """Shares have the digests of SGLang's own; the state that holds them is the published model."""
    ranks: list[dict[str, Any]] = [{}, {}]
    held = {digest for both in SGLANG_HELD["2"][arch].values() for digest in both}
    for name, value in load_file(Path(tiny_folder(arch)) / "model.safetensors").items():
        for rank, state in enumerate(ranks):
            own, share = _short_convolution(name, value, rank, 2)
            state[own] = share.contiguous()
            if ".conv." in name:
                raw = state[own].numpy().tobytes()
                assert hashlib.sha256(raw).hexdigest()[:12] in held, own
    path = save(tmp_path / "s", ranks)
    with open_engine_state(path, tiny_model(arch)) as held_state:
        report = diff_models(tiny_model(arch), held_state, only=("tensors",), explain=False)
    assert report.tensors and {row.verdict for row in report.tensors} == {"SAME_BYTES"}


def test_norms_to_which_one_was_added_are_said_to_be_sglangs(tmp_path: Path) -> None:
    """In every layer, as its first Gemma has them; not where one norm alone is so."""
    given = load_file(Path(tiny_folder("gemma")) / "model.safetensors")
    norms = [name for name in given if name.endswith("norm.weight")]
    for more, said in ((norms, True), (norms[:1], False)):
        state = {name: one + 1 if name in more else one for name, one in given.items()}
        first = f"{len(norms)} norms hold 1 + the published weight"
        with open_engine_state(save(tmp_path / str(said), [state]), tiny_model("gemma")) as held:
            notes = [note.text for note in held.source.notes if note.text.startswith(first)]
            report = diff_models(tiny_model("gemma"), held, only=("tensors",), explain=False)
        assert bool(notes) == said
        assert sum(row.verdict == "DIFFERENT" for row in report.tensors) == len(more)


@pytest.mark.parametrize("arch", sorted(TABLES))
def test_sections_have_every_row_of_their_axis_in_whole_units(arch: str) -> None:
    with open_model(tiny_folder(arch)) as model:
        shapes = {name: tensor.info.shape for name, tensor in model.source.tensors.items()}
        groups = bind_names(model.spec, "hf", shapes).groups
        listed = list_parameters(model.spec, groups, shapes, model.hyper)
    seen = 0
    for one in listed:
        for part in one.parts:
            for sections, shape in zip(part.sections, part.shapes, strict=False):
                rows = sum(each.rows for each in sections)
                assert rows in (*shape, 1), (one.names, shape, sections)
                for each in sections:
                    assert 0 < each.unit <= each.rows and each.rows % each.unit == 0, one.names
                seen += 1
    assert seen > 10


def test_rows_by_groups_are_divided_by_whole_groups() -> None:
    """qwen3_next's queries, keys, values and gates stand together for each key head."""
    with open_model(tiny_folder("qwen3_next")) as model:
        shapes = {name: tensor.info.shape for name, tensor in model.source.tensors.items()}
        groups = bind_names(model.spec, "hf", shapes).groups
        listed = list_parameters(model.spec, groups, shapes, model.hyper)
        heads = int(model.hyper["delta_key_heads"])
    found = [
        (one.parts[0].sections[0], one.parts[0].shapes[0])
        for one in listed
        if one.published and any(name.endswith(("in_proj_qkvz.weight", "in_proj_ba.weight"))
                                 for name in one.names)
    ]  # fmt: skip
    assert found
    for sections, shape in found:
        assert sections == (Section(shape[0], shape[0] // heads),)
        assert [section.share(heads) for section in sections] == [shape[0] // heads]


# Architectures that together have most forms: joined and stacked, turned, in groups, with keys of
# another layer.
LISTED = ("gpt_neox", "qwen3_next", "gpt_oss", "deepseek_v3", "gemma4", "llama4")


def told(one: EngineParameter) -> str:
    """Return all of a parameter: its names, what it is, each of its parts, and ranks' shares."""
    flags = ("grouped", "vocabulary", "published", "megatron", "negated_exp", "regrouped")
    said = [flag for flag in flags if getattr(one, flag)]
    lines = [f"{' = '.join(one.names)} {list(one.shape)} by {one.axis}: {', '.join(said)}"]
    for ranks in (2, 3):
        layout = divide_parameter(one, ranks, PADDED)
        shares = "no" if layout is None else f"axis {layout.axis} with {layout.padding} more"
        lines[0] += f"; {ranks} ranks {shares}"
    for part in one.parts:
        rows = [
            f"{list(shape)} {' '.join(f'{s.rows}/{s.unit}' + '!' * (not s.divided) for s in each)}"
            for shape, each in zip(part.shapes, part.sections, strict=True)
        ]
        steps = [type(step).__name__ for step in part.steps]
        lines.append(
            f"{' '.join(part.stored)} as {' '.join(part.keys)}: {', '.join(rows)} "
            f"{' '.join(steps)} divided {part.divided}"
        )
    return "\n".join(lines)


def test_parameters_of_many_forms_are_those_that_were_approved() -> None:
    """What stands outside of layers, and a layer of each kind, with the shares of ranks."""
    texts = []
    for arch in LISTED:
        texts.append(f"- {arch}")
        with open_model(tiny_folder(arch)) as model:
            shapes = {name: tensor.info.shape for name, tensor in model.source.tensors.items()}
            groups = bind_names(model.spec, "hf", shapes).groups
            listed = list_parameters(model.spec, groups, shapes, model.hyper)
        seen = set()
        for one in listed:
            text = told(one)
            kind = re.sub(r"\d+(?=\.)", "N", text)
            if kind not in seen:
                seen.add(kind)
                texts.append(text)
    check(Path(__file__).parent / "answers" / "parameters.txt", "\n".join(texts))
