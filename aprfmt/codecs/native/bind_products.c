/* Products with encoded weights, and the fill that benchmarks compare with, for Python. */
#include "bindings.h"
#include "threads.h"

/* Products of one call, and weights times tokens that one part of their work has at least. */
enum { PRODUCTS = 8, PART = 1 << 15 };

typedef struct {
    const decoder *kind;
    const uint8_t *raw;
    const float *x;
    float *out;
    size_t rows, columns, bytes; /* bytes of a row */
    size_t step, parts;          /* rows of a part */
} product;

typedef struct {
    product one[PRODUCTS];
    size_t count, tokens;
} products;

static void product_part(void *work, size_t part) {
    const products *all = work;
    const product *p = all->one;
    for (; part >= p->parts; p++) part -= p->parts;
    const size_t start = part * p->step;
    const size_t rows = p->rows - start < p->step ? p->rows - start : p->step;
    aprfmt_level->products(p->kind, p->raw + start * p->bytes, rows, p->x, all->tokens, p->columns,
                           p->out + start, p->rows);
}

static int read_product(PyObject *from, buffers *held, product *p, size_t tokens) {
    PyObject *x_object, *raw_object, *out_object;
    Py_ssize_t index, size = 0;
    size_t x_count = 0, out_count = 0;
    if (!PyArg_ParseTuple(from, "nOOO", &index, &x_object, &raw_object, &out_object)) return -1;
    if (!(p->kind = aprfmt_decoder_at(index))) return -1;
    if (!(p->x = aprfmt_hold_floats(held, x_object, 0, "x", &x_count))) return -1;
    if (!(p->raw = aprfmt_hold(held, raw_object, 0, &size))) return -1;
    if (!(p->out = aprfmt_hold_floats(held, out_object, 1, "out", &out_count))) return -1;
    p->columns = x_count / tokens;
    if (!p->columns || x_count % tokens || p->columns % p->kind->block_size) {
        aprfmt_error("%s: found x of %zu elements for %zu tokens, expected rows of a multiple of "
                     "%u elements",
                     p->kind->name, x_count, tokens, p->kind->block_size);
        return -1;
    }
    p->bytes = p->columns / p->kind->block_size * p->kind->type_size;
    p->rows = (size_t)size / p->bytes;
    if ((size_t)size % p->bytes || out_count != p->rows * tokens) {
        aprfmt_error("%s: found %zd bytes of weights and an output of %zu elements; expected "
                     "whole rows of %zu bytes and %zu elements of output",
                     p->kind->name, size, out_count, p->bytes, p->rows * tokens);
        return -1;
    }
    return 0;
}

PyDoc_STRVAR(matmuls_doc,
             "matmuls(jobs, tokens, threads)\n\n"
             "For each (index, x, raw, out): out[t, row] = x[t] . row, in float32 of x [tokens, "
             "columns], encoded\n"
             "`raw` [rows, columns] and float32 `out` [tokens, rows].");

static PyObject *py_matmuls(PyObject *module, PyObject *args) {
    PyObject *jobs, *result = NULL;
    Py_ssize_t tokens, threads;
    buffers held[PRODUCTS];
    products all = {.count = 0};
    size_t held_count = 0, work = 0, parts = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!nn", &PyTuple_Type, &jobs, &tokens, &threads)) return NULL;
    all.count = (size_t)PyTuple_Size(jobs);
    if (all.count > PRODUCTS || tokens < 1) {
        return aprfmt_error("found %zu products of %zd tokens; expected at most %d, of one or more",
                            all.count, tokens, PRODUCTS);
    }
    all.tokens = (size_t)tokens;
    for (size_t i = 0; i < all.count; i++) {
        held[held_count++].used = 0;
        if (read_product(PyTuple_GetItem(jobs, (Py_ssize_t)i), &held[i], &all.one[i], all.tokens))
            goto done;
        work += all.one[i].rows * all.one[i].columns * all.tokens;
    }
    size_t part = work / (threads > 1 ? 32 * (size_t)threads : 1);
    if (part < PART) part = PART;
    for (size_t i = 0; i < all.count; i++) {
        product *p = &all.one[i];
        p->step = threads > 1 ? 1 + part / (p->columns * all.tokens) : p->rows + 1;
        parts += p->parts = (p->rows + p->step - 1) / p->step;
    }
    Py_BEGIN_ALLOW_THREADS aprfmt_share(product_part, &all, parts, threads);
    Py_END_ALLOW_THREADS result = Py_NewRef(Py_None);
done:
    while (held_count) aprfmt_release(&held[--held_count]);
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
    {"matmuls", py_matmuls, METH_VARARGS, matmuls_doc},
    {"stream_fill", py_stream_fill, METH_O, stream_fill_doc},
    {NULL, NULL, 0, NULL},
};
