"""Reads files at addresses: paths for them, the sites they are on, and reading by range.

Nothing here knows a format. `paths` is what the rest of the package imports; a site (`http`, `hub`,
`buckets`, `fsspec_sites`) is loaded when an address names it.
"""
