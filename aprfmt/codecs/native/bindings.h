/* What the Python functions share: errors, buffers, the level in use. */
#ifndef APRFMT_BINDINGS_H
#define APRFMT_BINDINGS_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "level.h"

extern const level *aprfmt_level;

/* Raise aprfmt.errors.CodecError; returns NULL. */
PyObject *aprfmt_error(const char *format, ...);

enum { BUFFERS = 12 };

/* Buffers held at a time by one call; `release` gives them back. */
typedef struct {
    Py_buffer view[BUFFERS];
    int used;
} buffers;

void aprfmt_release(buffers *held);

/* Hold a contiguous buffer; its bytes, or NULL with an exception set. */
void *aprfmt_hold(buffers *held, PyObject *from, int writable, Py_ssize_t *size);

/* The same for float32, aligned to 4 bytes. */
float *aprfmt_hold_floats(buffers *held, PyObject *from, int writable, const char *what,
                          size_t *count);

/* Hold a matrix whose rows and elements lie `strides` apart; NULL with an exception set. */
const Py_buffer *aprfmt_hold_matrix(buffers *held, PyObject *from, Py_ssize_t itemsize,
                                    const char *what);

/* The way of storing (sink.h) for an output; `stream`: 1 past the cache, 0 through it, -1 if it is
 * large. */
int aprfmt_store_mode(const float *out, size_t count, int stream);

/* A decoder by its index, or NULL with an exception set. */
const decoder *aprfmt_decoder_at(Py_ssize_t index);

/* An encoder by its index, or NULL with an exception set. */
const encoder *aprfmt_encoder_at(Py_ssize_t index);

/* A list of tuples, one of each of `parts` moments, in the order of their members. */
PyObject *aprfmt_moments_list(const moments *found, size_t parts);

/* The functions of the module, by file. */
extern PyMethodDef APRFMT_DECODING[], APRFMT_PACKED[], APRFMT_CODES[], APRFMT_ENCODING[],
    APRFMT_PRODUCTS[], APRFMT_STEPS[], APRFMT_DISTANCES[], APRFMT_ROWS[];

#endif
