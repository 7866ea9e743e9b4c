"""The files that a report's page is made of, put together by `aprfmt.cli.html`.

`frame.html` is the page; `base` is in all of them; `report` is the layout of `diff`, `diagnose` and
`parity`, which their scripts fill from what the command's `--json` prints; `trace` is its own.
"""
