"""All rows, the open ones and the frozen ones."""

from tests.field import (
    frozen_coarse,
    frozen_configs,
    frozen_controls_copies,
    frozen_controls_same,
    frozen_engines,
    frozen_engines_more,
    frozen_files,
    frozen_packed,
    frozen_stacked,
    frozen_tokens,
    open_coarse,
    open_configs,
    open_controls_copies,
    open_controls_same,
    open_engines,
    open_engines_more,
    open_files,
    open_packed,
    open_stacked,
    open_tokens,
)
from tests.field.row import Row

OPEN: tuple[Row, ...] = (
    *open_engines.ROWS, *open_engines_more.ROWS, *open_stacked.ROWS, *open_coarse.ROWS,
    *open_files.ROWS, *open_packed.ROWS, *open_tokens.ROWS, *open_configs.ROWS,
    *open_controls_copies.ROWS, *open_controls_same.ROWS,
)  # fmt: skip
FROZEN: tuple[Row, ...] = (
    *frozen_engines.ROWS, *frozen_engines_more.ROWS, *frozen_stacked.ROWS, *frozen_coarse.ROWS,
    *frozen_files.ROWS, *frozen_packed.ROWS, *frozen_tokens.ROWS, *frozen_configs.ROWS,
    *frozen_controls_copies.ROWS, *frozen_controls_same.ROWS,
)  # fmt: skip
ROWS: tuple[Row, ...] = (*OPEN, *FROZEN)
BY_NAME = {row.name: row for row in ROWS}
