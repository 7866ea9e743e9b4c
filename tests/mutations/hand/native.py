"""Mistakes in the C kernels and CUDA sources. No map says which tests reach them, so each row does.

A kernel that fails its check against golden blocks is replaced by numpy, silently for a user: a
test must see that it is gone.
"""

from tests.mutations.mutation import Row

DECODE = ("tests/codecs/test_native.py", "tests/codecs/test_native_decode.py")
ENCODE = ("tests/codecs/test_native.py", "tests/codecs/test_native_encode.py")
PRODUCTS = ("tests/codecs/test_native_matmul.py",)
STEP = ("tests/codecs/test_native_step.py",)
LOADER = ("tests/codecs/test_native.py",)
# A run takes some of a file's tests; where a few of many can tell, they are named.
Q4_1_DECODED = ("tests/inference/gpu/test_kernels_decode.py::test_bits_equal_the_codec?emulated-*",)
ONE_VECTOR = (
    "tests/inference/gpu/test_kernels_matvec.py::test_every_encoding_and_number_of_vectors"
    "?emulated-Q6_K-float32?",
)
NOT_FINITE = ("tests/inference/gpu/test_kernels_reduce.py::test_values_that_are_not_finite*",)
CUPY_ATTENTION = (
    "tests/inference/gpu/test_cupy_backend.py"
    "::test_many_queries_by_cublas_equal_few_by_the_kernel*",
)

NATIVE = "aprfmt/codecs/native"
CUDA = "inference/fast/cuda"

ROWS: tuple[Row, ...] = (
    Row(
        "native-q4-0-offset", f"{NATIVE}/decode_small.h",
        "put(out + 8 * k, to_f(q[k] - 8) * d, to);", "put(out + 8 * k, to_f(q[k] - 7) * d, to);",
        "Q4_0 decodes every element one step too high; the check leaves the kernel out", DECODE,
    ),
    Row(
        "native-q6-k-scale", f"{NATIVE}/decode_k.h",
        "scale[8 * half + 2 * run + k / 2]), to);", "scale[8 * half + 2 * run]), to);",
        "the second half of a Q6_K sub-block takes its neighbour's scale", DECODE,
    ),
    Row(
        "native-apr-q8-tail", f"{NATIVE}/decode_small.h",
        "put_some(out + i, to_f(load_i8(last)) * f_all(scale), n - i, to);",
        "put_some(out + i, to_f(load_u8(last)) * f_all(scale), n - i, to);",
        "negative numbers in APR_Q8's last few elements come out positive", DECODE,
    ),
    Row(
        "native-part-of-a-block", f"{NATIVE}/bind_decode.c",
        "row->decode[0](raw + blocks * row->type_size, last, 1);",
        "row->decode[0](raw, last, 1);",
        "a last block used in part is decoded from the first one's bytes", DECODE,
    ),
    Row(
        "native-length-unchecked", f"{NATIVE}/bind_decode.c",
        "if ((size_t)size != expected) {\n        aprfmt_error(\"%s: found",
        "if ((size_t)size > expected) {\n        aprfmt_error(\"%s: found",
        "a kernel reads past the end of bytes that are too few", DECODE,
    ),
    Row(
        "native-coded-bytes", f"{NATIVE}/bind_decode.c",
        "if ((size_t)size < (end + 1) / 2 ||", "if ((size_t)size < end / 2 ||",
        "the last of an odd number of 4-bit codes is read past the end", DECODE,
    ),
    Row(
        "native-q4-1-rounding", f"{NATIVE}/encode_small.h",
        "vf v = multiply_add(f_load(x + 8 * k) - f_all(low), inverse, f_all(0.5f), fuse);",
        "vf v = multiply_add(f_load(x + 8 * k) - f_all(low), inverse, f_all(0.0f), fuse);",
        "Q4_1 and Q5_1 cut where ggml rounds", ENCODE,
    ),
    Row(
        "native-importance-row", f"{NATIVE}/encode_small.h",
        "memcpy(weights + 32 * b, importance + (at + b) % per_row * 32, 128);",
        "memcpy(weights + 32 * b, importance + b % per_row * 32, 128);",
        "importance of the first eight blocks serves the whole row", ENCODE,
    ),
    Row(
        "native-nan-as-inf", f"{NATIVE}/moments.h",
        "if (bits > 0x7f800000)", "if (bits > 0x7f800001)",
        "a NaN with the lowest bit alone is kept as a number", LOADER,
    ),
    Row(
        "native-moments-joined", f"{NATIVE}/moments.h",
        "m->about += about + apart * apart * before * now / (before + now);", "m->about += about;",
        "the deviation of a long tensor forgets that its parts have other means", LOADER,
    ),
    Row(
        "native-not-finite-first", f"{NATIVE}/moments.h",
        "if (any((vi)(most >= 0x7f800000))) i = 0;", "if (any((vi)(most > 0x7f800000))) i = 0;",
        "an infinity among the first elements is not found", LOADER,
    ),
    Row(
        "native-strings-length", f"{NATIVE}/strings.c",
        "if (length > size - offset - 8) return SIZE_MAX;",
        "if (length > size - offset) return SIZE_MAX;",
        "a GGUF string may end eight bytes behind the file",
        (*LOADER, "tests/formats/test_gguf*.py"),
    ),
    Row(
        "native-products-tail", f"{NATIVE}/dot.h",
        "if (n % 8) {\n        vf v = f_load_some(w + 8 * k, n % 8)",
        "if (n % 8 > 1) {\n        vf v = f_load_some(w + 8 * k, n % 8)",
        "the last column is left out where their number is one more than a multiple of eight",
        PRODUCTS,
    ),
    Row(
        "native-products-second-token", f"{NATIVE}/dot.h",
        "if (other > t) add_last(scratch + whole, x2 + whole, n - whole, second);",
        "if (other > t) add_last(scratch + whole, x1 + whole, n - whole, second);",
        "every other token's last columns are those of its neighbour", PRODUCTS,
    ),
    Row(
        "native-spans", f"{NATIVE}/threads.c",
        "spans[i].end = parts * (i + 1) / threads;", "spans[i].end = parts / threads * (i + 1);",
        "the last parts are done by no thread where they do not divide evenly",
        (*PRODUCTS, *STEP, *LOADER),
    ),
    Row(
        "native-norm-eps", f"{NATIVE}/step.h",
        "sqrtf((float)(sum / (double)n) + eps)", "sqrtf((float)(sum / (double)n))",
        "norms leave out their eps", STEP,
    ),
    Row(
        "native-window", f"{NATIVE}/step.h",
        "*from = a->window && a->window < *to ? *to - a->window : 0;",
        "*from = a->window && a->window < *to ? *to - a->window - 1 : 0;",
        "a sliding window sees one key more", STEP,
    ),
    Row(
        "native-sink", f"{NATIVE}/step.h",
        "if (a->sinks) sum += exponentials(sink, 1, most);", "",
        "attention sinks take no probability", STEP,
    ),
    Row(
        "cuda-q4-1-low", f"{CUDA}/blocks.cuh",
        "float d = half_to_float(head & 0xffff), m = half_to_float(head >> 16);\n"
        "    bytes<N, ALIGN>(b + 4 + (at & 15), w);",
        "float d = half_to_float(head & 0xffff), m = half_to_float(head & 0xffff);\n"
        "    bytes<N, ALIGN>(b + 4 + (at & 15), w);",
        "Q4_1 adds its scale for its minimum on GPUs", Q4_1_DECODED,
    ),
    Row(
        "cuda-matvec-last-row", f"{CUDA}/matvec.cu",
        "if (lane == 0 && first + r < rows) narrow",
        "if (lane == 0 && first + r + 1 < rows) narrow",
        "the last row of a product is not written on GPUs", ONE_VECTOR,
    ),
    Row(
        "cuda-softmax-sink", f"{CUDA}/attention.cu",
        "sum += exp_of(input ? r(sink - most) : sink - most);", "sum += 0;",
        "attention sinks take no probability in cupy's attention", CUPY_ATTENTION,
    ),
    Row(
        "cuda-infinities", f"{CUDA}/reduce.cu",
        "nan += v != v;", "nan += 1;", "infinities are counted as NaN on GPUs", NOT_FINITE,
    ),
)  # fmt: skip
