/* Encoding for Python. Lengths are checked here, so that a kernel may trust them. */
#include "bindings.h"

PyDoc_STRVAR(encode_doc, "encode(index, x, out, columns, importance=None, fused=True)\n\n"
                         "Fill the bytes `out` with blocks of float32 `x`, rows of `columns`; "
                         "`importance` has one float32 a\n"
                         "column. `fused` rounds multiply-adds once. Where `out` is None, return "
                         "them as new bytes.");

static PyObject *py_encode(PyObject *module, PyObject *args) {
    Py_ssize_t index, columns, out_size = 0;
    int fused = 1;
    PyObject *x_object, *out_object, *importance_object = Py_None, *result = NULL, *made = NULL;
    buffers held = {.used = 0};
    size_t count = 0, weights = 0;
    const float *importance = NULL;
    uint8_t *out = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "nOOn|Op", &index, &x_object, &out_object, &columns,
                          &importance_object, &fused)) {
        return NULL;
    }
    const encoder *row = aprfmt_encoder_at(index);
    if (!row) return NULL;
    const float *x = aprfmt_hold_floats(&held, x_object, 0, row->name, &count);
    if (!x) goto done;
    size_t blocks = count / row->block_size;
    if (out_object == Py_None) { /* not cleared: the kernel touches its pages first, and alone */
        out_size = (Py_ssize_t)(blocks * row->type_size);
        made = PyBytes_FromStringAndSize(NULL, out_size);
        out = made ? (uint8_t *)PyBytes_AsString(made) : NULL;
    } else {
        out = aprfmt_hold(&held, out_object, 1, &out_size);
    }
    if (!out) goto done;
    if (importance_object != Py_None) {
        importance = aprfmt_hold_floats(&held, importance_object, 0, "importance matrix", &weights);
        if (!importance) goto done;
    }
    if (columns <= 0 || (size_t)columns % row->block_size || count % (size_t)columns) {
        aprfmt_error(
            "%s: found %zu elements in rows of %zd, expected whole rows of a multiple of %u",
            row->name, count, columns, row->block_size);
        goto done;
    }
    if ((size_t)out_size != blocks * row->type_size || (importance && weights != (size_t)columns)) {
        aprfmt_error("%s: found room for %zd bytes and %zu weights, expected %zu bytes and %zd "
                     "weights or none",
                     row->name, out_size, weights, blocks * row->type_size, columns);
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS row->encode[fused](x, out, blocks, (size_t)columns / row->block_size,
                                              importance);
    Py_END_ALLOW_THREADS result = Py_NewRef(made ? made : Py_None);
done:
    Py_XDECREF(made);
    aprfmt_release(&held);
    return result;
}

PyDoc_STRVAR(
    encode_coded_doc,
    "encode_coded(x, packed, absmax, block, bounds, order)\n\n"
    "Fill `packed` (two elements a byte, the high nibble first) and float32 `absmax` (one a block) "
    "from\n"
    "float32 `x`: the nibble is order[i] where i of the 15 `bounds` lie below x / absmax.");

static PyObject *py_encode_coded(PyObject *module, PyObject *args) {
    Py_ssize_t block, order_size = 0, packed_size = 0;
    PyObject *x_object, *packed_object, *absmax_object, *bounds_object, *order_object,
        *result = NULL;
    buffers held = {.used = 0};
    size_t count = 0, absmax_count = 0, bounds_count = 0;
    const float *bounds = NULL;
    const uint8_t *order = NULL;
    uint8_t *packed = NULL;
    float *absmax = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOnOO", &x_object, &packed_object, &absmax_object, &block,
                          &bounds_object, &order_object)) {
        return NULL;
    }
    const float *x = aprfmt_hold_floats(&held, x_object, 0, "4-bit code", &count);
    if (x) packed = aprfmt_hold(&held, packed_object, 1, &packed_size);
    if (packed) absmax = aprfmt_hold_floats(&held, absmax_object, 1, "absmax", &absmax_count);
    if (absmax) bounds = aprfmt_hold_floats(&held, bounds_object, 0, "bounds", &bounds_count);
    if (bounds) order = aprfmt_hold(&held, order_object, 0, &order_size);
    if (!order) goto done;
    if (block <= 0 || bounds_count != 15 || order_size != 16 ||
        (size_t)packed_size != (count + 1) / 2 ||
        absmax_count != (count + (size_t)block - 1) / (size_t)block) {
        aprfmt_error("4-bit code: %zu elements in blocks of %zd do not fit %zd bytes, %zu scales, "
                     "%zu bounds and "
                     "an order of %zd",
                     count, block, packed_size, absmax_count, bounds_count, order_size);
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS aprfmt_level->encode_coded(x, packed, absmax, count, (size_t)block,
                                                      bounds, order);
    Py_END_ALLOW_THREADS result = Py_NewRef(Py_None);
done:
    aprfmt_release(&held);
    return result;
}

PyMethodDef APRFMT_ENCODING[] = {
    {"encode", py_encode, METH_VARARGS, encode_doc},
    {"encode_coded", py_encode_coded, METH_VARARGS, encode_coded_doc},
    {NULL, NULL, 0, NULL},
};
