"""transformers as an engine: hooks record our points at the modules that compute them.

transformers opens a Hugging Face folder itself. For any other container, and for packed weights,
aprfmt writes a float32 folder of the same weights, which transformers opens; the trace says so
(`via`), since then only the forward pass is compared. A model's attention is called through one
function, which is wrapped to get rotated queries and keys, scores and probabilities; scores are
recomputed from the engine's own queries and keys. No code of a model folder is executed, and
nothing is downloaded.
"""

import contextlib
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from aprfmt.conversion import Options
from aprfmt.conversion import convert_model as convert
from aprfmt.errors import ArchError, BackendUnavailableError
from aprfmt.inference.backends.torch_backend import DTYPES
from aprfmt.inference.device import DeviceChoice
from aprfmt.inference.engines.modules import ModuleMap, ModuleReader
from aprfmt.inference.engines.record_collector import Collector
from aprfmt.inference.forward import LogitRows
from aprfmt.inference.trace import Positions, Trace
from aprfmt.inference.trace_file import Spool
from aprfmt.model import Model
from aprfmt.model.hf_folder import INDEX, WEIGHTS
from aprfmt.model.packing import packing_config
from aprfmt.remote.paths import is_remote
from aprfmt.tensors.companions import quantization_section

Numbers = NDArray[Any]
TakeValue = Callable[[str, Any], None]
# By what is added to the scores; eager attention adds it twice.
_ADDED_ONCE = {"alibi_keys": "sdpa"}
_INSIDE = re.compile(r"(\.[^.\d][^.]*)+$")  # what a module's path has after its layer's number
_ATTENTION = ("#q_attn", "#k_attn", "#scores", "#probs")


@contextmanager
def run_transformers(
    model: Model,
    ids: Sequence[int],
    choice: DeviceChoice,
    *,
    wanted: Collection[str] | None = None,
    positions: Positions = "all",
    threads: int | None = None,
    hashes: bool = False,
    logits_rows: LogitRows = "all",
) -> Iterator[Trace]:
    """Run a sequence through transformers; yield a trace whose values can be fetched.

    `wanted` are the keys to record (None: all), `positions` and `logits_rows` the rows of them.
    `threads` is the number of CPU threads (None: torch's own). `hashes`: also record the SHA-256 of
    values. Raises BackendUnavailableError for a missing device, ArchError for a model that
    transformers does not open.
    """
    device = _torch_device(choice.device)
    with ExitStack() as stack:
        # Open the model in transformers.
        folder, via = _folder_to_load(model, stack)
        head = model.spec.block.head != "none"
        attention = _ADDED_ONCE.get(model.spec.block.score_bias, "eager")
        network = load_network(folder, choice.dtype, device, head=head, attention=attention)
        if threads is not None:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(threads)
        # Record modules' values during one pass.
        collector = Collector(
            stack.enter_context(Spool()),
            model,
            tokens=len(ids),
            dtype=choice.dtype,
            device=str(device),
            positions=positions,
            wanted=wanted,
            hashes=hashes,
            logits_rows=logits_rows,
        )
        reader = _module_reader(network, model, collector, len(ids))
        known = reader.modules

        def take(key: str, values: Any) -> None:
            """Record the value of a module's input or result, `key`, if it is a capture point."""
            if reader.expects(key):
                reader.add(key, _to_numpy(values))

        with torch.inference_mode(), hook_modules(network, known, take):
            given = torch.tensor([list(ids)], device=device)
            if head:
                take("logits", network(given, use_cache=False).logits)
            else:
                network(given)
        run = {
            "ids": [int(i) for i in ids], "model": str(model.path),
            "architecture": model.spec.name, "via": via,
            "backend": _run_facts(network, choice.dtype, device, attention), "derived": ["scores"],
        }  # fmt: skip
        yield collector.trace(run)


def _module_reader(network: Any, model: Model, collector: Collector, tokens: int) -> ModuleReader:
    """Return the reader that turns the modules' values into capture points."""
    names = [name for name, _ in network.named_modules()]
    layers = [name for name in names if name.rpartition(".")[2].isdigit()]
    keys = [*names, *(f"{name}#in" for name in names), "logits"]
    keys += [f"{layer}{part}" for layer in layers for part in (*_ATTENTION, *_ROUTED)]
    embedding = network.get_input_embeddings()
    return ModuleReader(
        collector,
        keys,
        block=model.spec.block,
        architecture=model.spec.name,
        tokens=tokens,
        scaled_embedding=hasattr(embedding, "embed_scale"),
    )


def _run_facts(network: Any, dtype: str, device: torch.device, attention: str) -> dict[str, Any]:
    """Return what a trace says of the arithmetic that ran: device, dtype, versions, threads."""
    return {
        "backend": "transformers",
        "device": str(device),
        "dtype": dtype,
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "class": type(network).__name__,
        "attention": attention,
        "deterministic": False,
        "tf32": bool(torch.backends.cuda.matmul.allow_tf32) if device.type == "cuda" else False,
    }


_ROUTED = ("#experts", "#expert_w")


def _torch_device(text: str) -> torch.device:
    """Return the torch device of a name; BackendUnavailableError if it is not here."""
    if text.startswith("cuda") and not torch.cuda.is_available():
        raise BackendUnavailableError(
            f"transformers on {text}: torch finds no CUDA device; use @transformers:cpu, or run "
            "where a driver and a GPU are"
        )
    return torch.device(text)


def _folder_to_load(model: Model, stack: ExitStack) -> tuple[Path, str]:
    """Return (a folder for transformers to open, how its weights were made in words)."""
    folder = model.folder
    packed = quantization_section(packing_config(model) or {}) is not None
    here = folder if folder is not None and not is_remote(folder.path) else None
    if here is not None and here.config is not None and model.format == "safetensors":
        names = (WEIGHTS, INDEX)
        if not packed and any((here.path / name).is_file() for name in names):
            return here.path, "the folder itself"

    temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="aprfmt-hf-"))
    target = Path(temporary) / "model"
    options = Options(encoding="F32", source_hash=False, verify=False)
    convert(model, target, "safetensors", options)
    return target, f"{model.format} decoded to float32 and written as a folder by aprfmt"


def load_network(
    folder: Path, dtype: str, device: torch.device, *, head: bool = True, attention: str = "eager"
) -> Any:
    """Return transformers' model of a folder, in eval mode, with this attention function.

    Without a `head`: an encoder. ArchError if transformers does not open it.
    """
    log: Any = transformers.logging
    verbosity = log.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        kind = transformers.AutoModelForCausalLM if head else transformers.AutoModel
        network: Any = kind.from_pretrained(
            folder,
            dtype=DTYPES[dtype],
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ArchError(f"{folder}: transformers does not open it: {first}") from error
    finally:
        log.set_verbosity(verbosity)
    if getattr(network, "_can_set_experts_implementation", lambda: False)():
        network.set_experts_implementation("eager")
    return network.to(device).eval()


def _to_numpy(values: Any) -> Numbers:
    """Return a tensor as numpy float64, float32 (any other float) or int64."""
    if not values.dtype.is_floating_point:
        found: Numbers = values.detach().cpu().numpy().astype(np.int64)
        return found
    wide = values.dtype == torch.float64
    found = values.detach().to("cpu", torch.float64 if wide else torch.float32).numpy()
    return found


@contextlib.contextmanager
def hook_modules(network: Any, known: ModuleMap, take: TakeValue) -> Iterator[None]:
    """Pass each module's result, and inputs of output projections, to `take` in the `with`.

    `known` says which modules are points. Hooks are removed at the end.
    """
    paths = {id(module): name for name, module in network.named_modules()}
    handles = []
    for name, module in network.named_modules():
        if known.read(name) or known.read(f"{name}#in"):
            hook = _make_hook(name, known, take)
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
    code = sys.modules[type(network).__module__]
    original = getattr(code, "eager_attention_forward", None)
    if original is not None:
        setattr(code, "eager_attention_forward", _wrap_attention(original, paths, take))  # noqa: B010
    try:
        yield
    finally:
        if original is not None:
            setattr(code, "eager_attention_forward", original)  # noqa: B010
        for handle in handles:
            handle.remove()


def _make_hook(name: str, known: ModuleMap, take: TakeValue) -> Callable[..., None]:
    """Return a forward hook that passes the input and result of module `name` to `take`.

    `known` says which of the two are points.
    """

    def hook(module: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Give the module's input and result to `take`, those that are capture points."""
        before = args[0] if args else kwargs.get("hidden_states")
        if before is not None and known.read(f"{name}#in"):
            take(f"{name}#in", before)
        first = result[0] if isinstance(result, tuple) else result
        points = [reading.point.name for reading in known.read(name)]
        if "router" in points and isinstance(result, tuple) and len(result) == 3:
            _take_routing(name, result, take)
        if "router" in points and isinstance(result, tuple) and len(result) == 2:
            first = _take_choice(name, result, take)
        if isinstance(first, torch.Tensor):
            take(name, first)

    return hook


def _take_routing(name: str, result: Any, take: TakeValue) -> None:
    """Give a router's chosen experts and their weights to `take`, largest weight first.

    `result` is the router module's tuple (logits, weights, experts).
    """
    layer = _INSIDE.sub("", name)
    weights, experts = result[1], result[2]
    if weights.shape != experts.shape:
        return
    order = torch.argsort(-weights, dim=-1, stable=True)
    take(f"{layer}#expert_w", weights.gather(-1, order))
    take(f"{layer}#experts", experts.gather(-1, order))


def _take_choice(name: str, result: Any, take: TakeValue) -> Any:
    """Return a router's logits, and pass the experts that it chose to the function `take`.

    `result` is the router module's tuple (weights, logits). Chosen are the experts whose weight is
    above 0. If the shapes differ, the first item is returned.
    """
    weights, logits = result
    if weights.shape != logits.shape:
        return weights
    used = int((weights > 0).sum(dim=-1).max())
    experts = torch.argsort(-logits, dim=-1, stable=True)[..., :used]
    layer = name.rpartition(".")[0].rpartition(".")[0]
    take(f"{layer}#expert_w", weights.gather(-1, experts))
    take(f"{layer}#experts", experts)
    return logits


def _wrap_attention(
    original: Callable[..., Any], paths: dict[int, str], take: TakeValue
) -> Callable[..., Any]:
    """Return an attention function that calls `original` and reports its inner values.

    It gives q, k, scores and probabilities to `take`. `paths` are module paths by the id of the
    module.
    """

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        """Return what the wrapped attention returns.

        Its q, k, scores and probabilities are given to `take` under keys of the layer.
        """
        result, weights = original(module, query, key, value, mask, **options)
        layer = _INSIDE.sub("", paths[id(module)])
        take(f"{layer}#q_attn", query)
        take(f"{layer}#k_attn", key)
        take(f"{layer}#probs", weights)
        scaling = options.get("scaling")
        if scaling is None:  # gpt2 does not pass it
            return result, weights
        repeated = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = query @ repeated.transpose(2, 3) * scaling
        cap = options.get("softcap")
        take(f"{layer}#scores", scores if cap is None else torch.tanh(scores / cap) * cap)
        return result, weights

    return attend
