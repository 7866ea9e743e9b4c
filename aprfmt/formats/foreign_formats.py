"""Names files and folders that no reader here opens: other programs' formats, by content or name.

A name only adds to a message: what a model file is, its content alone decides.
"""

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.base.text_escape import escape, shorten
from aprfmt.errors import UnsupportedError

if TYPE_CHECKING:
    from aprfmt.base.protocols import Region

_ELSEWHERE = (
    "which is not read here; take the model's safetensors or GGUF, or save it as safetensors with "
    "the program that made it"
)
_PICKLE = "a pickle, which runs code when loaded: convert it with what wrote it"
_PACKED = (
    "compressed as joblib and archives are ({}); joblib files hold pickles, which run code when "
    "loaded: convert it with what wrote it, or unpack the archive"
)
_GGML = (
    "a GGML file, as whisper.cpp and programs of before GGUF (August 2023) write it; take the "
    "checkpoint that it was made of. Of a llama model, llama.cpp's converter of that time makes "
    "GGUF"
)
_LLAMA2C = "an export of llama2.c, " + _ELSEWHERE
_CTRANSLATE2 = "model.bin"  # beside a list of tokens. Source: CTranslate2's ModelSpec.save
# Instructions that an Ollama Modelfile may begin with, after comments. Source: ollama's
# reference of Modelfiles.
_MODELFILE = re.compile(r"(?:\s*#[^\n]*\n)*\s*FROM\s+(\S+)", re.I)
# The oldest pickles are text: an early line pair `cMODULE\nNAME\n` names the function to call.
_TEXT_PICKLE = re.compile(rb"(?:\(|\(l?p?[0-9]*\n)?c[A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n")

# A web page, or the text that a hub sends in place of a file.
_PAGE = re.compile(
    rb"\s*(?:<!doctype html|<html|<\?xml|Entry not found|Repository not found|"
    rb"Invalid (?:username|credentials)|Access to model )",
    re.I,
)
_ANSWER = re.compile(rb'\s*\{\s*"error"\s*:', re.I)
_SAVED_PAGE = (
    "a web page saved in place of the file (a wrong address, or a login that was asked for); fetch "
    "it again: hf download OWNER/NAME FILE, or the address with /resolve/ for /blob/"
)

_SAVED_ERROR = (
    "a server's error message (JSON) saved in place of the file: {}; fetch it again with what it "
    "asks for"
)
_ZEROS = (
    "no file that was written: its first {} bytes and more are zero, as after an interrupted "
    "download or a save that was cut short; get it again"
)
# Source: the pointer files' specification of Git LFS: lines of a key and a value.
_POINTER, _POINTER_SIZE = b"version https://git-lfs", re.compile(rb"\nsize ([0-9]{1,19})\r?\n")

# Content that is recognised only for a better message: it runs code or is not a model file.
_FOREIGN: tuple[tuple[bytes, str], ...] = (
    (
        b"PK\x03\x04",
        "a zip archive that torch.save did not write, by the name of its first file; "
        "unpack it, and name the model inside",
    ),
    *((bytes([0x80, protocol]), _PICKLE) for protocol in range(2, 6)),
    (b"\x89HDF\r\n", "an HDF5 file (Keras?), " + _ELSEWHERE),
    (b"ggml", _GGML),
    (b"lmgg", _GGML),
    (b"tjgg", "a GGJT file of before August 2023; convert it to GGUF with an older llama.cpp"),
    (b"24ka", _LLAMA2C),
    (b"\x93NUMPY", "a NumPy array, not a model"),
)


# What compresses a single file: its first bytes, its name, and the command that unpacks it.
_COMPRESSED: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b", "gzip", "gzip -dk"),
    (b"BZh", "bzip2", "bzip2 -dk"),
    (b"\xfd7zXZ\0", "xz", "xz -dk"),
    (b"\x04\x22\x4d\x18", "lz4", "lz4 -dk"),
    (b"\x28\xb5\x2f\xfd", "zstd", "zstd -d"),
    *((bytes([0x78, level]), "zlib", "") for level in (0x01, 0x5E, 0x9C, 0xDA)),
)
_MODELS = (".gguf", ".safetensors", ".apr")

# Formats of other programs by extension. Their content is protobuf, a flatbuffer, a zip or an
# archive like any other, which says less than the name. Sources: the projects' own pages.
EXTENSIONS: Mapping[str, str] = {
    ".onnx": "an ONNX model",
    ".ort": "an ONNX Runtime model",
    ".tflite": "a TensorFlow Lite model",
    ".litertlm": "a LiteRT-LM model",
    ".task": "a MediaPipe task file",
    ".pb": "a TensorFlow graph or SavedModel",
    ".h5": "an HDF5 file (Keras?)",
    ".keras": "a Keras archive",
    ".msgpack": "a Flax checkpoint",
    ".mlmodel": "a Core ML model",
    ".mlpackage": "a Core ML package",
    ".mlmodelc": "a compiled Core ML model",
    ".engine": "a TensorRT engine",
    ".plan": "a TensorRT engine",
    ".pte": "an ExecuTorch program",
    ".xml": "an OpenVINO graph",
    ".nemo": "a NeMo archive",
    ".pdparams": "a PaddlePaddle checkpoint",
    ".pdmodel": "a PaddlePaddle model",
    ".mnn": "an MNN model",
    ".rknn": "an RKNN model",
    ".ot": "a rust-bert (libtorch) checkpoint",
    ".llamafile": "a llamafile, a program with a GGUF inside",
    ".tar": "a tar archive",
    ".zip": "a zip archive",
    ".7z": "a 7-Zip archive",
}
# Files of trainers' shards -> what they are, what joins their weights, and their arrays. Sources:
# torch.distributed's format_utils; DeepSpeed's `_get_zero_ckpt_name` and zero_to_fp32.py.
DISTRIBUTED_SHARD = (
    "is a distributed checkpoint of torch, in shards; join them: "
    "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt"
)
ZERO_SHARD = (
    "is one rank's part of a DeepSpeed ZeRO checkpoint, flat; join its weights: "
    "python zero_to_fp32.py FOLDER OUTPUT, where FOLDER has the file `latest`"
)
ZERO_FILE = re.compile(r"(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_(optim|model)_states\.pt")
_TRAINER_SHARDS = (
    (re.compile(r".*\.distcp"), DISTRIBUTED_SHARD, DISTRIBUTED_SHARD),
    (
        ZERO_FILE,
        ZERO_SHARD,
        "is one rank's part of DeepSpeed's ZeRO state, flat; save moments by name, of each "
        'parameter p: deepspeed.utils.safe_get_full_optimizer_state(p, "exp_avg")',
    ),
)
_JOINED = 16  # bytes that show whether a model file begins
_TEXT = 256  # bytes of text that are examined
_ARCHIVES = ("a tar archive", "a zip archive", "a 7-Zip archive")


def joined_file_text(buffer: "Region", stop: int, padded: int) -> str:
    """Return a clause on a second model file that begins where this one ends; "" if none does.

    The file in `buffer` ends at byte `stop`, with padding at `padded`. The clause continues a
    sentence on bytes that are left over, and says how to cut the files apart.
    """
    for at in dict.fromkeys((padded, stop)):
        head = bytes(buffer[at : at + _JOINED])
        length = int.from_bytes(head[:8], "little")
        header = head[8:9] == b"{" and 2 <= length <= len(buffer) - at
        kind = "GGUF" if head[:4] == b"GGUF" else "safetensors" if header else ""
        if kind:
            return (
                f"; another {kind} file begins at byte {at}: files were joined (cat). Cut them "
                f"apart: head -c {at} FILE is the first, tail -c +{at + 1} FILE the rest"
            )
    return ""


def foreign_file(path: Path, head: bytes, size: int, wanted: str = "a model file") -> str:
    """Return what a file of another program is and what to do with it, in words; "" if unknown.

    The words continue a sentence after "is". The first bytes `head`, the size in bytes, and the
    name decide. `wanted` is what was expected in its place.
    """
    if not head:
        return ""
    if len(head) >= 8 and not any(head):
        return _ZEROS.format(len(head))
    named = _extension_meaning(path)
    # A zip archive with a known extension is another program's model.
    if named and head.startswith(b"PK\x03\x04"):
        return named
    for magic, what in _FOREIGN:
        if head.startswith(magic):
            return what
    # A compressed model can be unpacked; of other compressed files only the form is known.
    for magic, name, command in _COMPRESSED:
        if head.startswith(magic):
            inner = Path(path.stem).suffix.lower()
            if command and (inner in _MODELS or inner in EXTENSIONS):
                return f"compressed ({name}); unpack it first: {command} {path}"
            return _PACKED.format(name)
    if head[4:8] == b"TFL3":
        return f"{EXTENSIONS['.tflite']}, {_ELSEWHERE}"
    if head[257:262] == b"ustar":
        return "a tar archive; unpack it, and name the model inside"
    left = download_left(head)
    if left:
        return left
    if _is_old_imatrix(head, size):
        return (
            "an importance matrix (imatrix, the older form), not a model; "
            f"aprfmt quantize MODEL OUT.gguf --type Q4_K_M --imatrix {path} uses it"
        )
    if _is_llama2c(head, size):
        return _LLAMA2C
    # Last the forms that are only likely: an old pickle, then text.
    if _TEXT_PICKLE.match(head):
        return _PICKLE
    text = text_kind(head)
    return named or (f"{text}; expected {wanted}" if text else "")


HEAD = 512  # first bytes by which `download_left` decides


def download_left(head: bytes) -> str:
    """Return what a failed download may have left in place of a file, in words; "" for other files.

    That is a git-lfs pointer, a web page, or a server's error, by the first bytes. The words
    continue a sentence after "is".
    """
    if head.startswith(_POINTER):
        found = _POINTER_SIZE.search(head)
        held = f" of {int(found[1])} bytes" if found else ""
        return f"a git-lfs pointer, not the file itself{held}: fetch it with git lfs pull"
    if _PAGE.match(head):
        return _SAVED_PAGE
    if _ANSWER.match(head):
        return _SAVED_ERROR.format(escape(head.decode("utf-8", "replace").strip(), 80))
    return ""


def text_kind(head: bytes) -> str:
    """Return the kind of text with its first characters, in words; "" if `head` is no text."""
    try:
        text = head[:_TEXT].decode()
    except UnicodeDecodeError as error:
        if error.start < min(len(head), _TEXT) - 3:  # no character that was cut
            return ""
        text = head[: error.start].decode()
    if not text.strip() or any(ord(c) < 32 and c not in "\t\r\n\f" for c in text):
        return ""
    modelfile = _MODELFILE.match(text)
    if modelfile:
        named = shorten(modelfile[1], 60)
        return (
            f"an Ollama Modelfile, which puts a template and settings over {named}; open that "
            "file (ollama show --modelfile has the path), and compare TEMPLATE with what "
            "aprfmt template shows of it"
        )
    kind = "JSON" if text.lstrip()[:1] in "{[" else "text"
    return f"{kind} that begins {shorten(text.strip(), 30)!r}"


def refuse_trainer_shards(path: Path, *, weights: bool) -> None:
    """Raise UnsupportedError for a shard that a trainer wrote, with what joins it.

    `path` is one, or a folder of them, or the folder above it, which has DeepSpeed's file `latest`.
    The words are on `weights`, or on moments and gradients.
    """
    if not path.is_dir():
        files = [path]
    else:
        files = sorted((*path.iterdir(), *path.glob("global_step*/*")))
    for pattern, of_weights, of_arrays in _TRAINER_SHARDS:
        shard = next((each for each in files if pattern.fullmatch(each.name)), None)
        if shard is not None:
            raise UnsupportedError(f"{shard}: {of_weights if weights else of_arrays}")


def foreign_folder(folder: Path) -> str:
    """Return a clause on another program's model in a folder: "is X" or "holds FILE, X".

    It goes by names. "" if none is known.
    """
    named = _extension_meaning(folder)
    if named:
        return f"is {named}"
    words = (*folder.glob("vocabulary.*"), *folder.glob("shared_vocabulary.*"))
    if words and (folder / _CTRANSLATE2).is_file():
        return f"is a CTranslate2 model ({_CTRANSLATE2}, {words[0].name}), {_ELSEWHERE}"
    for path in sorted(folder.iterdir()):
        what = _extension_meaning(path)
        if what:
            return f"holds {path.name}, {what}"
    return ""


def _extension_meaning(path: Path) -> str:
    """Return what files with this extension are, and what to do with one; "" for unknown ones."""
    what = EXTENSIONS.get(path.suffix.lower(), "")
    if not what:
        return ""
    if what in _ARCHIVES:
        return f"{what}; unpack it, and name the model inside"
    return f"{what}, {_ELSEWHERE}"


def _is_llama2c(head: bytes, size: int) -> bool:
    """Return whether a file is llama2.c's first form, without a magic: seven sizes, then float32.

    They are int32: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size (below 0: with a head
    of its own), max_seq_len. The file's length in bytes must be that of all its arrays. Source:
    llama2.c's export.py, legacy_export.
    """
    if len(head) < 28:
        return False
    dim, hidden, layers, heads, kv_heads, vocab, length = struct.unpack_from("<7i", head)
    if min(dim, hidden, layers, heads, kv_heads, length) <= 0 or not vocab or dim % heads:
        return False
    head_dim = dim // heads
    matrices = 2 * dim * dim + 2 * dim * kv_heads * head_dim + 3 * dim * hidden
    tables = abs(vocab) * dim * (2 if vocab < 0 else 1) + length * head_dim
    expected: int = 28 + 4 * (layers * (matrices + 2 * dim) + dim + tables)
    return size == expected


def _is_old_imatrix(head: bytes, size: int) -> bool:
    """Return whether a file begins as llama.cpp's older importance matrix: entries, then a name."""
    if len(head) < 12:
        return False
    entries, length = struct.unpack_from("<ii", head)
    name = head[8 : 8 + length] if 0 < length <= 256 else b""
    text = re.fullmatch(rb"[\w.]+\.(?:weight|bias)", name)
    return 0 < entries <= size // 12 and text is not None
