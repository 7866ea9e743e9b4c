/* Codes of packed weights in another order, for Python; what they stand for is bind_packed.c's. */
#include "bindings.h"

PyDoc_STRVAR(turn_doc,
             "turn(order, held, first, out)\n\n"
             "Fill `out`, uint8 [rows, bytes], with the streams of rows from `first` on of codes "
             "that lie\nas `order` says: \"columns\" (of 1 or 4 bytes), \"awq\" or \"pairs\" of "
             "weight_layout.py. `first` is a\nmultiple of 8.");

static PyObject *py_turn(PyObject *module, PyObject *args) {
    const char *name;
    PyObject *from, *into, *result = NULL;
    Py_ssize_t first, size = 0;
    buffers held = {.used = 0};
    (void)module;
    if (!PyArg_ParseTuple(args, "sOnO", &name, &from, &first, &into)) return NULL;
    const int awq = !strcmp(name, "awq"), pairs = !strcmp(name, "pairs");
    const Py_buffer *to = aprfmt_hold_matrix(&held, into, 1, "streams");
    const Py_ssize_t rows = to ? to->shape[0] : 0;
    if (!to) goto done;
    Py_buffer *view = &held.view[held.used];
    if (PyObject_GetBuffer(from, view, PyBUF_STRIDED_RO) < 0) goto done;
    held.used++;
    size = view->itemsize;
    const int wide = size == 4 || (size == 1 && !awq);
    if (view->ndim != 2 || !wide || view->strides[1] != size || (pairs && size != 1)) {
        aprfmt_error("codes in order %s: found %d axes of %zd bytes", name, view->ndim, size);
        goto done;
    }
    const Py_ssize_t units = view->shape[pairs], there = view->shape[!pairs];
    const Py_ssize_t needed = awq ? (first + rows + 7) / 8 : pairs ? (first + rows + 1) / 2 : first + rows;
    const Py_ssize_t bytes = awq || pairs ? (units + 1) / 2 : size * units;
    if (first < 0 || first % 8 || needed > there || to->shape[1] != bytes || to->readonly ||
        to->strides[1] != 1 || to->strides[0] < bytes || view->strides[0] % size ||
        (awq && rows % 8)) {
        aprfmt_error("codes in order %s: found rows %zd to %zd of %zd bytes, expected some of %zd "
                     "units, of %zd",
                     name, first, first + rows, to->shape[1], there, bytes);
        goto done;
    }
    const Py_ssize_t skip = awq ? first / 8 * 4 : pairs ? first / 2 * view->strides[0] : first * size;
    const uint8_t *at = (const uint8_t *)view->buf + skip;
    const int order = awq ? TURN_AWQ : pairs ? TURN_PAIRS : size == 4 ? TURN_WORDS : TURN_BYTES;
    Py_BEGIN_ALLOW_THREADS if (rows) aprfmt_level->turn(order, at, view->strides[0], (size_t)units,
                                                        (size_t)rows, to->buf, (size_t)to->strides[0]);
    Py_END_ALLOW_THREADS result = Py_NewRef(Py_None);
done:
    aprfmt_release(&held);
    return result;
}

PyDoc_STRVAR(halves_doc,
             "halves(codes, half, out, back=False)\n\n"
             "Fill `out`, uint8 [blocks, bytes], with the nibbles of `codes` of the same shape, "
             "which are two\na byte in order, the low one first: within every `half` bytes (8 or "
             "16) those of the first half\nbecome the low ones, of the second the high ones; or "
             "`back`.");

static PyObject *py_halves(PyObject *module, PyObject *args) {
    PyObject *from, *into, *result = NULL;
    Py_ssize_t half;
    int back = 0;
    buffers held = {.used = 0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OnO|p", &from, &half, &into, &back)) return NULL;
    const Py_buffer *a = aprfmt_hold_matrix(&held, from, 1, "codes"), *b = NULL;
    if (a) b = aprfmt_hold_matrix(&held, into, 1, "blocks");
    if (!b) goto done;
    if (b->readonly || (half != 8 && half != 16) || a->shape[0] != b->shape[0] ||
        a->shape[1] != b->shape[1] || a->shape[1] % half || a->strides[1] != 1 ||
        b->strides[1] != 1 || a->strides[0] < 0 || b->strides[0] < 0) {
        aprfmt_error("codes: found %zd x %zd bytes for %zd x %zd in halves of %zd", a->shape[0],
                     a->shape[1], b->shape[0], b->shape[1], half);
        goto done;
    }
    const nibbles n = {a->buf, b->buf, (size_t)a->strides[0], (size_t)b->strides[0],
                       (size_t)a->shape[0], (size_t)a->shape[1], (size_t)half};
    Py_BEGIN_ALLOW_THREADS aprfmt_level->halves(&n, back);
    Py_END_ALLOW_THREADS result = Py_NewRef(Py_None);
done:
    aprfmt_release(&held);
    return result;
}

PyMethodDef APRFMT_CODES[] = {
    {"turn", py_turn, METH_VARARGS, turn_doc},
    {"halves", py_halves, METH_VARARGS, halves_doc},
    {NULL, NULL, 0, NULL},
};
