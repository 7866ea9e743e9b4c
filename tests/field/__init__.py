"""The project's own set for judging `diagnose`: faults that people met, and correct copies.

Every fault comes from a public thread (an issue, a pull request or a post), whose address stands in
its row, and is rebuilt on a tiny model by other tools than aprfmt: gguf's writer, safetensors,
transformers, torch, bitsandbytes, libgguf, or numpy by hand. Faults of engines are dumps by hooks
on a patched transformers model, or saved traces of a pass with one operation replaced.

Rows stand in two kinds of files. Which of them a row belongs to is decided by its name alone,
before anything is tuned (`tests.field.row.is_frozen`, a third of all names):

- `open_*.py`: to be looked at, run and tuned to as anyone likes;
- `frozen_*.py`: never looked at while the diagnosis is worked on and never tuned to. They only
  count. A frozen row that is answered wrongly is no reason to change the diagnosis: find the same
  kind of fault among the open rows or in a new one. A row is changed only if the row is wrong.

    python -m tests.field --frozen            the frozen rows: a line each, then the matrix
    python -m tests.field --open --only NAME  one open row
    python -m tests.field --frozen --write    the matrix into docs/notes/faults.md

A new row goes into the file that its name decides (`tests/field/test_field.py` holds it to that).
"""
