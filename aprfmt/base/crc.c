/* The Python module aprfmt.base._crc: zlib's CRC-32 by carry-less products, x86-64 only.
 *
 * A message is a polynomial over GF(2); 16 bytes n bits ahead of others may be replaced by their
 * product with x^n modulo the CRC's polynomial, added to those (V. Gopal and others, "Fast CRC
 * Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009). Four accumulators
 * go 64 bytes at a time; what is left, 16 bytes and a tail, goes through a table.
 *
 * Raises ImportError where the processor cannot; aprfmt.base.crc then takes zlib's.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define APRFMT_HAS_PRODUCTS
#include <immintrin.h>
#endif

static uint32_t table[256];

static void fill_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++) value = value >> 1 ^ (value & 1 ? 0xEDB88320u : 0);
        table[i] = value;
    }
}

/* Return the state after `size` more bytes; a state is a CRC without its first and last negation. */
static uint32_t by_table(const uint8_t *at, size_t size, uint32_t state) {
    for (; size; size--) state = state >> 8 ^ table[(state ^ *at++) & 0xFF];
    return state;
}

#ifdef APRFMT_HAS_PRODUCTS
/* x^(d+32) and x^(d-32) modulo the polynomial, bits reversed and shifted by one: d bits ahead. */
#define AHEAD_512 _mm_set_epi64x(0x1c6e41596, 0x154442bd4)
#define AHEAD_128 _mm_set_epi64x(0x0ccaa009e, 0x1751997d0)

__attribute__((target("pclmul,sse4.1"))) static __m128i moved(__m128i x, __m128i by, __m128i next) {
    __m128i low = _mm_clmulepi64_si128(x, by, 0x00);
    __m128i high = _mm_clmulepi64_si128(x, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

/* `size` is at least 64. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t by_products(
    const uint8_t *at, size_t size, uint32_t state) {
    __m128i x[4];
    uint8_t left[16];
    for (int i = 0; i < 4; i++) x[i] = _mm_loadu_si128((const __m128i *)at + i);
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)state));
    for (at += 64, size -= 64; size >= 64; at += 64, size -= 64)
        for (int i = 0; i < 4; i++)
            x[i] = moved(x[i], AHEAD_512, _mm_loadu_si128((const __m128i *)at + i));
    for (int i = 1; i < 4; i++) x[i] = moved(x[i - 1], AHEAD_128, x[i]);
    for (; size >= 16; at += 16, size -= 16)
        x[3] = moved(x[3], AHEAD_128, _mm_loadu_si128((const __m128i *)at));
    _mm_storeu_si128((__m128i *)left, x[3]);
    return by_table(at, size, by_table(left, 16, 0));
}
#endif

PyDoc_STRVAR(crc32_doc, "crc32(data, value=0, /)\n\nReturn zlib's CRC-32 of contiguous bytes; "
                        "`value` is that of what is before them. Releases the GIL.");

static PyObject *py_crc32(PyObject *module, PyObject *args) {
    Py_buffer data;
    unsigned int value = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*|I", &data, &value)) return NULL;
    uint32_t state = ~(uint32_t)value;
    Py_BEGIN_ALLOW_THREADS
#ifdef APRFMT_HAS_PRODUCTS
    if (data.len >= 64)
        state = by_products(data.buf, (size_t)data.len, state);
    else
#endif
        state = by_table(data.buf, (size_t)data.len, state);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(~state & 0xFFFFFFFFu);
}

static PyMethodDef methods[] = {{"crc32", py_crc32, METH_VARARGS, crc32_doc}, {0}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "aprfmt.base._crc", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__crc(void) {
#ifdef APRFMT_HAS_PRODUCTS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
        fill_table();
        return PyModule_Create(&definition);
    }
#endif
    (void)fill_table;
    PyErr_SetString(PyExc_ImportError, "this processor has no carry-less products");
    return NULL;
}
