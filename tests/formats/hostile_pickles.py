"""Pickles that torch.load would run or choke on, opcode by opcode, and the archive around them."""

import io
import pickle
import struct
import zipfile

PLANTED = "planted_by_a_test"


def text(value: str) -> bytes:
    """Return the opcode of a text."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def name(module: str, attribute: str) -> bytes:
    """Return the opcode of a global."""
    return f"c{module}\n{attribute}\n".encode()


def call(module: str, attribute: str, *args: str) -> bytes:
    """Return the opcodes of a call with texts."""
    return name(module, attribute) + b"(" + b"".join(map(text, args)) + b"tR"


STORAGE = (
    b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x04tQ"
)


def tensor(
    storage: bytes = STORAGE, offset: bytes = b"K\x00", size: bytes = b"K\x04\x85",
    stride: bytes = b"K\x01\x85",
) -> bytes:  # fmt: skip
    """Return the opcodes of a tensor of four floats, or of what is given in their place."""
    made = name("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + offset + size + stride
    return made + b"\x89" + name("collections", "OrderedDict") + b")RtR"


def long(value: int) -> bytes:
    """Return the opcode of a large integer."""
    return pickle.dumps(value, 2)[2:-1]


RUN = "run"
# Name: what stands between PROTO 2 and STOP, and what the error has to say.
PICKLES: dict[str, tuple[bytes, str]] = {
    "os.system": (call("os", "system", "touch x"), r"REDUCE at byte \d+ calls os\.system"),
    "posix.system": (call("posix", "system", "touch x"), r"calls posix\.system"),
    "eval": (call("builtins", "eval", "1"), r"calls builtins\.eval"),
    "python-2-exec": (call("__builtin__", "exec", "1"), r"calls builtins\.exec"),
    "getattr": (call("builtins", "getattr", "os", "system"), r"calls builtins\.getattr"),
    "getattr-of-a-process": (
        name("builtins", "getattr") + b"(" + name("subprocess", "Popen") + text("Run") + b"tR",
        r"calls builtins\.getattr",
    ),
    "getattr-of-a-function": (
        name("builtins", "getattr") + b"(" + name(PLANTED, RUN) + text("Kind") + b"tR",
        r"calls builtins\.getattr",
    ),
    "getattr-to-a-function": (
        name("builtins", "getattr") + b"(" + name(PLANTED, "Kind") + text(RUN) + b"tR",
        r"calls builtins\.getattr",
    ),
    "class-with-a-command": (call(PLANTED, "Kind", "touch x"), rf"calls {PLANTED}\.Kind"),
    "class-with-a-path": (call(PLANTED, "Kind", "/tmp/x"), rf"calls {PLANTED}\.Kind"),
    "class-with-two-words": (call(PLANTED, "Kind", "a", "b"), rf"calls {PLANTED}\.Kind"),
    "class-of-the-library": (call("code", "InteractiveConsole", "a"), r"calls code\.Interactive"),
    "import": (call("builtins", "__import__", PLANTED), r"calls builtins\.__import__"),
    "runpy": (call("runpy", "_run_code", "1"), r"calls runpy\._run_code"),
    "subprocess": (call("subprocess", "Popen", "x"), r"calls subprocess\.Popen"),
    "planted-call": (call(PLANTED, RUN, "x"), rf"calls {PLANTED}\.run"),
    "torch-load": (call("torch", "load", "x"), r"calls torch\.load"),
    "nested-bytes": (call("torch.storage", "_load_from_bytes", "x"), r"calls torch\.storage\."),
    "webbrowser": (call("webbrowser", "open", "x"), r"calls webbrowser\.open"),
    "operator": (call("operator", "attrgetter", "x"), r"calls operator\.attrgetter"),
    "functools": (call("functools", "partial", "x"), r"calls functools\.partial"),
    "dotted": (call("torch", "os.system", "x"), r"calls torch\.os\.system"),
    "stack-global": (text("os") + text("system") + b"\x93" + text("x") + b"\x85R", r"os\.system"),
    "stack-global-numbers": (b"K\x01K\x02\x93", "STACK_GLOBAL .* no texts"),
    "hidden-in-a-dict": (b"}" + text("x") + call("os", "system", "y") + b"s", r"calls os\.system"),
    "popped": (call("os", "system", "x") + b"0}", r"calls os\.system"),
    "inst": (b"(" + text("x") + b"ios\nsystem\n", "opcode INST at byte"),
    "obj": (b"(" + name("os", "system") + text("x") + b"o", "opcode OBJ at byte"),
    "newobj": (
        name("subprocess", "Popen") + text("x") + b"\x85\x81",
        r"NEWOBJ .* subprocess\.Popen",
    ),
    "newobj-ex": (name("x", "Y") + b")}\x92", "opcode NEWOBJ_EX"),
    "reconstructor": (
        name("copy_reg", "_reconstructor")
        + b"("
        + name("subprocess", "Popen")
        + name("builtins", "object")
        + b"NtR",
        r"subprocess\.Popen",
    ),
    "build-on-a-global": (name("os", "environ") + b"}b", "BUILD .* sets the state of os.environ"),
    "build-on-a-list": (b"]}b", "BUILD .* a list"),
    "ext1": (b"\x82\x01", "opcode EXT1"),
    "ext2": (b"\x83\x01\x00", "opcode EXT2"),
    "ext4": (b"\x84\x01\x00\x00\x00", "opcode EXT4"),
    "persid": (b"Pstorage\n", "opcode PERSID"),
    "int-as-text": (b"I1\n", "opcode INT"),
    "string": (b"S'x'\n", "opcode STRING"),
    "dup": (b"]2", "opcode DUP"),
    "buffer": (b"\x97", "opcode NEXT_BUFFER"),
    "unknown": (b"\xff", "byte 0xff"),
    "protocol-0": (b"\x80\x00}", "protocol 0"),
    "protocol-9": (b"\x80\x09}", "protocol 9"),
    "long4": (b"\x8b\xff\xff\xff\x7f", "integer of 2147483647 bytes"),
    "long4-negative": (b"\x8b\xff\xff\xff\xff", "integer of 4294967295 bytes"),
    "long1-bomb": (b"\x8b\x01\x04\x00\x00" + b"\x7f" * 1025, "at most 1024"),
    "binbytes8": (b"\x8e" + b"\xff" * 7 + b"\x7f", "needs 9223372036854775807 bytes"),
    "unicode8": (b"\x8d" + b"\xff" * 8, "needs 18446744073709551615 bytes"),
    "bytearray8": (b"\x96" + b"\0" * 5 + b"\xff\0\0", "remain; the file is cut"),
    "binunicode": (b"X\xff\xff\xff\xff", "a text at byte .* needs 4294967295 bytes"),
    "frame": (b"\x95" + b"\xff" * 8, "frame .* needs 18446744073709551615"),
    "not-utf-8": (b"X\x01\0\0\0\xff", "not UTF-8"),
    "endless-name": (b"c" + b"a" * 4000, "longer than 1024"),
    "memo-unset": (b"h\x05", "reads memo 5"),
    "memo-on-nothing": (b"q\x00", "finds nothing on the stack"),
    "underflow": (b"0", "finds nothing"),
    "no-mark": (b"t", "finds no mark"),
    "mark-as-value": (b"(\x85", "finds nothing"),
    "two-values": (b"}}", "leaves 1 values"),
    "odd-items": (b"}(K\x01u", "a key without a value"),
    "append-to-dict": (b"}K\x01a", "appends to a dict"),
    "items-of-list": (b"]K\x01K\x02s", "sets items of a list"),
    "args-no-tuple": (name("collections", "OrderedDict") + b"]R", "with a list"),
    "call-a-text": (text("os.system") + b")R", "calls a str"),
    "too-deep": (b"]" * 5000 + b"a" * 4999, "nest deeper than 100"),
    "deep-tuples": (b")" + b"\x85" * 500_000, "nest deeper than 100"),
    "holds-itself": (b"]q\x00h\x00a", "nest deeper than 100, or hold themselves"),
    "memo-bomb": (
        b"(}q\x00"
        + b"".join(
            b"]q" + bytes([i]) + b"(" + 2 * (b"h" + bytes([i - 1])) + b"e" for i in range(1, 60)
        )
        + b"t",
        "values, counted each time",
    ),
    "persistent-text": (text("storage") + b"Q", "a persistent id that is a str"),
    "persistent-empty": (b")Q", "a persistent id that is a tuple"),
    "persistent-short": (text("storage") + b"\x85Q", "kind 'storage' with 1 values"),
    "persistent-kind": (b"(" + text("file") + b"NNNNtQ", "kind 'file'"),
    "persistent-class": (
        tensor(
            b"(" + text("storage") + name("os", "system") + text("0") + text("cpu") + b"K\x04tQ"
        ),
        r"class os\.system",
    ),
    "persistent-count": (
        tensor(
            b"("
            + text("storage")
            + name("torch", "FloatStorage")
            + text("0")
            + text("cpu")
            + b"J\xff\xff\xff\xfftQ"
        ),
        "with a int",
    ),
    "persistent-huge": (
        tensor(
            b"("
            + text("storage")
            + name("torch", "FloatStorage")
            + text("0")
            + text("cpu")
            + long(1 << 60)
            + b"tQ"
        ),
        "needs 4611686018427387904 bytes",
    ),
    "storage-twice": (
        b"]" + tensor() + b"a" + tensor(STORAGE.replace(b"K\x04", b"K\x02")) + b"a",
        "declares storage '0' with 8 bytes, and before",
    ),
    "no-such-storage": (tensor(STORAGE.replace(text("0"), text("9"))), "no record of storage '9'"),
    "storage-path": (tensor(STORAGE.replace(text("0"), text("../../x"))), "no record of storage"),
    "too-short": (tensor(size=b"K\x05\x85"), "reaches to byte 20 of storage"),
    "offset-outside": (tensor(offset=b"K\x01"), "reaches to byte 20 of storage"),
    "stride-outside": (tensor(stride=b"K\x02\x85"), "reaches to byte 28 of storage"),
    "negative-stride": (tensor(stride=b"J\xff\xff\xff\xff\x85"), "the stride is -1"),
    "negative-offset": (tensor(offset=b"J\xff\xff\xff\xff"), "the offset is -1"),
    "negative-size": (tensor(size=b"J\xff\xff\xff\xff\x85"), "the size is -1"),
    "huge-size": (tensor(size=long(1 << 70) + b"\x85"), "the size is"),
    "size-is-text": (tensor(size=text("x") + b"\x85"), "the size is a str"),
    "sizes-and-strides": (tensor(size=b"K\x02K\x02\x86"), "2 sizes and 1 strides"),
    "many-dims": (
        tensor(size=b"(" + b"K\x01" * 65 + b"t", stride=b"(" + b"K\x01" * 65 + b"t"),
        "at most 64",
    ),
    "repeated": (
        tensor(size=long(1 << 40) + b"\x85", stride=b"K\x00\x85"),
        "repeats 16 stored bytes as",
    ),
    "product": (
        tensor(size=long(1 << 40) + long(1 << 40) + b"\x86", stride=b"K\x00K\x00\x86"),
        "repeats 16 stored bytes",
    ),
    "no-storage": (tensor(b"N"), "the storage is a NoneType"),
    "few-arguments": (name("torch._utils", "_rebuild_tensor_v2") + b")R", "arguments do not fit"),
    "dtype": (
        name("torch._utils", "_rebuild_meta_tensor_no_storage")
        + b"("
        + name("torch", "os")
        + b"K\x01\x85K\x01\x85\x89tR",
        r"torch\.os is no dtype",
    ),
    "from-type": (
        name("torch._tensor", "_rebuild_from_type_v2")
        + b"("
        + name("os", "system")
        + name("torch", "Tensor")
        + b")}tR",
        r"made by os\.system",
    ),
    "from-type-itself": (
        name("torch._tensor", "_rebuild_from_type_v2")
        + b"("
        + name("torch._tensor", "_rebuild_from_type_v2")
        + name("torch", "Tensor")
        + b")}tR",
        "by itself",
    ),
    "two-of-a-name": (
        b"}(" + text("a.b") + tensor() + text("a") + b"}" + text("b") + tensor() + b"su",
        "two tensors come to the name 'a.b'",
    ),
    "long-path": (b"}" + text("a" * 5000) + tensor() + b"s", "a path of 5000 characters"),
}


SOUND = b"}" + text("t") + tensor() + b"s"  # a dict of one whole tensor


def archived(body: bytes) -> bytes:
    """Return an archive around a pickle, with one storage of 16 bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + body + b".")
        archive.writestr("x/byteorder", b"little")
        archive.writestr("x/data/0", bytes(16))
        archive.writestr("x/version", b"3\n")
    return buffer.getvalue()
