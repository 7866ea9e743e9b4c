"""Estimates the memory of a run or a trace from headers: weights, cache and activations.

Weights and cache follow from encodings and shapes. Activations are what the widest part of a layer
holds at a time, by the shapes of its capture points. Nothing is run and no weight is read.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from aprfmt.arch.role_vocabulary import F32_ROLES, split_key
from aprfmt.base.encodings import ENCODINGS, find_encoding
from aprfmt.base.protocols import Value
from aprfmt.base.registry import load_attribute
from aprfmt.codecs.quant_state import ABSMAX
from aprfmt.errors import UsageError
from aprfmt.inference.backends import PLACEMENTS
from aprfmt.inference.backends.base import ITEM_SIZES, QUERY_BLOCK, ROWS
from aprfmt.inference.capture import PointInstance, point_instances
from aprfmt.inference.device import DeviceChoice
from aprfmt.inference.engines.point_shapes import point_shapes
from aprfmt.inference.expert_blocks import block_shape
from aprfmt.inference.layer_heads import compress_rate, head_dim_of_layer, kv_head_count
from aprfmt.inference.parity.matched_weights import rows_through_encoding
from aprfmt.inference.point_placement import has_mixer, mixer_of_layer
from aprfmt.inference.points import POINTS
from aprfmt.inference.recurrence import CHUNK
from aprfmt.inference.rows import FREE, StoredRows
from aprfmt.inference.running import RunRequest
from aprfmt.inference.weights import free_budget, free_memory
from aprfmt.model import Model
from aprfmt.model.completeness import check_runnable
from aprfmt.tensors.view import View

SMALL_QUERY_BLOCK = 128  # query rows that the numpy backend computes scores of at a time
_DELTA_SIZES = ("value_heads", "key_dim", "value_dim")
_AFTER = 1 << 30  # stands for a layer after all others
# Points whose values another point's replace, or that are counted by themselves.
_TRANSIENT = frozenset(
    (
        *("scores", "probs", "k_cache", "v_cache", "q_mm", "q_b", "k_mm", "v_mm"),
        *("q_a", "q_a_norm", "kv_a", "kv_a_norm", "k_pe", "k_pe_rope", "delta_qkv"),
        *("q_norm", "k_norm", "v_norm", "k_rope", "q_attn", "k_attn", "attn_mixed"),
    )
)
# Read on the host, as numbers: an expert's bias of the choice, or its factor; the experts that a
# table lists for a token; an activation's numbers.
_ON_HOST = ("exp_probs_b.bias", "ffn_down_exps.scale", "ffn_gate_tid2eid.weight", "ffn_act.")
# Weights that `Backend.router` multiplies in float32 at least: there it takes their numbers.
_WIDE_PRODUCTS = ("hc_attn_fn", "hc_ffn_fn", "output_hc_fn")
# Of the roles that GGUF keeps in float32, those that are multiplied, or looked up, as others are.
_MULTIPLIED = ("ffn_gate_inp_shexp", "position_embd", "altup_correct_coef", "altup_predict_coef")


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device; `free_bytes` is None where the device is not here."""

    device: str
    weights_bytes: int
    cache_bytes: int
    peak_bytes: int
    free_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the bytes as commands print them."""
        return asdict(self)

    @property
    def fits(self) -> bool:
        """Whether the peak is no more than the free bytes; True where these are not known."""
        return self.free_bytes is None or self.peak_bytes <= self.free_bytes


@dataclass(frozen=True)
class Estimate:
    """What a run takes: `read_bytes` of the file, and memory on each device.

    `values_bytes` are what a trace writes to disk of the points it records.
    """

    ran: str
    tokens: int
    steps: int
    read_bytes: int
    devices: tuple[DeviceMemory, ...]
    values_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as commands print it."""
        return asdict(self) | {"devices": [one.to_json() for one in self.devices]}


@dataclass(frozen=True)
class Placement:
    """Where a backend computes, and in what form it holds weights.

    `gpus` has (name, free bytes or None) of each GPU, empty on the CPU. `keeps_encoded` says of an
    encoding whether such a matrix stays encoded on a GPU, `multiplies_stored` whether the CPU
    multiplies up to `few_rows` rows with its stored bytes, which are copied at use `copied_at`.
    `fused`: operations are fused on a GPU, `native`: C kernels compute on the CPU. `workspace` is
    what products take on each stream, `pinned` the host memory of uploads, `panel` the most that is
    decoded of a weight at a time, all in bytes. `share` of a GPU's free memory is for weights.
    """

    dtype: str
    torch: bool
    deterministic: bool
    gpus: tuple[tuple[str, int | None], ...]
    fused: bool
    native: bool
    keeps_encoded: Callable[[str], bool]
    multiplies_stored: Callable[[str], bool]
    few_rows: int
    copied_at: int
    workspace: int = 0
    pinned: int = 0
    panel: int = 0
    share: float = 1.0

    @property
    def itemsize(self) -> int:
        """Bytes of an activation's element."""
        return ITEM_SIZES[self.dtype]

    @property
    def wide_itemsize(self) -> int:
        """Bytes of an element in sums and states."""
        return max(4, self.itemsize)

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices that memory is counted on, the host last."""
        return (*(name for name, _ in self.gpus), "cpu")

    def device_of_layer(self, layer: int, n_layers: int) -> str:
        """Return the device that computes a layer; -1 is before the layers, n_layers after."""
        at = min(max(layer, 0), n_layers - 1)
        return self.devices[at * max(1, len(self.gpus)) // n_layers]

    def free(self) -> list[int | None]:
        """Return the free bytes of each of `devices`; None where that is not known."""
        return [*(free for _, free in self.gpus), free_memory()]

    def budget(self) -> int:
        """Return the bytes that weights may take by default; no limit for a GPU not here."""
        if not self.gpus:
            return free_budget()
        known = [free for _, free in self.gpus if free is not None]
        return int(sum(known) * self.share) if known else 1 << 62


def _open_placement(choice: DeviceChoice, deterministic: bool) -> Placement:
    """Return where a run holds weights and values; UsageError if its memory cannot be estimated.

    Raises BackendUnavailableError for a device or dtype that the backend does not have.
    """
    if choice.is_engine or choice.backend not in PLACEMENTS:
        raise UsageError(
            f"{choice}: --dry-run knows what our own backends allocate, expected "
            f"{' or '.join(PLACEMENTS)}; {choice.backend} manages its memory itself"
        )
    found: Placement = load_attribute(PLACEMENTS[choice.backend])(
        choice.device, choice.dtype, deterministic
    )
    return found


@dataclass(frozen=True)
class UsedWeight:
    """One weight as a run reads it: `rows` of the prompt multiply it, 0 if it stays on the host.

    `through` is the encoding that its numbers are rounded by, "" for none. `uses` is how often few
    rows multiply it. `is_matrix`: inputs are multiplied with it, or rows looked up in it, as it is
    stored; anything else is placed as numbers. `looked_up`: it is a table of which single rows are
    read. `last`: it is first used after the layers.
    """

    key: str
    tensor: View
    through: str
    rows: float
    uses: float
    is_matrix: bool
    looked_up: bool
    last: bool

    def placed(self, on: Placement) -> tuple[int, int, int]:
        """Return the bytes of the weight: (once placed, more while decoded, more on the host).

        A GPU's weight is decoded on the host, which takes the third number there. It is 0 where
        the host computes.
        """
        if not self.rows:
            return 0, 0, 0
        size, row = math.prod(self.tensor.shape), ENCODINGS.get(self.tensor.encoding)
        stored = "" if row is None else row.numpy  # experts may have several encodings
        decoded = 8 if "F64" in self.tensor.encodings else 4
        if self.through:
            rest = 8 * size + find_encoding(self.through).nbytes(self.tensor.shape)
            return size * on.itemsize, rest, 0
        by_rows = StoredRows(self.tensor).by_rows
        if on.gpus:
            encoded = self.is_matrix and on.keeps_encoded(self.tensor.encoding)
            if encoded and by_rows:
                return len(self.tensor.data or b""), 0, 0
            whole = self.tensor.whole
            if encoded and whole is not None and ABSMAX in whole.parts:
                return whole.info.nbytes + 4 * math.prod(whole.parts[ABSMAX].info.shape) + 64, 0, 0
            plain = by_rows and stored in ITEM_SIZES
            if plain:
                same = stored == on.dtype
                return size * on.itemsize, 0 if same else self.tensor.nbytes, 0
            return size * on.itemsize, 4 * size, 4 * size * (1 + (whole is None))
        if self.looked_up and by_rows:
            return 0, 0, 0
        copied = self._copied_bytes(on) if self._has_kernel(on) and self.uses else 0
        if self._has_kernel(on) and self.rows <= on.few_rows:
            return copied, 0, 0
        whole = self.tensor.whole
        stacked = self.is_matrix and len(self.tensor.shape) == 3  # read one by one, as copies
        if whole is not None and not whole.parts and stored in FREE and not stacked:
            if decoded == on.itemsize:  # a view of the mapped file, which torch copies
                return size * on.itemsize * on.torch, 0, 0
        # Gathered or moved elements are copied once more than what is decoded as it is stored.
        copies = (decoded != on.itemsize) + (whole is None)
        return size * on.itemsize + copied, size * decoded * copies, 0

    def _has_kernel(self, on: Placement) -> bool:
        """Return whether a C kernel multiplies few rows with the stored bytes as they are."""
        return (
            self.is_matrix
            and self.tensor.data is not None
            and on.multiplies_stored(self.tensor.encoding)
        )

    def _copied_bytes(self, on: Placement) -> int:
        """Return the bytes of the copy that a run makes of a weight's stored bytes; 0 for none.

        It copies those that it uses often, and those whose rows are not consecutive in the file.
        """
        data = self.tensor.data
        assert data is not None
        pieces = sum(1 for _ in data.runs(0, len(data)))
        gathered = pieces > 1 and len(self.tensor.shape) == 2
        return len(data) if gathered or self.uses >= on.copied_at else 0


def estimate_run(model: Model, request: RunRequest, steps: int) -> Estimate:
    """Return the memory that a prompt of `request.ids` and `steps` generated tokens take.

    Raises UsageError for an engine or a backend whose memory is not known here.
    """
    tokens = len(request.ids or ())
    return _estimate(model, request, tokens, steps, 1, cached=tokens + steps)


def estimate_trace(model: Model, request: RunRequest, plain: Sequence[int] = ()) -> Estimate:
    """Return the memory and disk space that recording a request's points takes.

    If `plain` has rows, their logits are computed once more without recording. Values of recorded
    points go to disk one by one, as they come.
    """
    tokens = len(request.ids or ())
    rows = _row_count(request.logits_rows, tokens - request.behind)
    found = _estimate(
        model,
        request,
        tokens,
        0,
        max(rows, len(plain)),
        cached=tokens if request.behind or plain else 0,
        traced=True,
    )
    return replace(found, values_bytes=_recorded_bytes(model, request, tokens, rows))


def add_devices(runs: Sequence[Estimate]) -> tuple[DeviceMemory, ...]:
    """Return the memory by device of several runs made in turn, each left open after it.

    Devices are in the order of their first use. Weights and caches add up; a run's peak comes on
    top of those of the runs before.
    """
    found: dict[str, DeviceMemory] = {}
    for one in (device for run in runs for device in run.devices):
        before = found.get(one.device, replace(one, weights_bytes=0, cache_bytes=0, peak_bytes=0))
        open_bytes = before.weights_bytes + before.cache_bytes
        found[one.device] = replace(
            before,
            weights_bytes=before.weights_bytes + one.weights_bytes,
            cache_bytes=before.cache_bytes + one.cache_bytes,
            peak_bytes=max(before.peak_bytes, open_bytes + one.peak_bytes),
        )
    return tuple(found.values())


def _row_count(rows: Any, tokens: int) -> int:
    """Return how many rows of logits `rows` names in a pass of `tokens` tokens."""
    if isinstance(rows, str):
        return tokens if rows == "all" else 1
    return len(rows)


def _estimate(
    model: Model,
    request: RunRequest,
    tokens: int,
    steps: int,
    logits: int,
    *,
    cached: int,
    traced: bool = False,
) -> Estimate:
    """Return the estimated memory of a run, in bytes for each device.

    `tokens` is the number of tokens in the longest pass, `steps` the number of passes, `logits` the
    number of rows of logits, and `cached` the number of tokens in the cache. `traced`: no
    operations are fused, since points inside them are recorded.
    """
    check_runnable(model.resolution, model.path)
    on = _open_placement(request.choice, request.deterministic)
    weights = list(_used_weights(model, on, request, tokens, steps, logits))
    n_layers = int(model.hyper["n_layers"])
    placed, peaks, ends = _place_weights(on, weights, n_layers, request.memory)
    cache = _cache_bytes(model, on, cached) if cached else {}
    layers, head = _activation_bytes(model, on, tokens, logits, traced)
    extra = _extra_bytes(on, weights)
    few = len(on.gpus) == 1 and not on.deterministic
    if steps > 1 and few and (not on.fused or model.hyper["n_experts"]):
        # The second step runs on a separate stream, which gets a workspace too.
        head = max(head, on.workspace)
    devices = []
    for name, free in zip(on.devices, on.free(), strict=True):
        held = placed.get(name, 0) + cache.get(name, 0) + extra.get(name, 0)
        computes = not on.gpus or name != "cpu"
        peak = max(
            held - ends.get(name, 0) + layers * computes,
            held + head * computes,
            held - placed.get(name, 0) + peaks.get(name, 0),
        )
        devices.append(DeviceMemory(name, placed.get(name, 0), cache.get(name, 0), peak, free))
    read = sum(
        4 * math.prod(one.tensor.shape) if one.through else StoredRows(one.tensor).nbytes
        for one in weights
    )
    return Estimate(str(request.choice), tokens, steps, read, tuple(devices))


def _used_weights(
    model: Model, on: Placement, request: RunRequest, tokens: int, steps: int, logits: int
) -> Iterator[UsedWeight]:
    """Yield the weights of a run in the order in which it first uses them."""
    through: frozenset[str] = frozenset()
    if request.through is not None:
        rows = rows_through_encoding(model, request.through, lambda _: "", lambda *_: "changed")
        through = frozenset(key for key, changed in rows.items() if changed)
    tied = "output.weight" not in model.roles and model.spec.block.head != "none"
    experts, used = int(model.hyper["n_experts"] or 0), int(model.hyper["n_experts_used"] or 0)
    last = ("token_embd" if tied and not on.gpus else "output", "cls")
    order = {key: _use_order(key, last) for key in model.roles}
    for key in sorted(model.roles, key=order.__getitem__):
        few = tokens <= on.few_rows
        share = used / experts if "_exps" in key and experts else 1.0
        table = key in ("token_embd.weight", "position_embd.weight", "per_layer_token_embd.weight")
        head = key == "output.weight" or (tied and key == "token_embd.weight")
        yield UsedWeight(
            key,
            model.roles[key],
            request.through or "" if key in through else "",
            0 if split_key(key)[1].startswith(_ON_HOST) else logits if head else tokens * share,
            (steps + (few or head)) * share,
            _is_matrix(key, model, on),
            table and not head,
            order[key][0] == _AFTER,
        )


def _is_matrix(key: str, model: Model, on: Placement) -> bool:
    """Return whether a run multiplies inputs with a weight as it is stored, or looks up rows in it.

    False for a norm, a bias or a kernel, and for what torch multiplies in float32, as a router.
    """
    name, _, kind = split_key(key)[1].rpartition(".")
    if kind != "weight" or len(model.roles[key].shape) not in (2, 3):
        return False
    if name in _WIDE_PRODUCTS or name == "ffn_gate_inp":
        rounded = name == "ffn_gate_inp" and model.spec.block.router_cast in ("weights", "logits")
        return rounded or on.deterministic or not on.torch
    return name in _MULTIPLIED or not name.endswith((*F32_ROLES, "_ape"))


def _use_order(key: str, last: tuple[str, ...]) -> tuple[int, str]:
    """Return a sort key of a role key: roles of no layer come first, those named `last` last."""
    layer, role = split_key(key)
    if layer is None:
        return (_AFTER if role.startswith(last) else -1), key
    return layer, key


def _place_weights(
    on: Placement, weights: Iterable[UsedWeight], n_layers: int, memory: int | None
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return three {device: bytes}: of placed weights, at the peak while placing, of the last.

    The peak counts a weight while it is decoded. The last are the placed weights that are first
    used after the layers. `memory` is the budget in bytes (None: the default). What does not fit is
    decoded at each use.
    """
    budget = on.budget() if memory is None else memory
    placed: dict[str, int] = {}
    peaks: dict[str, int] = {}
    ends: dict[str, int] = {}
    for weight in weights:
        layer = split_key(weight.key)[0]
        if layer is None:
            layer = n_layers if weight.key.startswith(("output", "cls")) else -1
        device = on.device_of_layer(layer, n_layers)
        size, rest, host = weight.placed(on)
        before = placed.get(device, 0)
        if "_exps" in weight.key and len(weight.tensor.shape) > 1:
            parts = weight.tensor.shape[0]
            fits = parts if not size else min(parts, max(0, budget) // (-(-size // parts)))
            whole = not on.gpus and not StoredRows(weight.tensor).by_rows
            size, rest = size // parts * fits, rest + size if whole else rest // parts
        elif size > budget:
            size, rest = 0, size + rest
        budget -= size
        placed[device] = before + size
        ends[device] = ends.get(device, 0) + size * weight.last
        peaks[device] = max(peaks.get(device, 0), before + size + rest)
        if host:
            peaks["cpu"] = max(peaks.get("cpu", 0), host)
    return placed, peaks, ends


def _cache_bytes(model: Model, on: Placement, tokens: int) -> dict[str, int]:
    """Return {device: bytes} of the keys, values and states of a sequence of `tokens` tokens."""
    hp, block, rows = model.hyper, model.spec.block, ROWS
    while rows < tokens:
        rows *= 2
    found: dict[str, int] = {}
    for layer in range(int(hp["n_layers"])):
        device = on.device_of_layer(layer, int(hp["n_layers"]))
        kind = mixer_of_layer(block, hp, layer)
        size = 0
        if has_mixer(block, hp, layer) and hp["own_kv_layers"][layer]:
            if block.attention == "compressed":
                size = (rows * int(hp["head_dim"]) + _window_size(hp, layer, tokens)) * on.itemsize
            elif kind == "none" or block.recurrence_place == "parallel":
                size = rows * _key_value_width(block.attention, hp, layer) * on.itemsize
            if (
                block.indexer != "none"
                and hp["index_layers"][layer]
                and block.attention != "compressed"
            ):
                size += rows * int(hp["index_head_dim"]) * on.itemsize
        if kind != "none":
            kernels = (
                math.prod(view.shape[:-1]) * (view.shape[-1] - 1)
                for key, view in model.roles.items()
                if key.startswith(f"L{layer}.")
                and "conv" in key
                and len(view.shape) > 1
                and key.endswith(".weight")
                and "proj" not in key
            )
            size += sum(kernels) * on.itemsize + _state_size(kind, hp) * on.wide_itemsize
        found[device] = found.get(device, 0) + size
    return found


def _window_size(hp: Mapping[str, Value], layer: int, tokens: int) -> int:
    """Return how many numbers a layer's compressors keep after `tokens` tokens.

    They keep the keys of full windows, and the tokens of the next window. 0 without compressors.
    """
    rate = compress_rate(hp, layer)
    if not rate:
        return 0
    overlaps, windows = bool(hp["index_layers"][layer]), tokens // rate
    rest = tokens - windows * rate + (rate if overlaps and windows else 0)
    width = int(hp["head_dim"]) + (int(hp["index_head_dim"]) if overlaps else 0)
    return width * (windows + rest * (4 if overlaps else 2))


def _key_value_width(kind: str, hp: Mapping[str, Value], layer: int) -> int:
    """Return how many numbers of keys and values a layer's attention keeps for each token."""
    if kind == "mla":
        key = int(hp["qk_nope_head_dim"]) + int(hp["qk_rope_head_dim"])
        return int(hp["n_heads"]) * (key + int(hp["value_head_dim"]))
    key, value = head_dim_of_layer(hp, layer), hp["value_head_dim"]
    same = value is None or value == hp["head_dim"]
    return kv_head_count(hp, layer) * (key + (key if same else int(value)))


def _state_size(kind: str, hp: Mapping[str, Value]) -> int:
    """Return how many numbers the state of a layer's recurrence has; 0 for a convolution alone."""
    if kind in ("gated_delta", "kimi_delta"):
        heads, key = int(hp["delta_value_heads"]), int(hp["delta_key_dim"])
        return heads * key * int(hp["delta_value_dim"])
    if kind in ("mamba", "mamba2"):
        return int(hp["ssm_size"]) * int(hp["ssm_state"])
    return int(hp["n_heads"]) * int(hp["head_dim"]) ** 2 if kind == "lightning" else 0


def _captured_shapes(model: Model, tokens: int) -> Iterator[tuple[PointInstance, tuple[int, ...]]]:
    """Yield (point, shape) of every point that a pass of `tokens` tokens computes, each once."""
    hp, block = model.hyper, model.spec.block
    sizes = dict(hp)
    if block.recurrence in ("gated_delta", "kimi_delta"):
        heads, width, value = (int(hp[f"delta_{name}"]) for name in _DELTA_SIZES)
        channels = 2 * int(hp["delta_key_heads"] or heads) * width + heads * value
        decays = heads * (width if block.recurrence == "kimi_delta" else 1)
        sizes |= {"channels": channels, "delta_channels": channels, "delta_decays": decays}
    elif block.recurrence == "short_conv":
        sizes["channels"] = int(hp["hidden_size"])
    elif block.recurrence in ("mamba", "mamba2"):
        groups = int(hp["ssm_groups"] or 1) if block.recurrence == "mamba2" else 0
        sizes["channels"] = int(hp["ssm_size"]) + 2 * groups * int(hp["ssm_state"])
        sizes["ssm_heads"] = sizes.get("ssm_heads") or sizes["ssm_size"]
    points = point_instances(block, hp, model.roles)
    for key, shape in point_shapes(sizes, points, tokens).items():
        if not points[key].alias_of:
            yield points[key], shape


def _activation_bytes(
    model: Model, on: Placement, tokens: int, logits: int, traced: bool
) -> tuple[int, int]:
    """Return the bytes that activations take at most: (in a layer, in the head).

    They are the stream and what one mixer or one MLP computes from it. `traced`: nothing is
    fused.
    """
    hp, block = model.hyper, model.spec.block
    by_layer: dict[int, dict[str, int]] = {}
    for place, shape in _captured_shapes(model, tokens):
        by_layer.setdefault(place.layer, {})[place.point.name] = math.prod(shape)
    stream = tokens * int(hp["hidden_size"])
    parts = [
        part
        for layer in range(int(hp["n_layers"]))
        for part in (
            _mixer_size(model, on, by_layer.get(layer, {}), tokens, layer, traced),
            _mlp_size(model, on, by_layer.get(layer, {}), tokens, layer),
        )
    ]
    head = logits * int(hp["vocab_size"]) * (3 if hp["final_softcap"] is not None else 1)
    copies = 2 * int(hp["altup_streams"] or 1) if block.streams == "altup" else 1
    masks = 2 * tokens * tokens
    return (
        (copies * stream + max(parts, default=0)) * on.itemsize + masks,
        ((copies + 1) * stream + head) * on.itemsize + masks,
    )


def _mixer_size(
    model: Model, on: Placement, sizes: Mapping[str, int], tokens: int, layer: int, traced: bool
) -> int:
    """Return the most elements of `on.itemsize` bytes that a layer's mixer holds at a time.

    `sizes` are those of the layer's points, in elements. Scores of a block of queries are held,
    with copies that are wider where an element has less than 8 bytes; those of all queries if the
    pass is traced, and none where attention is one fused operation.
    """
    names = list(POINTS)
    inside = names[names.index("attn_norm") : names.index("attn_out")]
    total = sum(sizes.get(name, 0) for name in inside if name not in _TRANSIENT)
    kind = mixer_of_layer(model.spec.block, model.hyper, layer)
    total += _recurrence_size(kind, model.hyper, tokens) * on.wide_itemsize // on.itemsize
    if "scores" in sizes:
        rows = min(tokens, QUERY_BLOCK if on.torch else SMALL_QUERY_BLOCK)
        capped = model.hyper["attn_softcap"] is not None or model.spec.block.sinks
        if traced or capped or not on.torch or on.deterministic:
            forms = 1 if on.native and not traced else 8 // on.itemsize
            total += max(forms, 1) * sizes["scores"] // tokens * (tokens if traced else rows)
        elif not on.gpus:
            total += tokens * tokens  # the mask, as numbers
    return total


def _recurrence_size(kind: str, hp: Mapping[str, Value], tokens: int) -> int:
    """Return how many numbers a recurrent layer holds for one chunk: tokens computed together."""
    rows = min(tokens, CHUNK)
    if kind in ("mamba", "mamba2"):
        inner, numbers = int(hp["ssm_size"]), int(hp["ssm_state"])
        return 3 * rows * inner * (numbers if kind == "mamba" else 1)
    if kind in ("gated_delta", "kimi_delta"):
        heads, key, value = (int(hp[f"delta_{name}"]) for name in _DELTA_SIZES)
        return heads * rows * (3 * rows + 4 * key + 4 * value)
    return 0 if kind in ("none", "short_conv") else 3 * _state_size(kind, hp)


def _mlp_size(
    model: Model, on: Placement, sizes: Mapping[str, int], tokens: int, layer: int
) -> int:
    """Return how many numbers a layer's MLP or its experts hold at a time."""
    hidden = tokens * int(model.hyper["hidden_size"])
    dense = (2 if on.native and not on.torch else 3) * sizes.get("ffn_up", 0)
    if "experts" not in sizes:
        return hidden + dense
    experts, used = int(model.hyper["n_experts"]), int(model.hyper["n_experts_used"])
    blocks, size = block_shape(tokens, used, experts)
    stack = model.roles[f"L{layer}.ffn_down_exps.weight"]
    width = int(stack.shape[-1])
    if not on.gpus or on.keeps_encoded(stack.encoding):  # one expert at a time
        rows = -(-tokens * used // experts)
        return 2 * hidden + rows * (3 * width + int(model.hyper["hidden_size"]))
    rows = blocks * size
    return 2 * hidden + rows * max(3 * width, 2 * int(model.hyper["hidden_size"]) + width)


def _extra_bytes(on: Placement, weights: Sequence[UsedWeight]) -> dict[str, int]:
    """Return {device: bytes} of buffers: cuBLAS's workspace, a decoded weight, pinned memory.

    {} without a GPU.
    """
    if not on.gpus:
        return {}
    encoded = [
        min(on.panel, math.prod(one.tensor.shape[-2:]) * on.itemsize)
        for one in weights
        if one.is_matrix
        and on.keeps_encoded(one.tensor.encoding)
        and one.rows > 1
        and not one.looked_up
    ]
    found = {name: on.workspace + max(encoded, default=0) for name, _ in on.gpus}
    return found | {"cpu": on.pinned}


def _recorded_bytes(model: Model, request: RunRequest, tokens: int, logits: int) -> int:
    """Return the bytes of the values that a trace records, by the shapes of its points."""
    rows = tokens - request.behind
    chosen = rows if request.positions == "all" else 1
    if not isinstance(request.positions, str):
        chosen = len(set(request.positions))
    total = 0
    for place, shape in _captured_shapes(model, rows):
        if request.wanted is not None and place.key not in request.wanted:
            continue
        kind, size = place.point.rows, math.prod(shape)
        if kind == "keys" and not request.behind:
            continue
        if kind == "logits":
            size = size // rows * min(logits, chosen)
        elif kind in ("tokens", "scores"):
            size = size // rows * chosen
        total += size
    return total * (8 if request.choice.dtype == "float64" else 4)
