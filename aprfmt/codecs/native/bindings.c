#include "bindings.h"

/* From this many bytes on, results go past the cache: about one core's share of a last-level cache.
 */
enum { PAST_CACHE = 4 << 20 };

PyObject *aprfmt_error(const char *format, ...) {
    PyObject *errors = PyImport_ImportModule("aprfmt.errors");
    PyObject *kind = errors ? PyObject_GetAttrString(errors, "CodecError") : NULL;
    if (kind) {
        va_list arguments;
        va_start(arguments, format);
        PyErr_FormatV(kind, format, arguments);
        va_end(arguments);
    }
    Py_XDECREF(kind);
    Py_XDECREF(errors);
    return NULL;
}

void aprfmt_release(buffers *held) {
    while (held->used) PyBuffer_Release(&held->view[--held->used]);
}

void *aprfmt_hold(buffers *held, PyObject *from, int writable, Py_ssize_t *size) {
    Py_buffer *view = &held->view[held->used];
    int flags = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(from, view, flags) < 0) return NULL;
    held->used++;
    *size = view->len;
    return view->len ? view->buf : (void *)held->view; /* an empty buffer may have no address */
}

float *aprfmt_hold_floats(buffers *held, PyObject *from, int writable, const char *what,
                          size_t *count) {
    Py_ssize_t size = 0;
    float *at = aprfmt_hold(held, from, writable, &size);
    if (at && (size % 4 || (uintptr_t)at % 4)) {
        aprfmt_error(
            "%s: found %zd bytes at an address that is %zu modulo 4, expected float32 aligned to 4",
            what, size, (size_t)at % 4);
        return NULL;
    }
    *count = (size_t)size / 4;
    return at;
}

const Py_buffer *aprfmt_hold_matrix(buffers *held, PyObject *from, Py_ssize_t itemsize,
                                    const char *what) {
    Py_buffer *view = &held->view[held->used];
    if (PyObject_GetBuffer(from, view, PyBUF_STRIDED_RO) < 0) return NULL;
    held->used++;
    if (view->ndim == 2 && view->itemsize == itemsize) return view;
    aprfmt_error("%s: found %d axes of %zd bytes, expected rows and columns of %zd", what,
                 view->ndim, view->itemsize, itemsize);
    return NULL;
}

int aprfmt_store_mode(const float *out, size_t count, int stream) {
    if (!(stream < 0 ? count >= PAST_CACHE / 4 : stream)) return 0;
    return (uintptr_t)out % 32 == 0 ? 1 : (uintptr_t)out % 16 == 0 ? 2 : 0;
}

const decoder *aprfmt_decoder_at(Py_ssize_t index) {
    Py_ssize_t count = 0;
    while (aprfmt_level->decoders[count].name) count++;
    if (index >= 0 && index < count) return &aprfmt_level->decoders[index];
    aprfmt_error("kernel %zd does not exist; there are %zd", index, count);
    return NULL;
}

const encoder *aprfmt_encoder_at(Py_ssize_t index) {
    Py_ssize_t count = 0;
    while (aprfmt_level->encoders[count].name) count++;
    if (index >= 0 && index < count) return &aprfmt_level->encoders[index];
    aprfmt_error("encoder %zd does not exist; there are %zd", index, count);
    return NULL;
}
