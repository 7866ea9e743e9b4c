/* How far two arrays are apart, for Python. */
#include "bindings.h"

PyDoc_STRVAR(distances_doc,
             "distances(x, y, steps, known)\n\n"
             "Return (changed, ulp, dd, aa, bb, ab, most, at, off, beyond) of two float32 buffers, "
             "or None where a\nvalue is not finite. `steps` is None, one number, or a float32 or "
             "float64 buffer of as many\nelements. `at` is the first element that is `most` apart, "
             "-1 where that is not more than `known`.");

/* Hold the steps; 0 with an exception set. */
static int hold_steps(buffers *held, PyObject *steps, two_arrays *p) {
    Py_ssize_t size = 0;
    if (steps == Py_None) return 1;
    if (PyFloat_Check(steps)) {
        p->kind = STEP_OF_ALL;
        p->step = PyFloat_AsDouble(steps);
        return 1;
    }
    const void *at = aprfmt_hold(held, steps, 0, &size);
    if (!at) return 0;
    const Py_ssize_t item = held->view[held->used - 1].itemsize;
    if ((item != 4 && item != 8) || (size_t)size != p->count * (size_t)item ||
        (uintptr_t)at % (size_t)item) {
        aprfmt_error("distances: found steps of %zd bytes, %zd each; expected float32 or float64 of "
                     "%zu elements",
                     size, item, p->count);
        return 0;
    }
    p->kind = item == 4 ? STEPS_F32 : STEPS_F64;
    p->floats = at;
    p->doubles = at;
    return 1;
}

static PyObject *py_distances(PyObject *module, PyObject *args) {
    buffers held = {.used = 0};
    PyObject *x, *y, *steps, *result = NULL;
    two_arrays p = {.kind = NO_STEPS};
    distances d = {0};
    size_t other = 0;
    double known;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOd", &x, &y, &steps, &known)) return NULL;
    if (!(p.x = aprfmt_hold_floats(&held, x, 0, "x", &p.count)) ||
        !(p.y = aprfmt_hold_floats(&held, y, 0, "y", &other)))
        goto done;
    if (p.count != other) {
        aprfmt_error("distances: found %zu numbers for %zu", other, p.count);
        goto done;
    }
    if (!hold_steps(&held, steps, &p)) goto done;
    int finite;
    Py_ssize_t at = -1;
    Py_BEGIN_ALLOW_THREADS finite = aprfmt_level->add_distances(&p, &d);
    if (finite && p.count && d.most > known) at = (Py_ssize_t)aprfmt_level->first_apart(&p, d.most);
    Py_END_ALLOW_THREADS if (!finite) result = Py_NewRef(Py_None);
    else result = Py_BuildValue("KKdddddndK", (unsigned long long)d.changed,
                                (unsigned long long)d.ulp, d.dd, d.aa, d.bb, d.ab, d.most, at,
                                d.off, (unsigned long long)d.beyond);
done:
    aprfmt_release(&held);
    return result;
}

PyDoc_STRVAR(apart_doc,
             "apart(x, y)\n\n"
             "Return (dd, yy, most, at, odd_x, odd_y, alone, both, alone_at, both_at) of two float32 "
             "buffers, as level.h\nsays: sums, the largest distance, and what is not finite.");

static PyObject *py_apart(PyObject *module, PyObject *args) {
    buffers held = {.used = 0};
    PyObject *x_object, *y_object, *result = NULL;
    size_t count = 0, other = 0;
    apart_from found = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &x_object, &y_object)) return NULL;
    const float *x = aprfmt_hold_floats(&held, x_object, 0, "x", &count);
    const float *y = x ? aprfmt_hold_floats(&held, y_object, 0, "y", &other) : NULL;
    if (!y) goto done;
    if (count != other) {
        aprfmt_error("apart: found %zu numbers for %zu", other, count);
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS aprfmt_level->measure_apart(x, y, count, &found);
    Py_END_ALLOW_THREADS result = Py_BuildValue(
        "dddnnnnnnn", found.dd, found.yy, found.most, (Py_ssize_t)found.at,
        (Py_ssize_t)found.odd_x, (Py_ssize_t)found.odd_y, (Py_ssize_t)found.alone,
        (Py_ssize_t)found.both, (Py_ssize_t)found.alone_at, (Py_ssize_t)found.both_at);
done:
    aprfmt_release(&held);
    return result;
}

PyMethodDef APRFMT_DISTANCES[] = {
    {"apart", py_apart, METH_VARARGS, apart_doc},
    {"distances", py_distances, METH_VARARGS, distances_doc},
    {NULL, NULL, 0, NULL},
};
