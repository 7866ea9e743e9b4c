"""Every file of the reference writer reads as its manifest states, and writes back bit for bit."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.base.protocols import LazyTensor
from aprfmt.codecs import decode
from aprfmt.errors import FormatError
from aprfmt.formats.apr.reader import AprSource, open_source
from aprfmt.formats.apr.writer import open_sink

# Our notes for files that the reference, or only other readers, refuse.
REFUSED = {
    "refuse_column_major.apr": "LAYOUT-002",
    "refuse_duplicate_names.apr": "twice",
    "derived/header_crc_mismatch.apr": "checksum",
    "derived/truncated_data.apr": "missing",
}
NOTED = {
    "derived/unsorted_index.apr": "not sorted",
    "derived/no_footer.apr": "no footer",
    "derived/magic_APR2_v2_layout.apr": "legacy magic",
    "derived/magic_APRN_v2_layout.apr": "legacy magic",
    "derived/legacy_dtype_ids_8_9.apr": "legacy code 8",
    "derived/realizar_lz4_framing.apr": "compressed",
    "derived/realizar_zstd_framing.apr": "compressed",
}


def manifest(folder: Path) -> dict[str, dict[str, Any]]:
    files: list[dict[str, Any]] = json.loads((folder / "manifest.json").read_text())["files"]
    return {entry["file"]: entry for entry in files}


def readable(folder: Path) -> dict[str, dict[str, Any]]:
    found = {name: entry for name, entry in manifest(folder).items() if name not in REFUSED}
    assert len(found) >= 20
    return found


def test_the_manifest_is_whole(apr_reference: Path) -> None:
    for name, entry in manifest(apr_reference).items():
        data = (apr_reference / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"], name


def test_refused_files_are_refused(apr_reference: Path) -> None:
    entries = manifest(apr_reference)
    for name, says in REFUSED.items():
        assert name in entries
        with pytest.raises(FormatError, match=says):
            open_source(apr_reference / name)
    stated = {
        name for name, entry in entries.items() if entry["reference_reader"].startswith("refuses")
    }
    assert stated <= set(REFUSED)


def test_odd_files_are_remarked_on_and_the_others_not(apr_reference: Path) -> None:
    for name in readable(apr_reference):
        with open_source(apr_reference / name) as source:
            texts = " ".join(note.text for note in source.notes)
        assert NOTED.get(name, "") in texts
        assert bool(texts) == (name in NOTED), (name, texts)


def test_header_metadata_and_footer(apr_reference: Path) -> None:
    for name, entry in readable(apr_reference).items():
        if "header" not in entry:
            continue
        with open_source(apr_reference / name, partial=True) as source:
            index = source.files.index(apr_reference / name)
            parsed = source.shards[index].parsed
            header, stated = parsed.header, entry["header"]
            assert header.magic.hex() == stated["magic_hex"]
            assert [header.major, header.minor] == stated["version"]
            assert header.flags == stated["flags"]
            assert header.tensor_count == stated["tensor_count"]
            assert header.metadata_offset == stated["metadata_offset"]
            assert header.metadata_size == stated["metadata_size"]
            assert header.index_offset == stated["tensor_index_offset"]
            assert header.data_offset == stated["data_offset"]
            assert f"{header.checksum:08x}" == stated["header_crc32"]
            raw = bytes(parsed.metadata_raw)
            assert hashlib.sha256(raw).hexdigest() == entry["metadata_sha256"]
            assert parsed.metadata == entry["metadata"]
            assert parsed.buffer[-4:].tobytes()[::-1].hex() == entry["footer_crc32"]
            assert source.footer_state() == "present"
            assert source.footer_matches() is True


def check_tensor(tensor: LazyTensor, stated: dict[str, Any], what: str) -> None:
    info = tensor.info
    assert info.name == stated["name"], what
    assert list(info.shape) == stated["shape"], what
    assert (info.encoding, info.nbytes) == (stated["dtype"], stated["size"]), what
    raw = bytes(tensor.raw())
    assert hashlib.sha256(raw).hexdigest() == stated["sha256"], what
    assert raw[:16].hex() == stated["raw_first16_hex"], what
    values = decode(info.encoding, {"": raw}, info.shape, row_bytes=info.row_bytes)
    if "values" in stated:  # what the reference stores and does not decode
        assert values.reshape(-1).tolist() == stated["values"], what
        return
    found = np.ascontiguousarray(values, "<f4")
    assert found.size == stated["f32_count"], what
    digest = hashlib.sha256(found.tobytes()).hexdigest()
    # The reference reads row-padded matrices flat, hence wrong; the manifest gives both.
    assert digest == stated.get("row_aware_f32_sha256", stated["f32_le_sha256"]), what
    bits = [f"{value:08x}" for value in found.reshape(-1)[:8].view("<u4").tolist()]
    if "row_aware_f32_sha256" not in stated:
        assert bits == stated["f32_first8_bits"], what


def test_every_tensor_has_its_bytes_and_decoded_values(apr_reference: Path) -> None:
    count = 0
    for name, entry in readable(apr_reference).items():
        with open_source(apr_reference / name, partial=True) as source:
            for stated in entry.get("tensors") or ():
                check_tensor(source.tensors[stated["name"]], stated, f"{name} {stated['name']}")
                count += 1
            if "same_tensors_as" in entry:
                with open_source(apr_reference / entry["same_tensors_as"]) as twin:
                    assert list(source.tensors) == list(twin.tensors)
                    for key, tensor in source.tensors.items():
                        assert tensor.raw() == twin.tensors[key].raw()
    assert count > 100


def copy(source: AprSource, path: Path, **changes: Any) -> bytes:
    sink = open_sink(path, like=source, force=True)
    with sink:
        infos = sink.order([tensor.info for tensor in source.tensors.values()])
        sink.plan({**source.metadata, **changes}, infos)
        for info in infos:
            sink.write(info.name, [source.tensors[info.name].raw()])
    return path.read_bytes()


def test_an_unchanged_rewrite_gives_the_whole_file_again(
    apr_reference: Path, tmp_path: Path
) -> None:
    count = 0
    for name in readable(apr_reference):
        with open_source(apr_reference / name) as source:
            if len(source.shards) > 1 or source.shards[0].parsed.expanded:
                continue
            assert copy(source, tmp_path / "x.apr") == (apr_reference / name).read_bytes(), name
            count += 1
    assert count >= 17


def test_a_rewrite_with_other_metadata_keeps_flags_and_data(
    apr_reference: Path, tmp_path: Path
) -> None:
    for name in ("spm_tokenizer.apr", "streaming_order.apr", "lz4_flag_only.apr"):
        with open_source(apr_reference / name) as source:
            data = copy(source, tmp_path / "x.apr", note="new")
            with open_source(tmp_path / "x.apr") as again:
                assert again.metadata == {**source.metadata, "note": "new"}
                assert again.header.flags & ~0x0220 == source.header.flags & ~0x0221
                assert again.footer_matches() is True
                for key, tensor in source.tensors.items():
                    assert again.tensors[key].raw() == tensor.raw()
                    offset = tensor.info.offset - source.header.data_offset
                    assert again.tensors[key].info.offset - again.header.data_offset == offset
        assert data != (apr_reference / name).read_bytes()


def test_a_fresh_file_is_the_reference_writers(apr_reference: Path, tmp_path: Path) -> None:
    """Same tensors, same metadata, nothing copied: equal but for the flags callers choose."""
    for name, entry in readable(apr_reference).items():
        if name.startswith(("derived", "shard", "streaming")):
            continue
        with open_source(apr_reference / name) as source:
            sink = open_sink(tmp_path / "x.apr", force=True)
            with sink:
                infos = sink.order([tensor.info for tensor in source.tensors.values()])
                sink.plan(source.metadata, infos)
                for info in infos:
                    sink.write(info.name, [source.tensors[info.name].raw()])
        ours, theirs = (tmp_path / "x.apr").read_bytes(), (apr_reference / name).read_bytes()
        assert ours[8:40] == theirs[8:40], name
        assert ours[44:-4] == theirs[44:-4], name
        if entry["header"]["flags"] == int.from_bytes(ours[6:8], "little"):
            assert ours == theirs, name
