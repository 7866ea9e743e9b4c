"""Importance matrices computed from a text: sums of squares of each weight's inputs.

Counted as llama.cpp's llama-imatrix counts: the rows of the inputs of the layers' matrices, the
output's not; of an expert the rows that chose it. The text is cut into whole windows that begin
with BOS where the model adds one. Entries have the names of GGUF tensors; several roles in one
tensor (fused q, k and v) share one input. Source: llama.cpp, tools/imatrix/imatrix.cpp.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aprfmt.arch.name_templates import expand_template
from aprfmt.arch.role_vocabulary import split_key
from aprfmt.errors import UsageError
from aprfmt.inference.backends.numpy_backend import NumpyBackend
from aprfmt.inference.evaluation import Sample, plan_windows
from aprfmt.inference.session import Session
from aprfmt.quantizing.imatrix import CollectedImatrix, InputSums

if TYPE_CHECKING:
    from aprfmt.arch.spec import Binding
    from aprfmt.inference.backends.base import Array
    from aprfmt.inference.weights import Weight
    from aprfmt.model import Model

CHUNK = 512  # tokens of a pass, as llama-imatrix has by default
Sums = dict[str, InputSums]


class _CountingBackend(NumpyBackend):
    """The numpy backend in float32, which also sums the squares of its products' inputs."""

    def __init__(self, sums: Sums) -> None:
        """Open numpy on the CPU; `sums` gets the sums by role key."""
        super().__init__("cpu", "float32")
        self._sums = sums

    def linear(self, x: "Array", w: "Weight", bias: "Array | None") -> "Array":
        """Return x times w transposed, plus bias, after adding x to the weight's sums."""
        expert, experts = w.part or (0, 1)
        key = w.key.removesuffix(f"[{expert}]") if w.part else w.key
        if key not in self._sums:
            self._sums[key] = InputSums.empty(experts, x.shape[-1])
        self._sums[key].add(expert, x)
        return super().linear(x, w, bias)


def collect_imatrix(
    model: "Model",
    ids: Sequence[int],
    name: str,
    *,
    prefix: int = 0,
    chunks: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CollectedImatrix:
    """Return the sums of squares of a text's inputs, by GGUF tensor name.

    `ids` are the text's tokens, of which the first `prefix` are repeated before every window; what
    fills no window at the end is left out, and a short text is one window. `chunks` limits the
    number of windows. `progress` is called with (windows done, all windows). Raises UsageError for
    a text that fills no window, ArchError for a model that does not run.
    """
    size = min(CHUNK, int(model.hyper["context_length"]), len(ids))
    text = [Sample(name, ids, prefix=prefix)]
    planned = plan_windows(text, size, convention="llama.cpp")[0] if size > 1 else []
    passes = [window.ids(ids) for _, cut in planned for window in cut][:chunks]
    if not passes:
        raise UsageError(f"{name}: {len(ids)} tokens; expected a text, best of some thousand words")
    sums: Sums = {}
    model.cache_remote_reads()
    with Session.open(model, _CountingBackend(sums)) as session:
        for done, each in enumerate(passes):
            session.prefill(each)
            if progress is not None:
                progress(done + 1, len(passes))
    return CollectedImatrix(_sums_by_gguf_name(model, sums), name, len(passes), size)


def _sums_by_gguf_name(model: "Model", sums: Sums) -> Sums:
    """Return the layers' sums by the GGUF names that are written.

    Roles that are written as several tensors are left out.
    """
    written: dict[str, Binding] = {}
    for binding in model.spec.bindings["gguf"]:
        for role in binding.roles:
            written.setdefault(role, binding)
    found: Sums = {}
    for key, entry in sums.items():
        layer, role = split_key(key)
        if layer is not None and len(written[role].stored) == 1:
            found[expand_template(written[role].stored[0], layer)] = entry
    return found
