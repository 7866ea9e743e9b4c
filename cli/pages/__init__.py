"""The files that a page is made of, put together by `aprfmt.cli.html_page`.

`frame.html` is the page; `base` is in all of them. `report` is the layout of `diff`, `diagnose` and
`parity`, `checks` of `validate` and `qa`, `model` and `trace` are those of `inspect` and `trace`;
`histogram`, `raster` and `treemap` are drawings that several use. Scripts fill them from what the
command's `--json` prints.
"""
