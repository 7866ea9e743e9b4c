"""Tokenizers of all formats: load one, write one in another format, list its facts."""
