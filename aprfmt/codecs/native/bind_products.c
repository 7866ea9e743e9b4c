/* Products with encoded weights, and the fill that benchmarks compare with, for Python. */
#include "bindings.h"

PyDoc_STRVAR(matmul_doc, "matmul(index, x, columns, raw, out, start, stop)\n\n"
                         "For rows start..stop of encoded `raw` [rows, columns]: out[t, row] = "
                         "x[t] . row, in float32 of x\n"
                         "[tokens, columns]; `out` is float32 [tokens, rows]. The other entries of "
                         "`out` are not touched.");

static PyObject *py_matmul(PyObject *module, PyObject *args) {
    Py_ssize_t index, columns, start, stop, size = 0;
    PyObject *x_object, *raw_object, *out_object, *result = NULL;
    buffers held = {.used = 0};
    size_t x_count = 0, out_count = 0;
    float *out = NULL;
    const uint8_t *raw = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "nOnOOnn", &index, &x_object, &columns, &raw_object, &out_object,
                          &start, &stop)) {
        return NULL;
    }
    const decoder *row = aprfmt_decoder_at(index);
    if (!row) return NULL;
    const float *x = aprfmt_hold_floats(&held, x_object, 0, "x", &x_count);
    if (x) raw = aprfmt_hold(&held, raw_object, 0, &size);
    if (raw) out = aprfmt_hold_floats(&held, out_object, 1, "out", &out_count);
    if (!out) goto done;
    if (columns <= 0 || (size_t)columns % row->block_size || x_count % (size_t)columns) {
        aprfmt_error("%s: found x of %zu elements and rows of %zd, expected rows of a multiple of "
                     "%u elements",
                     row->name, x_count, columns, row->block_size);
        goto done;
    }
    const size_t bytes = (size_t)columns / row->block_size * row->type_size;
    const size_t rows = (size_t)size / bytes, tokens = x_count / (size_t)columns;
    if ((size_t)size % bytes || out_count != rows * tokens || start < 0 || start > stop ||
        (size_t)stop > rows) {
        aprfmt_error("%s: found %zd bytes of weights, rows %zd to %zd and an output of %zu "
                     "elements; expected "
                     "whole rows of %zu bytes and %zu elements of output",
                     row->name, size, start, stop, out_count, bytes, rows * tokens);
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS aprfmt_level->products(row, raw + (size_t)start * bytes,
                                                  (size_t)(stop - start), x, tokens,
                                                  (size_t)columns, out + start, rows);
    Py_END_ALLOW_THREADS result = Py_NewRef(Py_None);
done:
    aprfmt_release(&held);
    return result;
}

PyDoc_STRVAR(stream_fill_doc, "stream_fill(out)\n\nFill float32 `out` with 1 past the cache: the "
                              "limit of every decoder of large tensors.");

static PyObject *py_stream_fill(PyObject *module, PyObject *out_object) {
    buffers held = {.used = 0};
    size_t count = 0;
    (void)module;
    float *out = aprfmt_hold_floats(&held, out_object, 1, "out", &count);
    if (!out) {
        aprfmt_release(&held);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS aprfmt_level->stream_fill(out, count, aprfmt_store_mode(out, count, 1));
    Py_END_ALLOW_THREADS aprfmt_release(&held);
    return Py_NewRef(Py_None);
}

PyMethodDef APRFMT_PRODUCTS[] = {
    {"matmul", py_matmul, METH_VARARGS, matmul_doc},
    {"stream_fill", py_stream_fill, METH_O, stream_fill_doc},
    {NULL, NULL, 0, NULL},
};
