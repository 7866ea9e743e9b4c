/* Decoding and statistics for Python. Lengths are checked here, so that a kernel may trust them. */
#include "bindings.h"
#include "threads.h"

#include <math.h>

PyDoc_STRVAR(decode_doc, "decode(index, raw, out, stream=-1)\n\n"
                         "Fill float32 `out` from the blocks of `raw`, whose last may be used in "
                         "part. `stream` stores past the\n"
                         "cache: 1 always, 0 never, -1 when `out` is large.");

static PyObject *py_decode(PyObject *module, PyObject *args) {
    Py_ssize_t index, size = 0;
    int stream = -1;
    PyObject *raw_object, *out_object, *result = NULL;
    buffers held = {.used = 0};
    size_t count;
    (void)module;
    if (!PyArg_ParseTuple(args, "nOO|i", &index, &raw_object, &out_object, &stream)) return NULL;
    const decoder *row = aprfmt_decoder_at(index);
    if (!row) return NULL;
    const uint8_t *raw = aprfmt_hold(&held, raw_object, 0, &size);
    float *out = raw ? aprfmt_hold_floats(&held, out_object, 1, row->name, &count) : NULL;
    if (!out) goto done;
    size_t blocks = count / row->block_size, part = count % row->block_size;
    size_t expected = (blocks + (part != 0)) * row->type_size;
    if ((size_t)size != expected) {
        aprfmt_error("%s: found %zd bytes, expected %zu for %zu elements", row->name, size,
                     expected, count);
        goto done;
    }
    int mode = aprfmt_store_mode(out, count, stream);
    Py_BEGIN_ALLOW_THREADS if (blocks) row->decode[mode](raw, out, blocks);
    if (part) {
        float last[256];
        row->decode[0](raw + blocks * row->type_size, last, 1);
        memcpy(out + blocks * row->block_size, last, 4 * part);
    }
    Py_END_ALLOW_THREADS result = Py_NewRef(Py_None);
done:
    aprfmt_release(&held);
    return result;
}

PyDoc_STRVAR(decode_rows_doc,
             "decode_rows(index, raw, columns, first, out)\n\n"
             "Fill float32 `out` [rows, n], whose rows may be apart, with elements `first` to "
             "`first` + n of each row of\n"
             "`columns` elements in `raw`. For encodings of single elements.");

static PyObject *py_decode_rows(PyObject *module, PyObject *args) {
    Py_ssize_t index, columns, first, size = 0;
    PyObject *raw_object, *out_object, *result = NULL;
    buffers held = {.used = 0};
    (void)module;
    if (!PyArg_ParseTuple(args, "nOnnO", &index, &raw_object, &columns, &first, &out_object)) {
        return NULL;
    }
    const decoder *row = aprfmt_decoder_at(index);
    const uint8_t *raw = row ? aprfmt_hold(&held, raw_object, 0, &size) : NULL;
    if (!raw) goto done;
    Py_buffer *out = &held.view[held.used];
    if (PyObject_GetBuffer(out_object, out, PyBUF_STRIDED) < 0) goto done;
    held.used++;
    if (row->block_size != 1) {
        aprfmt_error("%s: has blocks of %u elements; rows are cut for single ones", row->name,
                     row->block_size);
        goto done;
    }
    if (out->ndim != 2 || out->itemsize != 4 || (uintptr_t)out->buf % 4 ||
        (out->shape[1] > 1 && out->strides[1] != 4) || out->strides[0] % 4) {
        aprfmt_error("%s: expected rows of float32, each in one piece", row->name);
        goto done;
    }
    const Py_ssize_t rows = out->shape[0], count = out->shape[1];
    const Py_ssize_t bytes = (Py_ssize_t)row->type_size;
    if (columns < 0 || first < 0 || count > columns || first > columns - count ||
        (columns && rows > PY_SSIZE_T_MAX / bytes / columns) || size != rows * columns * bytes) {
        aprfmt_error("%s: found %zd bytes for %zd rows of %zd elements, of which %zd from %zd on "
                     "are wanted",
                     row->name, size, rows, columns, count, first);
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS for (Py_ssize_t r = 0; r < rows && count; r++) {
        float *to = (float *)((char *)out->buf + r * out->strides[0]);
        row->decode[0](raw + (r * columns + first) * bytes, to, (size_t)count);
    }
    Py_END_ALLOW_THREADS result = Py_NewRef(Py_None);
done:
    aprfmt_release(&held);
    return result;
}

PyDoc_STRVAR(decode_apr_q8_doc, "decode_apr_q8(raw, out, stream=-1)\n\n"
                                "Fill float32 `out` from APR_Q8: a float32 scale, then an int8 for "
                                "each element. `stream` is\n"
                                "there because every decoder has it: results go through the cache.");

static PyObject *py_decode_apr_q8(PyObject *module, PyObject *args) {
    Py_ssize_t size = 0;
    int stream;
    PyObject *raw_object, *out_object, *result = NULL;
    buffers held = {.used = 0};
    size_t count;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO|i", &raw_object, &out_object, &stream)) return NULL;
    const uint8_t *raw = aprfmt_hold(&held, raw_object, 0, &size);
    float *out = raw ? aprfmt_hold_floats(&held, out_object, 1, "APR_Q8", &count) : NULL;
    if (!out) goto done;
    size_t expected = count ? count + 4 : 0;
    if ((size_t)size != expected) {
        aprfmt_error("APR_Q8: found %zd bytes, expected %zu for %zu elements and their scale", size,
                     expected, count);
        goto done;
    }
    if (count) {
        float scale;
        memcpy(&scale, raw, 4);
        Py_BEGIN_ALLOW_THREADS aprfmt_level->apr_q8(raw + 4, scale, out, count);
        Py_END_ALLOW_THREADS
    }
    result = Py_NewRef(Py_None);
done:
    aprfmt_release(&held);
    return result;
}

PyDoc_STRVAR(
    decode_coded_doc,
    "decode_coded(packed, absmax, code, block, out, first=0, to=0, stream=-1)\n\n"
    "Fill float32 `out` with elements `first`, first + 1, ... of code[nibble] * absmax[element // "
    "block],\n"
    "the high nibble first; `to` rounds each to what F32 (0), BF16 (1) or F16 (2) can hold.");

static PyObject *py_decode_coded(PyObject *module, PyObject *args) {
    Py_ssize_t block, first = 0, size = 0;
    int to = 0, stream = -1;
    PyObject *packed_object, *absmax_object, *code_object, *out_object, *result = NULL;
    buffers held = {.used = 0};
    size_t absmax_count, code_count, count;
    const float *absmax = NULL, *code = NULL;
    float *out = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOnO|nii", &packed_object, &absmax_object, &code_object, &block,
                          &out_object, &first, &to, &stream)) {
        return NULL;
    }
    const uint8_t *packed = aprfmt_hold(&held, packed_object, 0, &size);
    if (packed) absmax = aprfmt_hold_floats(&held, absmax_object, 0, "absmax", &absmax_count);
    if (absmax) code = aprfmt_hold_floats(&held, code_object, 0, "code", &code_count);
    if (code) out = aprfmt_hold_floats(&held, out_object, 1, "4-bit code", &count);
    if (!out) goto done;
    size_t end = first < 0 ? 0 : (size_t)first + count;
    if (code_count != 16 || block <= 0 || to < 0 || to > 2 || first < 0) {
        aprfmt_error(
            "4-bit code: found a code of %zu values, blocks of %zd, first element %zd and rounding "
            "%d; expected 16, a positive size, 0 or more and 0 to 2",
            code_count, block, first, to);
        goto done;
    }
    if ((size_t)size < (end + 1) / 2 || absmax_count < (end + (size_t)block - 1) / (size_t)block) {
        aprfmt_error("4-bit code: %zu elements in blocks of %zd need %zu bytes and %zu scales, "
                     "found %zd and "
                     "%zu",
                     end, block, (end + 1) / 2, (end + (size_t)block - 1) / (size_t)block, size,
                     absmax_count);
        goto done;
    }
    /* Storing past the cache needs every run of eight aligned, so blocks and the start in eights.
     */
    int mode = to || block % 8 || first % 8 ? 0 : aprfmt_store_mode(out, count, stream);
    Py_BEGIN_ALLOW_THREADS aprfmt_level->coded(packed, absmax, code, (size_t)block, (size_t)first,
                                               end, out, to, mode);
    Py_END_ALLOW_THREADS result = Py_NewRef(Py_None);
done:
    aprfmt_release(&held);
    return result;
}

PyDoc_STRVAR(moments_doc, "moments(index, raw, count, part, threads)\n\n"
                          "Decode `count` elements, a segment at a time, and return a list: for "
                          "each `part` of them, which is whole\n"
                          "segments, (count, finite, zeros, nan, inf, sum, squares about the mean, "
                          "least, most).");

typedef struct {
    const decoder *kind;
    const uint8_t *raw;
    size_t count, part;
    moments *found;
} counting;

/* Whether stored elements are the floats themselves, at an address where they can be read. */
static int is_floats(const decoder *kind, const uint8_t *raw) {
    return !strcmp(kind->name, "F32") && (uintptr_t)raw % sizeof(float) == 0;
}

static void count_part(void *work, size_t number) {
    const counting *c = work;
    const size_t first = number * c->part, step = SEGMENT / c->kind->block_size;
    const uint8_t *raw = c->raw + first / c->kind->block_size * c->kind->type_size;
    float scratch[SEGMENT];
    for (size_t left = c->count - first < c->part ? c->count - first : c->part; left;) {
        const size_t now = left < SEGMENT ? left : SEGMENT;
        const float *decoded = scratch;
        if (is_floats(c->kind, raw))
            decoded = (const float *)(const void *)raw;
        else
            c->kind->decode[0](raw, scratch, (now + c->kind->block_size - 1) / c->kind->block_size);
        aprfmt_level->add_moments(decoded, now, &c->found[number]);
        raw += step * c->kind->type_size;
        left -= now;
    }
}

PyObject *aprfmt_moments_list(const moments *found, size_t parts) {
    PyObject *rows = PyList_New((Py_ssize_t)parts);
    for (size_t i = 0; rows && i < parts; i++) {
        const moments *m = &found[i];
        PyObject *row = Py_BuildValue(
            "(KKKKKdddd)", (unsigned long long)m->count, (unsigned long long)m->finite,
            (unsigned long long)m->zeros, (unsigned long long)m->nan, (unsigned long long)m->inf,
            m->sum, m->about, (double)m->least, (double)m->most);
        if (!row || PyList_SetItem(rows, (Py_ssize_t)i, row) < 0) Py_CLEAR(rows);
    }
    return rows;
}

static PyObject *py_moments(PyObject *module, PyObject *args) {
    Py_ssize_t index, count, part, threads, size = 0;
    PyObject *raw_object, *result = NULL;
    buffers held = {.used = 0};
    moments *found = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "nOnnn", &index, &raw_object, &count, &part, &threads)) return NULL;
    const decoder *row = aprfmt_decoder_at(index);
    const uint8_t *raw = row ? aprfmt_hold(&held, raw_object, 0, &size) : NULL;
    if (!raw) goto done;
    size_t blocks = count < 0 ? 0 : ((size_t)count + row->block_size - 1) / row->block_size;
    if (count < 0 || part < 1 || part % SEGMENT || (size_t)size != blocks * row->type_size) {
        aprfmt_error("%s: found %zd bytes, expected %zu for %zd elements in parts of %zd", row->name,
                     size, blocks * row->type_size, count, part);
        goto done;
    }
    const size_t parts = ((size_t)count + (size_t)part - 1) / (size_t)part;
    if (!(found = PyMem_Malloc((parts + 1) * sizeof *found))) {
        PyErr_NoMemory();
        goto done;
    }
    for (size_t i = 0; i < parts; i++)
        found[i] = (moments){.least = INFINITY, .most = -INFINITY};
    counting work = {row, raw, (size_t)count, (size_t)part, found};
    Py_BEGIN_ALLOW_THREADS aprfmt_share(count_part, &work, parts, threads);
    Py_END_ALLOW_THREADS result = aprfmt_moments_list(found, parts);
done:
    PyMem_Free(found);
    aprfmt_release(&held);
    return result;
}

PyDoc_STRVAR(
    first_not_finite_doc,
    "first_not_finite(x)\n\nReturn the index of the first NaN or infinity in float32 `x`, or -1.");

static PyObject *py_first_not_finite(PyObject *module, PyObject *x_object) {
    buffers held = {.used = 0};
    size_t count;
    ptrdiff_t found = -1;
    (void)module;
    const float *x = aprfmt_hold_floats(&held, x_object, 0, "x", &count);
    if (!x) {
        aprfmt_release(&held);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS found = aprfmt_level->first_not_finite(x, count);
    Py_END_ALLOW_THREADS aprfmt_release(&held);
    return PyLong_FromSsize_t(found);
}

PyDoc_STRVAR(
    changes_doc,
    "changes(before, after, index=-1)\n\n"
    "Return how many numbers of two float32 buffers of one size differ, how many finite ones are "
    "not\nany more, and how many others became zero. NaN is equal to NaN. With the index of a "
    "decoder\n`after` are blocks, of which nothing decoded is kept.");

/* Compare with blocks, decoded a segment at a time. */
static void add_decoded(const decoder *row, const float *x, const uint8_t *raw, size_t count,
                        changes *found) {
    float some[SEGMENT];
    const size_t step = SEGMENT / row->block_size;
    const size_t blocks = (count + row->block_size - 1) / row->block_size;
    for (size_t at = 0; at < blocks; at += step) {
        const size_t few = blocks - at < step ? blocks - at : step, first = at * row->block_size;
        const size_t there = few * row->block_size, left = count - first;
        row->decode[0](raw + at * row->type_size, some, few);
        aprfmt_level->add_changes(x + first, some, left < there ? left : there, found);
    }
}

static PyObject *py_changes(PyObject *module, PyObject *args) {
    buffers held = {.used = 0};
    PyObject *before, *after, *result = NULL;
    Py_ssize_t index = -1, size = 0;
    size_t count = 0, other = 0;
    changes found = {0, 0, 0};
    const decoder *row = NULL;
    const uint8_t *raw = NULL;
    const float *y = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO|n", &before, &after, &index)) return NULL;
    if (index != -1 && !(row = aprfmt_decoder_at(index))) return NULL;
    const float *x = aprfmt_hold_floats(&held, before, 0, "before", &count);
    if (!x) goto done;
    if (row) {
        raw = aprfmt_hold(&held, after, 0, &size);
        if (!raw) goto done;
        size_t expected = (count + row->block_size - 1) / row->block_size * row->type_size;
        if ((size_t)size != expected) {
            aprfmt_error("changes: found %zd bytes of %s, expected %zu for %zu elements", size,
                         row->name, expected, count);
            goto done;
        }
    } else {
        y = aprfmt_hold_floats(&held, after, 0, "after", &other);
        if (!y) goto done;
        if (count != other) {
            aprfmt_error("changes: found %zu numbers for %zu", other, count);
            goto done;
        }
    }
    Py_BEGIN_ALLOW_THREADS if (row) add_decoded(row, x, raw, count, &found);
    else aprfmt_level->add_changes(x, y, count, &found);
    Py_END_ALLOW_THREADS result = Py_BuildValue("nnn", (Py_ssize_t)found.differ,
                                                (Py_ssize_t)found.over, (Py_ssize_t)found.under);
done:
    aprfmt_release(&held);
    return result;
}

PyMethodDef APRFMT_DECODING[] = {
    {"decode", py_decode, METH_VARARGS, decode_doc},
    {"decode_rows", py_decode_rows, METH_VARARGS, decode_rows_doc},
    {"decode_apr_q8", py_decode_apr_q8, METH_VARARGS, decode_apr_q8_doc},
    {"decode_coded", py_decode_coded, METH_VARARGS, decode_coded_doc},
    {"moments", py_moments, METH_VARARGS, moments_doc},
    {"changes", py_changes, METH_VARARGS, changes_doc},
    {"first_not_finite", py_first_not_finite, METH_O, first_not_finite_doc},
    {NULL, NULL, 0, NULL},
};
