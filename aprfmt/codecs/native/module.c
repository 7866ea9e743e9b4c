/* The Python module aprfmt.codecs.native._kernels: buffers in, caller-owned buffers out.
 *
 * Nothing is allocated but walk_strings' result, and the GIL is released while a kernel runs.
 * Errors are aprfmt's CodecError, of walk_strings ValueError.
 */
#include "bindings.h"
#include "tables.h"

#ifdef APRFMT_HAS_AVX2
#include <cpuid.h>
#endif

const level *aprfmt_level = &aprfmt_generic;

/* The levels, worst first, up to the best that this processor and system can run. */
static const level *levels[3] = {&aprfmt_generic};
static size_t level_count = 1;

#ifdef APRFMT_HAS_AVX2
/* Look for AVX2, FMA and F16C, then AVX-512 F, DQ, BW and VL, and for a system that saves their
 * registers. */
static void find_levels(void) {
    unsigned a, b, c, d, low, high;
    const unsigned needed = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & needed) != needed) return;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 6) != 6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return;
    levels[level_count++] = &aprfmt_avx2;
#ifdef APRFMT_HAS_AVX512
    const unsigned wide = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    if ((low & 0xe6) != 0xe6 || (b & wide) != wide) return;
    aprfmt_fill_avx512();
    levels[level_count++] = &aprfmt_avx512;
#endif
}
#endif

PyDoc_STRVAR(walk_strings_doc, "walk_strings(buffer, offset, count, swapped)\n\n"
                               "Step over `count` strings, each a 64-bit length and its bytes, "
                               "from `offset` on; `swapped` for a\n"
                               "big-endian file. Returns (starts, end): the offsets of the length "
                               "fields as native 64-bit integers in\n"
                               "bytes, and the offset after the last string. Raises ValueError "
                               "where a string passes the end.");

static PyObject *py_walk_strings(PyObject *module, PyObject *args) {
    Py_ssize_t offset, count, size = 0;
    int swapped;
    PyObject *buffer_object, *starts = NULL;
    buffers held = {.used = 0};
    (void)module;
    if (!PyArg_ParseTuple(args, "Onnp", &buffer_object, &offset, &count, &swapped)) return NULL;
    const uint8_t *data = aprfmt_hold(&held, buffer_object, 0, &size);
    if (!data) return NULL;
    if (offset < 0 || offset > size || count < 0 || count > (size - offset) / 8) {
        PyErr_Format(PyExc_ValueError,
                     "%zd strings at offset %zd take at least 8 bytes each, %zd bytes remain",
                     count, offset, offset < 0 || offset > size ? 0 : size - offset);
        goto done;
    }
    starts = PyBytes_FromStringAndSize(NULL, count * 8);
    if (!starts) goto done;
    size_t end, bad = 0;
    uint64_t *into = (uint64_t *)(void *)PyBytes_AsString(starts);
    Py_BEGIN_ALLOW_THREADS end =
        aprfmt_walk_strings(data, (size_t)size, (size_t)offset, (size_t)count, swapped, into, &bad);
    Py_END_ALLOW_THREADS if (end == SIZE_MAX) {
        PyErr_Format(PyExc_ValueError, "string %zu of %zd passes the end of %zd bytes", bad, count,
                     size);
        Py_CLEAR(starts);
        goto done;
    }
    aprfmt_release(&held);
    return Py_BuildValue("(Nn)", starts, (Py_ssize_t)end);
done:
    aprfmt_release(&held);
    return starts;
}

PyDoc_STRVAR(level_doc, "level()\n\nReturn the level in use, one of `levels`.");

static PyObject *py_level(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    return PyUnicode_FromString(aprfmt_level->name);
}

PyDoc_STRVAR(levels_doc, "levels()\n\nReturn the levels this processor can run, the best last: "
                         "\"generic\", \"avx2\", \"avx512\".");

static PyObject *py_levels(PyObject *module, PyObject *none) {
    PyObject *names = PyList_New(0);
    (void)module, (void)none;
    for (size_t i = 0; names && i < level_count; i++) {
        PyObject *name = PyUnicode_FromString(levels[i]->name);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

PyDoc_STRVAR(force_doc, "force(level)\n\nUse one of `levels`, or the \"best\"; raises CodecError "
                        "where the processor lacks it.");

static PyObject *py_force(PyObject *module, PyObject *args) {
    const char *name;
    (void)module;
    if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
    const level *best = levels[level_count - 1], *found = strcmp(name, "best") ? NULL : best;
    for (size_t i = 0; i < level_count; i++) {
        if (!strcmp(name, levels[i]->name)) found = levels[i];
    }
    if (!found) {
        return aprfmt_error("level '%s' is not to be had on this processor; it can run '%s'", name,
                            best->name);
    }
    aprfmt_level = found;
    return Py_NewRef(Py_None);
}

static PyObject *append_row(PyObject *rows, const char *name, unsigned block_size,
                            unsigned type_size) {
    PyObject *one = Py_BuildValue("(sII)", name, block_size, type_size);
    if (!one || PyList_Append(rows, one) < 0) Py_CLEAR(rows);
    Py_XDECREF(one);
    return rows;
}

PyDoc_STRVAR(decoders_doc,
             "decoders()\n\nReturn (encoding, block_size, type_size) of each kernel, by index.");

static PyObject *py_decoders(PyObject *module, PyObject *none) {
    PyObject *rows = PyList_New(0);
    (void)module, (void)none;
    for (const decoder *row = aprfmt_level->decoders; rows && row->name; row++) {
        rows = append_row(rows, row->name, row->block_size, row->type_size);
    }
    return rows;
}

PyDoc_STRVAR(encoders_doc,
             "encoders()\n\nReturn (encoding, block_size, type_size) of each encoder, by index.");

static PyObject *py_encoders(PyObject *module, PyObject *none) {
    PyObject *rows = PyList_New(0);
    (void)module, (void)none;
    for (const encoder *row = aprfmt_level->encoders; rows && row->name; row++) {
        rows = append_row(rows, row->name, row->block_size, row->type_size);
    }
    return rows;
}

PyDoc_STRVAR(set_grid_doc,
             "set_grid(name, entries)\n\nHand over one lattice of iq_grids.py as int8 bytes.");

static PyObject *py_set_grid(PyObject *module, PyObject *args) {
    const char *name, *entries;
    Py_ssize_t size;
    (void)module;
    if (!PyArg_ParseTuple(args, "sy#", &name, &entries, &size)) return NULL;
    if (aprfmt_set_grid(name, (const uint8_t *)entries, (size_t)size) < 0) {
        return aprfmt_error("grid '%s' of %zd bytes is not one the kernels know", name, size);
    }
    return Py_NewRef(Py_None);
}

static PyMethodDef METHODS[] = {
    {"walk_strings", py_walk_strings, METH_VARARGS, walk_strings_doc},
    {"level", py_level, METH_NOARGS, level_doc},
    {"levels", py_levels, METH_NOARGS, levels_doc},
    {"force", py_force, METH_VARARGS, force_doc},
    {"decoders", py_decoders, METH_NOARGS, decoders_doc},
    {"encoders", py_encoders, METH_NOARGS, encoders_doc},
    {"set_grid", py_set_grid, METH_VARARGS, set_grid_doc},
    {NULL, NULL, 0, NULL},
};

static int prepare(PyObject *module) {
    aprfmt_fill_tables();
#ifdef APRFMT_HAS_AVX2
    if (level_count == 1) find_levels();
#endif
    aprfmt_level = levels[level_count - 1];
    PyMethodDef *const more[] = {APRFMT_DECODING, APRFMT_PACKED, APRFMT_CODES,    APRFMT_ENCODING,
                                 APRFMT_PRODUCTS, APRFMT_STEPS,  APRFMT_DISTANCES,
                                 APRFMT_ROWS};
    for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
        if (PyModule_AddFunctions(module, more[i]) < 0) return -1;
    }
    return 0;
}

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, (void *)prepare}, {0, NULL}};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_kernels", "Codec kernels in C.", 0, METHODS, SLOTS, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&MODULE); }
