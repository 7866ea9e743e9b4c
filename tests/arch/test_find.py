"""Finding an architecture: shared GGUF names, unknown names, what importing the tables costs."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aprfmt.arch import ARCHS, arch_names, find_arch
from aprfmt.arch.aliases import CALLED
from aprfmt.arch.binding import groups_for
from aprfmt.arch.hyperparameters import write_hyper
from aprfmt.arch.spec import BlockSpec
from aprfmt.errors import ArchError
from tests.arch.tiny import IN_GGUF, TINY, Tiny, make, read
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.id)
def test_found_by_every_name_transformers_gives(tiny: Tiny) -> None:
    made, kind = make(tiny), make(tiny).config["model_type"]
    shared = type(made.model).config_class.model_type != kind  # the class of another type
    for name in (kind, *(() if shared else (type(made.model).__name__,))):
        assert find_arch("hf", name, list(made.shapes), made.config).name == tiny.arch


@pytest.mark.parametrize("tiny", IN_GGUF, ids=lambda tiny: tiny.id)
def test_found_in_our_own_gguf(tiny: Tiny) -> None:
    """llama may be mistral or mixtral, olmo2 olmo3, deepseek2 v2 or v3: names and keys decide."""
    found = read(tiny)
    roles = [key for key in found.shapes if tiny.label not in ("mixed", "qk_norm")]
    groups = groups_for(found.spec, "gguf", roles, found.hp)
    names = [name for group in groups for name in group.stored]
    values = write_hyper(found.spec, found.hp, "gguf")
    spec = find_arch("gguf", found.spec.called["gguf"][0], names, values)
    # Whose pass is another one's: without a window, mistral's is llama's.
    others = {
        "solar_open-plain": "glm4_moe", "solar_open-groups": "glm4_moe",
        "mistral-full": "llama", "internlm3-plain": "llama", "internlm3-biases": "llama",
        "qwen2_5_vl-plain": "qwen2_vl", "gemma4_unified-plain": "gemma4",
        "glm4_moe_lite-plain": "deepseek_v3", "glm4_moe_lite-listed": "deepseek_v3",
    }  # fmt: skip
    assert spec.name == others.get(tiny.id, tiny.arch)


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.id)
def test_found_by_every_apr_slug(tiny: Tiny) -> None:
    for slug in ARCHS[tiny.arch].called["apr"]:
        assert find_arch("apr", slug, list(make(tiny).shapes), {}).name == tiny.arch


def test_every_row_is_the_name_and_the_names_of_its_table() -> None:
    """Seen red: llama's tables with mistral's names."""
    assert ARCHS.own == tuple(CALLED)
    for name in ARCHS.own:
        assert (ARCHS[name].name, ARCHS[name].called) == (name, CALLED[name])


@pytest.mark.parametrize(
    ("style", "name", "loaded"),
    [("hf", "Qwen2ForCausalLM", "qwen2"), ("gguf", "llama", "llama internlm3"),
     ("apr", "gemma", "gemma gemma*")],
)  # fmt: skip
def test_finding_one_imports_no_table_of_another(style: str, name: str, loaded: str) -> None:
    """Those that share the name decide it together. Seen red: candidates taken from all specs."""
    code = (
        "import fnmatch, sys\n"
        "from aprfmt.arch import find_arch\n"
        "from aprfmt.arch.aliases import ROWS\n"
        f"find_arch({style!r}, {name!r})\n"
        "holders = {row.module or name for name, row in ROWS.items()}\n"
        "seen = {name for name in holders if f'aprfmt.arch.{name}' in sys.modules}\n"
        f"may = {{n for each in {loaded.split()!r} for n in fnmatch.filter(seen, each)}}\n"
        "sys.exit(repr(seen) if may != seen else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_architecture_is_never_another() -> None:
    with pytest.raises(ArchError, match=r"'lama' is not known; near names: .*llama.*--arch"):
        find_arch("gguf", "lama")
    with pytest.raises(ArchError, match="known names"):
        find_arch("gguf", "zzzz")
    with pytest.raises(ArchError):
        find_arch("gguf", "")
    with pytest.raises(ArchError):
        find_arch("nope", "llama")


def test_what_nothing_decides_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = replace(ARCHS["mistral"], evidence=None)
    monkeypatch.setitem(ARCHS._loaded, "mistral", twin)
    with pytest.raises(ArchError, match="may be llama or mistral, and nothing in the file decides"):
        find_arch("gguf", "llama")


def test_adjacent_pairs_are_cohere_and_deepseek() -> None:
    found = {t.arch for t in TINY if read(t).hp["rope_style"] == "interleaved"}
    assert found == {
        "cohere",
        "cohere2",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm_moe_dsa",
        "glm4_moe_lite",
        "ernie4_5",
        "ernie4_5_moe",
        "glm",
        "glm4",
        "gptj",
        "llama4",
    }


def test_blocks_are_closed_enumerations() -> None:
    for name in arch_names():
        ARCHS[name].block.check()
    wrong: Any = "ring"
    with pytest.raises(ArchError, match="placement is 'ring'"):
        BlockSpec(placement=wrong).check()


def test_tables_import_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from aprfmt.arch import ARCHS, find_arch\n"
        "from aprfmt.arch import binding, hyperparameters\n"
        "[ARCHS[name] for name in ARCHS]\n"
        "heavy = {'numpy', 'torch', 'gguf', 'transformers', 'rich', 'click'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("known", [0, 1])
@pytest.mark.parametrize("unknown", [1, 4, 5])
def test_tensors_without_a_name_are_counted_and_dropped_where_others_have_one(
    unknown: int, known: int
) -> None:
    """Without a single name, as of another kind of model, leaving them out leaves nothing."""
    others = [f"L0.nameless_{i}.weight" for i in range(unknown)]
    roles = ["output_norm.weight"][:known] + others
    with pytest.raises(ArchError) as found:
        groups_for(ARCHS["llama"], "gguf", roles, {"n_layers": 2})
    shown = ", ".join(others[:4]) + " ..." * (unknown > 4)
    assert str(found.value) == (
        f"gguf files of llama have no name for {unknown} of the tensors: {shown}"
        + "; --drop leaves such out" * known
    )
