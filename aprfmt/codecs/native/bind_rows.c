/* Statistics and distances of rows whose columns are in several buffers, for Python.
 *
 * Of such rows a segment at a time is decoded, so that nothing decoded leaves the first caches. */
#include "bindings.h"
#include "threads.h"

#include <math.h>

PyDoc_STRVAR(moments_rows_doc,
             "moments_rows(pieces, width, skip, count, part, threads)\n\n"
             "What `moments` returns, of rows of `width` elements that lie side by side in several "
             "buffers: `pieces` are\n"
             "(index, raw, columns, first, wide), of each row of `columns` elements in `raw` the "
             "`wide` from `first` on. The\n"
             "first `skip` elements are left out. For encodings of single elements.");

typedef struct {
    const decoder *kind;
    const uint8_t *raw;
    size_t columns, first, wide;
} piece;

/* Where the next element is: `pieces` end with one that has no kind. */
typedef struct {
    const piece *pieces, *here;
    size_t row, column; /* of the piece `here` */
} row_reader;

static row_reader read_after(const piece *pieces, size_t width, size_t skip) {
    row_reader r = {pieces, pieces, skip / width, skip % width};
    while (r.column >= r.here->wide) r.column -= r.here++->wide;
    return r;
}

/* Decode the next `count` elements into `out`. */
static void read_elements(row_reader *r, float *out, size_t count) {
    while (count) {
        while (r->column == r->here->wide) { /* the next piece that has columns */
            r->column = 0;
            r->here++;
            if (!r->here->kind) {
                r->here = r->pieces;
                r->row++;
            }
        }
        const piece *p = r->here;
        size_t now = p->wide - r->column;
        if (now > count) now = count;
        p->kind->decode[0](
            p->raw + (r->row * p->columns + p->first + r->column) * p->kind->type_size, out, now);
        out += now;
        count -= now;
        r->column += now;
    }
}

typedef struct {
    const piece *pieces;
    size_t width, skip, count, part;
    moments *found;
} counting_rows;

static void count_part_of_rows(void *work, size_t number) {
    const counting_rows *c = work;
    const size_t start = number * c->part;
    row_reader reader = read_after(c->pieces, c->width, c->skip + start);
    float scratch[SEGMENT];
    for (size_t left = c->count - start < c->part ? c->count - start : c->part; left;) {
        const size_t now = left < SEGMENT ? left : SEGMENT;
        read_elements(&reader, scratch, now);
        aprfmt_level->add_moments(scratch, now, &c->found[number]);
        left -= now;
    }
}

/* Read and check the pieces; 0 with an exception set. `held` takes a buffer for each. */
static int hold_pieces(PyObject *given, Py_ssize_t pieces, Py_buffer *held, piece *found,
                       size_t width, size_t rows) {
    size_t wide = 0;
    for (Py_ssize_t i = 0; i < pieces; i++) {
        Py_ssize_t index, columns, first, own;
        PyObject *raw, *row = PyTuple_GetItem(given, i);
        if (!row || !PyArg_ParseTuple(row, "nOnnn", &index, &raw, &columns, &first, &own)) return 0;
        const decoder *kind = aprfmt_decoder_at(index);
        if (!kind || PyObject_GetBuffer(raw, &held[i], PyBUF_SIMPLE) < 0) return 0;
        const size_t bytes = kind->type_size;
        if (kind->block_size != 1 || columns < 1 || first < 0 || own < 0 || own > columns ||
            first > columns - own || rows > SIZE_MAX / 2 / bytes / (size_t)columns ||
            (size_t)held[i].len % ((size_t)columns * bytes) ||
            (size_t)held[i].len < rows * (size_t)columns * bytes) {
            aprfmt_error("%s: found %zd bytes for %zu rows or more of %zd elements, of which %zd "
                         "from %zd on are wanted",
                         kind->name, held[i].len, rows, columns, own, first);
            PyBuffer_Release(&held[i]);
            held[i].obj = NULL;
            return 0;
        }
        found[i] = (piece){kind, held[i].buf, (size_t)columns, (size_t)first, (size_t)own};
        wide += (size_t)own;
    }
    if (wide != width) aprfmt_error("found %zu columns; expected %zu", wide, width);
    return wide == width;
}

static PyObject *py_moments_rows(PyObject *module, PyObject *args) {
    Py_ssize_t width, skip, count, part, threads;
    PyObject *given, *result = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!nnnnn", &PyTuple_Type, &given, &width, &skip, &count, &part,
                          &threads))
        return NULL;
    if (width < 1 || skip < 0 || count < 1 || part < 1 || part % SEGMENT ||
        skip > PY_SSIZE_T_MAX - count - width) {
        return aprfmt_error("found %zd elements after %zd in rows of %zd, in parts of %zd", count,
                            skip, width, part);
    }
    const size_t rows = ((size_t)skip + (size_t)count + (size_t)width - 1) / (size_t)width;
    const size_t parts = ((size_t)count + (size_t)part - 1) / (size_t)part;
    const Py_ssize_t pieces = PyTuple_Size(given);
    Py_buffer *held = PyMem_Calloc((size_t)pieces + 1, sizeof *held);
    piece *found = PyMem_Calloc((size_t)pieces + 1, sizeof *found); /* the last has no kind */
    moments *made = PyMem_Malloc((parts + 1) * sizeof *made);
    if (!held || !found || !made) {
        PyErr_NoMemory();
        goto done;
    }
    if (!hold_pieces(given, pieces, held, found, (size_t)width, rows)) goto done;
    for (size_t i = 0; i < parts; i++)
        made[i] = (moments){.least = INFINITY, .most = -INFINITY};
    counting_rows work = {found, (size_t)width, (size_t)skip, (size_t)count, (size_t)part, made};
    Py_BEGIN_ALLOW_THREADS aprfmt_share(count_part_of_rows, &work, parts, threads);
    Py_END_ALLOW_THREADS result = aprfmt_moments_list(made, parts);
done:
    for (Py_ssize_t i = 0; held && i < pieces; i++) {
        if (held[i].obj) PyBuffer_Release(&held[i]);
    }
    PyMem_Free(held);
    PyMem_Free(found);
    PyMem_Free(made);
    return result;
}

PyDoc_STRVAR(apart_rows_doc,
             "apart_rows(x, y, count)\n\n"
             "Return (dd, yy, most, at, odd_x, odd_y) as `apart` does of `count` elements of rows in "
             "several buffers: `x`\n"
             "and `y` are each (pieces, width, skip) as for `moments_rows`.");

/* One side's rows, and the buffers that hold them. */
typedef struct {
    Py_buffer *held;
    piece *pieces;
    Py_ssize_t count;
    row_reader reader;
} side;

static void release_side(side *s) {
    for (Py_ssize_t i = 0; s->held && i < s->count; i++) {
        if (s->held[i].obj) PyBuffer_Release(&s->held[i]);
    }
    PyMem_Free(s->held);
    PyMem_Free(s->pieces);
}

/* Hold the rows of (pieces, width, skip), of which `count` elements are read; 0 with an exception. */
static int hold_side(side *s, PyObject *given, Py_ssize_t count) {
    PyObject *pieces;
    Py_ssize_t width, skip;
    if (!PyArg_ParseTuple(given, "O!nn", &PyTuple_Type, &pieces, &width, &skip)) return 0;
    if (width < 1 || skip < 0 || count < 1 || skip > PY_SSIZE_T_MAX - count - width) {
        aprfmt_error("found %zd elements after %zd in rows of %zd", count, skip, width);
        return 0;
    }
    s->count = PyTuple_Size(pieces);
    s->held = PyMem_Calloc((size_t)s->count + 1, sizeof *s->held);
    s->pieces = PyMem_Calloc((size_t)s->count + 1, sizeof *s->pieces); /* the last has no kind */
    if (!s->held || !s->pieces) {
        PyErr_NoMemory();
        return 0;
    }
    const size_t rows = ((size_t)skip + (size_t)count + (size_t)width - 1) / (size_t)width;
    if (!hold_pieces(pieces, s->count, s->held, s->pieces, (size_t)width, rows)) return 0;
    s->reader = read_after(s->pieces, (size_t)width, (size_t)skip);
    return 1;
}

/* Add `n` elements of both from place `base` on, in halves as apart.h has them, to what is found. */
static void add_apart(row_reader *x, row_reader *y, size_t n, size_t base, apart_from *found) {
    if (n <= SEGMENT) {
        float a[SEGMENT], b[SEGMENT];
        apart_from own = {0};
        read_elements(x, a, n);
        read_elements(y, b, n);
        aprfmt_level->measure_apart(a, b, n, &own);
        if (own.most > found->most) {
            found->most = own.most;
            found->at = base + own.at;
        }
        found->odd_x += own.odd_x;
        found->odd_y += own.odd_y;
        found->dd = own.dd;
        found->yy = own.yy;
        return;
    }
    const size_t half = n / 2 - n / 2 % 8;
    add_apart(x, y, half, base, found);
    const double dd = found->dd, yy = found->yy;
    add_apart(x, y, n - half, base + half, found);
    found->dd = dd + found->dd;
    found->yy = yy + found->yy;
}

static PyObject *py_apart_rows(PyObject *module, PyObject *args) {
    PyObject *x, *y, *result = NULL;
    Py_ssize_t count;
    side sides[2] = {{.held = NULL}, {.held = NULL}};
    apart_from found = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!n", &PyTuple_Type, &x, &PyTuple_Type, &y, &count)) return NULL;
    if (hold_side(&sides[0], x, count) && hold_side(&sides[1], y, count)) {
        Py_BEGIN_ALLOW_THREADS add_apart(&sides[0].reader, &sides[1].reader, (size_t)count, 0,
                                         &found);
        Py_END_ALLOW_THREADS result =
            Py_BuildValue("dddnnn", found.dd, found.yy, found.most, (Py_ssize_t)found.at,
                          (Py_ssize_t)found.odd_x, (Py_ssize_t)found.odd_y);
    }
    release_side(&sides[0]);
    release_side(&sides[1]);
    return result;
}

PyMethodDef APRFMT_ROWS[] = {
    {"moments_rows", py_moments_rows, METH_VARARGS, moments_rows_doc},
    {"apart_rows", py_apart_rows, METH_VARARGS, apart_rows_doc},
    {NULL, NULL, 0, NULL},
};
