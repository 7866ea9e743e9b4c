"""Estimates a run's or trace's memory on each device by passes on ghosts, arrays without numbers.

So which weights are decoded, copied or streamed, how the cache grows and what is alive at a
time are the run's own. Stored weights are not read.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from aprfmt.base.registry import load_attribute
from aprfmt.errors import UsageError
from aprfmt.inference.backends import DRY
from aprfmt.inference.dry.backend import DryBackend
from aprfmt.inference.dry.ghosts import Ghost, Memory
from aprfmt.inference.dry.rows import GhostRows, ThroughGhost
from aprfmt.inference.parity.matched import rows_through_encoding
from aprfmt.inference.record import Record
from aprfmt.inference.running import RunRequest
from aprfmt.inference.session import Numbers, Session
from aprfmt.inference.weights import Weights, free_budget
from aprfmt.model import Model
from aprfmt.model.completeness import check_runnable

# Steps that run one by one: by then every weight is placed where it stays.
STEPS = 40


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


def estimate_run(model: Model, request: RunRequest, steps: int) -> Estimate:
    """Return the memory that a prompt of `request.ids` and `steps` generated tokens take.

    Raises UsageError for an engine or a backend whose memory is not known here.
    """
    session = _open_session(model, request)
    ids = list(request.ids or ())
    session.extend(ids)
    _run_steps(session, ids[-1], steps)
    return _make_estimate(session, request, len(ids), steps)


def estimate_trace(model: Model, request: RunRequest, plain: Sequence[int] = ()) -> Estimate:
    """Return the memory and disk space that recording a request's points takes.

    If `plain` has rows, their logits are computed once more without recording. Values of recorded
    points go to disk one by one, as they come.
    """
    session, ids = _open_session(model, request), list(request.ids or ())
    values = 0

    def count_values(record: Record, found: Numbers) -> None:
        """Add the bytes of a recorded value to `values`."""
        nonlocal values
        values += found.size * (8 if record.dtype == "float64" else 4)

    wanted = tuple(session.points) if request.wanted is None else request.wanted
    session.trace(
        ids,
        wanted,
        positions=request.positions,
        keep=count_values,
        stop=False,
        logits_rows=request.logits_rows,
        behind=request.behind,
    )
    if plain:
        session.prefill(ids, list(plain))
    return replace(_make_estimate(session, request, len(ids), 0), values_bytes=values)


def add_devices(runs: Sequence[Estimate]) -> tuple[DeviceMemory, ...]:
    """Return the memory by device of runs made one after the other, each kept open.

    Devices are in the order of their first use. Weights and caches add up; a run's peak comes on
    top of those of the runs before.
    """
    found: dict[str, DeviceMemory] = {}
    for one in (device for run in runs for device in run.devices):
        before = found.get(one.device, replace(one, weights_bytes=0, cache_bytes=0, peak_bytes=0))
        kept = before.weights_bytes + before.cache_bytes
        found[one.device] = replace(
            before,
            weights_bytes=before.weights_bytes + one.weights_bytes,
            cache_bytes=before.cache_bytes + one.cache_bytes,
            peak_bytes=max(before.peak_bytes, kept + one.peak_bytes),
        )
    return tuple(found.values())


def _open_session(model: Model, request: RunRequest) -> Session:
    """Return a session whose backend and weights are ghosts; UsageError if the backend has none."""
    choice = request.choice
    if choice.is_engine or choice.backend not in DRY:
        raise UsageError(
            f"{choice}: --dry-run knows what our own backends allocate, expected "
            f"{' or '.join(DRY)}; {choice.backend} manages its memory itself"
        )
    check_runnable(model.resolution, model.path)
    backend: DryBackend = load_attribute(DRY[choice.backend])(
        choice.device,
        choice.dtype,
        deterministic=request.deterministic,
        used=int(model.hyper["n_experts_used"] or 0),
    )
    stored, through = partial(GhostRows, account=backend.host), request.through
    rows: dict[str, Any] = {key: stored(tensor) for key, tensor in model.roles.items()}
    if through is not None:
        changed = partial(ThroughGhost, account=backend.host)
        rows = rows_through_encoding(model, through, stored, changed)
    budget = backend.budget() if request.memory is None else request.memory
    weights = Weights(rows, free_budget() if budget is None else budget, str(model.path))
    return Session(model.spec, model.hyper, weights, backend)


def _run_steps(session: Session, token: int, steps: int) -> None:
    """Run `steps` steps of generation, returning nothing.

    The first STEPS run one by one. After them only the steps that enlarge the cache, and the
    last, are run: others take the same memory.
    """
    cache = session.cache
    assert cache is not None
    left = steps
    for _ in range(min(STEPS, steps)):
        session.extend([token])
        left -= 1
    while left:
        room = 0
        while cache.fits(room + 1) and room + 1 < left:
            room += 1
        cache.commit(room)
        session.ids += [token] * room
        session.extend([token])
        left -= room + 1


def _make_estimate(session: Session, request: RunRequest, tokens: int, steps: int) -> Estimate:
    """Return the estimate of a run from the memory accounts of a session that made it."""
    backend: Any = session.backend
    placed = [one for held in session.weights.holder.placed_tensors() for one in _ghosts_of(held)]
    weights = _bytes_by_device([*placed, *backend.copies])
    cache = {} if session.cache is None else _bytes_by_device(session.cache.arrays())
    devices = tuple(
        DeviceMemory(
            account.device,
            weights.get(account.device, 0),
            cache.get(account.device, 0),
            account.peak,
            free,
        )
        for account, free in zip(backend.accounts, backend.free(), strict=True)
    )
    read = session.weights.stored_bytes_used()
    return Estimate(str(request.choice), tokens, steps, read, devices)


def _ghosts_of(held: Any) -> list[Ghost]:
    """Return the ghosts that a placed weight consists of, one or more."""
    return [held] if isinstance(held, Ghost) else list(held.arrays)


def _bytes_by_device(arrays: Sequence[Ghost]) -> dict[str, int]:
    """Return {device: bytes} of the allocations that arrays lie in, each counted once."""
    memories: dict[int, Memory] = {id(one.memory): one.memory for one in arrays}
    found: dict[str, int] = {}
    for memory in memories.values():
        device = memory.account.device
        found[device] = found.get(device, 0) + memory.nbytes
    return found
