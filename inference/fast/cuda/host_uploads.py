"""Copies the host's numbers to the GPU for a pass; a recorded pass gets them from its inputs."""

from typing import Any

import numpy as np

from aprfmt.inference.backends.base import Array, Numbers
from aprfmt.inference.fast.cuda import memory
from aprfmt.inference.fast.graphs import NotRecordable, PassInputs


class HostUploads:
    """Copies numbers to one device; `recording` has the inputs of a recorded pass, or is None."""

    def __init__(self) -> None:
        """Start without a recording and without constants on the device."""
        self.recording: PassInputs | None = None
        self._constants: dict[tuple[str, bytes], Array] = {}

    @property
    def cached(self) -> Array | None:
        """The number of valid cache positions, on the device, in a step being recorded.

        None outside a recording, and in a recorded pass that has no cache.
        """
        return None if self.recording is None else self.recording.cached

    def refuse_in_recording(self, what: str) -> None:
        """Raise NotRecordable(what) if a pass is being recorded, for it may not read the host."""
        if self.recording is not None:
            raise NotRecordable(what)

    def row_numbers(self, x: Numbers | Array) -> Array:
        """Return row numbers as int64 on the device.

        In a pass being recorded they must be one of its inputs; NotRecordable is raised otherwise.
        """
        if memory.is_on_gpu(x):
            return x
        if self.recording is None:
            return memory.copy_to_gpu(np.ascontiguousarray(x, np.int64))
        return self.recording.find_rows(x)

    def constant(self, x: Numbers, dtype: Any) -> Array:
        """Return a small array on the device in `dtype`; arrays with equal bytes share one copy.

        In a pass being recorded an array that is not there yet raises NotRecordable.
        """
        key = (str(np.dtype(dtype)), x.tobytes())
        if key not in self._constants:
            self.refuse_in_recording("a constant is new")
            self._constants[key] = memory.copy_to_gpu(np.ascontiguousarray(x, dtype))
        return self._constants[key]

    def number_table(self, x: Numbers) -> Array:
        """Return numbers as a flat int64 array on the device.

        In a pass being recorded the array is allocated now and filled after the recording.
        """
        flat = np.ascontiguousarray(x, np.int64).reshape(-1)
        if self.recording is None or self.recording.after is None:
            return memory.copy_to_gpu(flat)
        room, fill = memory.allocate_for_later(flat.size)
        self.recording.after.append(lambda: fill(flat))
        return room
