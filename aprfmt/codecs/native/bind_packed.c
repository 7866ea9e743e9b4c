/* Packed weights of safetensors for Python. Shapes are checked here, so that kernels may trust
 * them. */
#include "bindings.h"

PyDoc_STRVAR(
    decode_packed_doc,
    "decode_packed(streams, bits, values, at, numbers, tables, group, out, stream=-1)\n\n"
    "Fill float32 `out` [rows, columns] from `streams`, uint8 [rows, bytes], of codes of `bits`\n"
    "bits, whose numbers are `values`. `at` is (first row, rows and columns of a tile), `numbers`\n"
    "are (scale, zero, offset), each None or [down, across] of float32, or of bytes that are looked\n"
    "up in the float32 [256] of `tables` with it. `group` is None or the int32 [columns] that\n"
    "says which column of the numbers is meant. `stream` stores past the cache as in `decode`.");

/* Take one kind of numbers; 0, or -1 with an exception set. */
static int take_numbers(buffers *held, PyObject *from, PyObject *table, size_t down, size_t across,
                        tile_numbers *into) {
    *into = (tile_numbers){NULL, 0, 0, NULL};
    if (from == Py_None) return 0;
    if (table != Py_None) {
        size_t count;
        into->table = aprfmt_hold_floats(held, table, 0, "table of numbers", &count);
        if (!into->table) return -1;
        if (count != 256) {
            aprfmt_error("packed weight: found a table of %zu numbers, expected 256", count);
            return -1;
        }
    }
    const Py_buffer *view = aprfmt_hold_matrix(held, from, into->table ? 1 : 4, "numbers of tiles");
    if (!view) return -1;
    if ((size_t)view->shape[0] < down || (size_t)view->shape[1] < across) {
        aprfmt_error("packed weight: found %zd x %zd numbers, expected %zu x %zu", view->shape[0],
                     view->shape[1], down, across);
        return -1;
    }
    into->at = view->buf;
    into->down = view->strides[0];
    into->across = view->strides[1];
    return 0;
}

/* Take the group of every column, and how many there are; 0, or -1 with an exception set. */
static int take_group(buffers *held, PyObject *from, packed *p, size_t *across) {
    Py_ssize_t size = 0;
    p->group = NULL;
    p->groups = *across = (p->columns + p->wide - 1) / p->wide;
    if (from == Py_None) return 0;
    if (!(p->group = aprfmt_hold(held, from, 0, &size))) return -1;
    *across = 0;
    int bad = (size_t)size != 4 * p->columns || (uintptr_t)p->group % 4;
    for (size_t c = 0; !bad && c < p->columns; c++) {
        bad = p->group[c] < 0;
        if (!bad && (size_t)p->group[c] >= *across) *across = (size_t)p->group[c] + 1;
    }
    if (bad) aprfmt_error("packed weight: its groups are no int32 of 0 and more for each column");
    p->groups = *across;
    return bad ? -1 : 0;
}

/* Take what every code counts as. */
static int take_values(buffers *held, PyObject *values, packed *p) {
    size_t count;
    p->values = aprfmt_hold_floats(held, values, 0, "numbers of codes", &count);
    if (!p->values) return -1;
    if (p->bits < 1 || p->bits > 8 || count != (size_t)1 << p->bits) {
        aprfmt_error("packed weight: found %zu numbers of codes of %d bits", count, p->bits);
        return -1;
    }
    for (size_t i = 0; i < 16; i++) p->sixteen[i] = p->values[i % count];
    return 0;
}

static int take_streams(buffers *held, PyObject *from, PyObject *values, packed *p) {
    const Py_buffer *view = aprfmt_hold_matrix(held, from, 1, "streams");
    if (!view) return -1;
    p->streams = view->buf;
    p->rows = (size_t)view->shape[0];
    p->row_bytes = (size_t)view->shape[1];
    if ((p->row_bytes > 1 && view->strides[1] != 1) || view->strides[0] < view->shape[1]) {
        aprfmt_error("streams: found rows %zd bytes apart, expected %zd or more", view->strides[0],
                     view->shape[1]);
        return -1;
    }
    p->stride = (size_t)view->strides[0];
    return take_values(held, values, p);
}

/* What is stored with codes, as the arguments have it. */
typedef struct {
    Py_ssize_t first, tall, wide;
    PyObject *scale, *zero, *offset, *tables[3], *group;
} companions;

/* Take tiles and numbers of the streams that were taken, for `count` elements of them. */
static int take_companions(buffers *held, const companions *b, size_t count, packed *p) {
    size_t across;
    p->columns = p->rows ? count / p->rows : 0;
    if (b->first < 0 || b->tall < 1 || b->wide < 1 || p->columns * p->rows != count ||
        (p->columns * (size_t)p->bits + 7) / 8 > p->row_bytes) {
        aprfmt_error("packed weight: found %zu rows of %zu bytes for %zu elements of %d bits in "
                     "tiles of %zd x %zd from row %zd",
                     p->rows, p->row_bytes, count, p->bits, b->tall, b->wide, b->first);
        return -1;
    }
    p->first = (size_t)b->first, p->tall = (size_t)b->tall, p->wide = (size_t)b->wide;
    if (take_group(held, b->group, p, &across)) return -1;
    const size_t down = p->rows ? (p->first + p->rows - 1) / p->tall + 1 : 0;
    return take_numbers(held, b->scale, b->tables[0], down, across, &p->scale) ||
                   take_numbers(held, b->zero, b->tables[1], down, across, &p->zero) ||
                   take_numbers(held, b->offset, b->tables[2], down, across, &p->offset)
               ? -1
               : 0;
}

static PyObject *py_decode_packed(PyObject *module, PyObject *args) {
    PyObject *streams, *values, *into, *result = NULL;
    int stream = -1;
    buffers held = {.used = 0};
    companions b;
    packed p;
    size_t count;
    (void)module;
    if (!PyArg_ParseTuple(args, "OiO(nnn)(OOO)(OOO)OO|i", &streams, &p.bits, &values, &b.first,
                          &b.tall, &b.wide, &b.scale, &b.zero, &b.offset, &b.tables[0],
                          &b.tables[1], &b.tables[2], &b.group, &into, &stream)) {
        return NULL;
    }
    if (take_streams(&held, streams, values, &p)) goto done;
    float *out = aprfmt_hold_floats(&held, into, 1, "packed weight", &count);
    if (!out || take_companions(&held, &b, count, &p)) goto done;
    /* Storing past the cache needs every run of eight aligned. */
    const int aligned = p.columns % 8 == 0 && (p.wide % 8 == 0 || p.wide >= p.columns);
    int mode = aligned ? aprfmt_store_mode(out, count, stream) : 0;
    Py_BEGIN_ALLOW_THREADS aprfmt_level->packed(&p, out, mode);
    Py_END_ALLOW_THREADS result = Py_NewRef(Py_None);
done:
    aprfmt_release(&held);
    return result;
}

PyDoc_STRVAR(
    recode_packed_doc,
    "recode_packed(encoder, decoder, out, streams, bits, values, at, numbers, tables, group)\n\n"
    "Decode rows as `decode_packed` does and fill the bytes `out` with them as an encoder of\n"
    "elements makes them, a few rows at a time. Return what `changes` says of both, by the\n"
    "decoder of what was made.");

enum { FEW = 1 << 14 }; /* elements decoded at a time: they stay in the cache */

static void recode(const packed *p, float *room, const encoder *to, const decoder *back,
                   uint8_t *out, changes *found) {
    const size_t step = p->columns < FEW ? FEW / p->columns : 1;
    float again[SEGMENT];
    packed some = *p;
    for (size_t at = 0; at < p->rows; at += step) {
        some.rows = p->rows - at < step ? p->rows - at : step;
        some.first = p->first + at;
        some.streams = p->streams + at * p->stride;
        const size_t count = some.rows * p->columns;
        aprfmt_level->packed(&some, room, 0);
        to->encode[1](room, out, count, p->columns, NULL);
        for (size_t i = 0; i < count; i += SEGMENT) {
            const size_t now = count - i < SEGMENT ? count - i : SEGMENT;
            back->decode[0](out + i * back->type_size, again, now);
            aprfmt_level->add_changes(room + i, again, now, found);
        }
        out += count * to->type_size;
    }
}

static PyObject *py_recode_packed(PyObject *module, PyObject *args) {
    PyObject *streams, *values, *into, *result = NULL;
    Py_ssize_t to, from, size = 0;
    buffers held = {.used = 0};
    companions b;
    packed p;
    changes found = {0, 0, 0};
    float *room = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "nnOOiO(nnn)(OOO)(OOO)O", &to, &from, &into, &streams, &p.bits,
                          &values, &b.first, &b.tall, &b.wide, &b.scale, &b.zero, &b.offset,
                          &b.tables[0], &b.tables[1], &b.tables[2], &b.group)) {
        return NULL;
    }
    const encoder *encoding = aprfmt_encoder_at(to);
    const decoder *back = encoding ? aprfmt_decoder_at(from) : NULL;
    if (!back || take_streams(&held, streams, values, &p)) goto done;
    uint8_t *out = aprfmt_hold(&held, into, 1, &size);
    if (!out) goto done;
    if (encoding->block_size != 1 || back->block_size != 1 ||
        encoding->type_size != back->type_size || (size_t)size % encoding->type_size) {
        aprfmt_error("packed weight: %zd bytes of %s, read as %s, are no single elements", size,
                     encoding->name, back->name);
        goto done;
    }
    const size_t count = (size_t)size / encoding->type_size;
    if (take_companions(&held, &b, count, &p)) goto done;
    room = PyMem_Malloc(sizeof *room * (p.columns < FEW ? FEW : p.columns));
    if (!room) {
        PyErr_NoMemory();
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS if (count) recode(&p, room, encoding, back, out, &found);
    Py_END_ALLOW_THREADS result = Py_BuildValue("nnn", (Py_ssize_t)found.differ,
                                                (Py_ssize_t)found.over, (Py_ssize_t)found.under);
done:
    PyMem_Free(room);
    aprfmt_release(&held);
    return result;
}

PyDoc_STRVAR(
    decode_across_doc,
    "decode_across(order, held, bits, values, at, numbers, tables, group, out, stream=-1)\n\n"
    "Do what `decode_packed` does where codes lie in `order`: \"columns\" (of 1 or 4 bytes) or\n"
    "\"awq\" of weight_layout.py. `at` is (first row, rows, columns of a tile of one row), all\n"
    "multiples of 8 but the last.");

static PyObject *py_decode_across(PyObject *module, PyObject *args) {
    const char *name;
    PyObject *from, *values, *scale, *zero, *offset, *tables[3], *group, *into, *result = NULL;
    Py_ssize_t first, rows, wide;
    int stream = -1;
    buffers held = {.used = 0};
    packed p;
    float *room = NULL;
    size_t count, across;
    (void)module;
    if (!PyArg_ParseTuple(args, "sOiO(nnn)(OOO)(OOO)OO|i", &name, &from, &p.bits, &values, &first,
                          &rows, &wide, &scale, &zero, &offset, &tables[0], &tables[1], &tables[2],
                          &group, &into, &stream)) {
        return NULL;
    }
    const int awq = !strcmp(name, "awq");
    if (take_values(&held, values, &p)) goto done;
    float *out = aprfmt_hold_floats(&held, into, 1, "packed weight", &count);
    if (!out) goto done;
    Py_buffer *view = &held.view[held.used];
    if (PyObject_GetBuffer(from, view, PyBUF_STRIDED_RO) < 0) goto done;
    held.used++;
    const Py_ssize_t size = view->itemsize;
    const int fits = awq ? size == 4 && p.bits == 4
                         : (size == 4 && p.bits == 2) || ((size == 4 || size == 1) && (p.bits == 4 || p.bits == 8));
    if (view->ndim != 2 || !fits || view->strides[1] != size || view->strides[0] < 0 ||
        (awq ? 0 : strcmp(name, "columns"))) {
        aprfmt_error("codes of %d bits in order %s: found %d axes of %zd bytes", p.bits, name,
                     view->ndim, size);
        goto done;
    }
    p.rows = rows > 0 ? (size_t)rows : 0;
    p.columns = p.rows ? count / p.rows : 0;
    const size_t each = awq ? 1 : (size_t)(8 * size / p.bits); /* columns of a unit */
    const Py_ssize_t there = view->shape[1] * (awq ? 8 : 1);
    if (first < 0 || first % 8 || rows < 0 || rows % 8 || wide < 1 || p.columns * p.rows != count ||
        p.columns % 8 || p.columns % each || (size_t)view->shape[0] != p.columns / each ||
        first + rows > there) {
        aprfmt_error("codes in order %s: found rows %zd to %zd of %zu columns, in tiles of %zd, "
                     "expected some of %zd rows of %zu",
                     name, first, first + rows, p.columns, wide, there, (size_t)view->shape[0] * each);
        goto done;
    }
    p.streams = (const uint8_t *)view->buf + (awq ? first / 2 : first * size);
    p.stride = (size_t)view->strides[0];
    p.first = (size_t)first, p.tall = 1, p.wide = (size_t)wide;
    if (take_group(&held, group, &p, &across)) goto done;
    const size_t down = p.first + p.rows;
    if (take_numbers(&held, scale, tables[0], down, across, &p.scale) ||
        take_numbers(&held, zero, tables[1], down, across, &p.zero) ||
        take_numbers(&held, offset, tables[2], down, across, &p.offset)) {
        goto done;
    }
    room = PyMem_Malloc(3 * BAND * sizeof *room * (p.group ? across : SPAN + 1));
    if (!room) {
        PyErr_NoMemory();
        goto done;
    }
    const int order = awq ? TURN_AWQ : size == 4 ? TURN_WORDS : TURN_BYTES;
    int mode = aprfmt_store_mode(out, count, stream);
    Py_BEGIN_ALLOW_THREADS if (count) aprfmt_level->across(&p, order, room, out, mode);
    Py_END_ALLOW_THREADS result = Py_NewRef(Py_None);
done:
    PyMem_Free(room);
    aprfmt_release(&held);
    return result;
}

/* Take (scale, zero, offset) of all groups; 0, or -1 with an exception set. */
static int take_three(buffers *held, PyObject *const from[3], const regrouped *g,
                      three_numbers *into) {
    tile_numbers *const each[3] = {&into->scale, &into->zero, &into->offset};
    for (int i = 0; i < 3; i++) {
        if (take_numbers(held, from[i], Py_None, g->rows, g->groups, each[i])) return -1;
    }
    return 0;
}

PyDoc_STRVAR(regroup_doc,
             "regroup(codes, size, values, before, after, most) -> (changed, most)\n\n"
             "Count the groups of `size` codes in which a value differs under two sets of numbers, "
             "each\n(scale, zero, offset) as in `decode_packed`, float32 [rows, groups] or None; "
             "and return the\nlargest distance of two values, or `most` if that is more. `codes` "
             "are uint8 [rows, bytes] of\ntwo, the low one first, whose numbers are `values`, "
             "float32 [16].");

static PyObject *py_regroup(PyObject *module, PyObject *args) {
    PyObject *from, *values, *a[3], *b[3], *result = NULL;
    Py_ssize_t size;
    size_t count;
    buffers held = {.used = 0};
    regrouped g = {.changed = 0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OnO(OOO)(OOO)d", &from, &size, &values, &a[0], &a[1], &a[2], &b[0],
                          &b[1], &b[2], &g.most)) {
        return NULL;
    }
    const Py_buffer *view = aprfmt_hold_matrix(&held, from, 1, "codes");
    if (!view || !(g.values = aprfmt_hold_floats(&held, values, 0, "numbers of codes", &count))) goto done;
    if (count != 16 || size < 2 || size % 2 || view->shape[1] % (size / 2) || view->strides[1] != 1 ||
        view->strides[0] < 0) {
        aprfmt_error("codes: found %zd x %zd bytes in groups of %zd, and %zu numbers", view->shape[0],
                     view->shape[1], size, count);
        goto done;
    }
    g.streams = view->buf, g.stride = (size_t)view->strides[0];
    g.rows = (size_t)view->shape[0], g.groups = (size_t)(view->shape[1] / (size / 2)), g.size = (size_t)size;
    if (take_three(&held, a, &g, &g.before) || take_three(&held, b, &g, &g.after)) goto done;
    Py_BEGIN_ALLOW_THREADS aprfmt_level->regroup(&g);
    Py_END_ALLOW_THREADS result = Py_BuildValue("nd", (Py_ssize_t)g.changed, g.most);
done:
    aprfmt_release(&held);
    return result;
}

PyMethodDef APRFMT_PACKED[] = {
    {"decode_packed", py_decode_packed, METH_VARARGS, decode_packed_doc},
    {"recode_packed", py_recode_packed, METH_VARARGS, recode_packed_doc},
    {"decode_across", py_decode_across, METH_VARARGS, decode_across_doc},
    {"regroup", py_regroup, METH_VARARGS, regroup_doc},
    {NULL, NULL, 0, NULL},
};
