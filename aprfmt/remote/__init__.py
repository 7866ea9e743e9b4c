"""Bytes that lie elsewhere: addresses as paths, the sites they name, and files read by range.

Nothing here knows a format. `paths` is what the rest of the package imports; a site (`http`, `hub`,
`buckets`, `fsspec_sites`) is loaded when an address names it.
"""
