/* Norms, rotations, activations and attention of a decoding step, for Python. */
#include "bindings.h"
#include "threads.h"

/* Products of queries and keys below which attention stays on the caller's thread. */
enum { ALONE = 1 << 16 };

static PyObject *done(buffers *held, int good) {
    aprfmt_release(held);
    return good ? Py_NewRef(Py_None) : NULL;
}

/* Elements that are one part of a norm's or an activation's work. */
enum { SHARE = 1 << 14 };

typedef struct {
    int kind;
    const float *x, *other; /* weight or up */
    float *out;
    size_t count, row, step; /* rows of `row` elements each, `step` of them a part */
    float eps, offset;
} elements;

static size_t part_of(const elements *e, size_t part, size_t *start) {
    *start = part * e->step;
    return e->count - *start < e->step ? e->count - *start : e->step;
}

static void norm_part(void *work, size_t part) {
    const elements *e = work;
    size_t start, rows = part_of(e, part, &start);
    aprfmt_level->rms_norm(e->x + start * e->row, e->other, e->out + start * e->row, rows, e->row,
                           e->eps, e->offset);
}

static void activate_part(void *work, size_t part) {
    const elements *e = work;
    size_t start, count = part_of(e, part, &start);
    aprfmt_level->activate(e->kind, e->x + start, e->other ? e->other + start : NULL,
                           e->out + start, count);
}

static void share(part_fn fn, elements *e, Py_ssize_t threads) {
    e->step = e->row >= SHARE ? 1 : SHARE / e->row;
    aprfmt_share(fn, e, (e->count + e->step - 1) / e->step, threads);
}

PyDoc_STRVAR(rms_norm_doc, "rms_norm(x, weight, out, eps, offset, threads)\n\nout = x / sqrt(mean(x**2) + "
                           "eps) * (weight + offset) for rows as long as `weight`, all float32.");

static PyObject *py_rms_norm(PyObject *module, PyObject *args) {
    PyObject *objects[3];
    Py_ssize_t threads;
    double eps, offset;
    size_t count[3] = {0};
    buffers held = {.used = 0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOddn", objects, objects + 1, objects + 2, &eps, &offset,
                          &threads))
        return NULL;
    const float *x = aprfmt_hold_floats(&held, objects[0], 0, "x", count), *weight = NULL;
    float *out = NULL;
    if (x) weight = aprfmt_hold_floats(&held, objects[1], 0, "weight", count + 1);
    if (weight) out = aprfmt_hold_floats(&held, objects[2], 1, "out", count + 2);
    if (!out) return done(&held, 0);
    if (!count[1] || count[0] % count[1] || count[0] != count[2]) {
        aprfmt_error("rms_norm: found x of %zu elements, weight of %zu, out of %zu; expected rows "
                     "as long as weight",
                     count[0], count[1], count[2]);
        return done(&held, 0);
    }
    elements work = {.x = x, .other = weight, .out = out, .count = count[0] / count[1]};
    work.row = count[1], work.eps = (float)eps, work.offset = (float)offset;
    Py_BEGIN_ALLOW_THREADS share(norm_part, &work, threads);
    Py_END_ALLOW_THREADS return done(&held, 1);
}

PyDoc_STRVAR(rope_doc, "rope(x, cos, sin, out, heads, width, interleaved)\n\nRotate x [tokens, "
                       "heads, width] by cos and sin [tokens, pairs] into `out`, in split halves.");

static PyObject *py_rope(PyObject *module, PyObject *args) {
    PyObject *objects[4];
    Py_ssize_t heads, width;
    rotation r;
    size_t count[4] = {0};
    buffers held = {.used = 0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOnnp", objects, objects + 1, objects + 2, objects + 3, &heads,
                          &width, &r.interleaved))
        return NULL;
    const float *x = aprfmt_hold_floats(&held, objects[0], 0, "x", count), *cos = NULL, *sin = NULL;
    float *out = NULL;
    if (x) cos = aprfmt_hold_floats(&held, objects[1], 0, "cos", count + 1);
    if (cos) sin = aprfmt_hold_floats(&held, objects[2], 0, "sin", count + 2);
    if (sin) out = aprfmt_hold_floats(&held, objects[3], 1, "out", count + 3);
    if (!out) return done(&held, 0);
    const size_t row = heads > 0 && width > 0 ? (size_t)heads * (size_t)width : 0;
    r.tokens = row ? count[0] / row : 0;
    r.pairs = r.tokens ? count[1] / r.tokens : 0;
    r.heads = (size_t)heads;
    r.width = (size_t)width;
    if (!row || r.tokens * row != count[0] || r.tokens * r.pairs != count[1] ||
        count[1] != count[2] || count[0] != count[3] || 2 * r.pairs > r.width) {
        aprfmt_error("rope: found x of %zu elements, cos %zu, sin %zu, out %zu for %zd heads of "
                     "%zd; expected whole tokens and at most width / 2 pairs",
                     count[0], count[1], count[2], count[3], heads, width);
        return done(&held, 0);
    }
    Py_BEGIN_ALLOW_THREADS aprfmt_level->rope(x, cos, sin, out, &r);
    Py_END_ALLOW_THREADS return done(&held, 1);
}

PyDoc_STRVAR(activate_doc, "activate(kind, x, up, out, threads)\n\nout = act(x), times `up` if that is not "
                           "None; kind 0 is silu, 1 gelu_tanh, 2 relu, 3 gelu.");

static PyObject *py_activate(PyObject *module, PyObject *args) {
    PyObject *objects[3];
    Py_ssize_t threads;
    int kind;
    size_t count[3] = {0};
    buffers held = {.used = 0};
    (void)module;
    if (!PyArg_ParseTuple(args, "iOOOn", &kind, objects, objects + 1, objects + 2, &threads))
        return NULL;
    const float *x = aprfmt_hold_floats(&held, objects[0], 0, "x", count), *up = NULL;
    float *out = NULL;
    const int gated = objects[1] != Py_None;
    if (x && gated) up = aprfmt_hold_floats(&held, objects[1], 0, "up", count + 1);
    if (x && (up || !gated)) out = aprfmt_hold_floats(&held, objects[2], 1, "out", count + 2);
    if (!out) return done(&held, 0);
    if (kind < SILU || kind > GELU || count[0] != count[2] || (gated && count[0] != count[1])) {
        aprfmt_error("activate: found kind %d of x of %zu elements, up of %zu, out of %zu; expected "
                     "equal counts and a kind from 0 to 3",
                     kind, count[0], count[1], count[2]);
        return done(&held, 0);
    }
    elements work = {.kind = kind, .x = x, .other = up, .out = out, .count = count[0], .row = 1};
    Py_BEGIN_ALLOW_THREADS share(activate_part, &work, threads);
    Py_END_ALLOW_THREADS return done(&held, 1);
}

PyDoc_STRVAR(attention_doc,
             "attention(q, k, v, sinks, probs, out, shape, cached, window, scale, softcap, threads)"
             "\n\nCausal attention; shape is (tokens, heads, kv_heads, keys, width, value_width). "
             "q [tokens, heads,\n"
             "width], k [keys, kv_heads, width], v [keys, kv_heads, value_width], sinks [heads] or "
             "None, probs\n"
             "[tokens, heads, keys] is room, out [tokens, heads, value_width]. window 0 is none, "
             "softcap 0 is none.");

static PyObject *py_attention(PyObject *module, PyObject *args) {
    PyObject *q, *k, *v, *sinks, *probs, *out;
    Py_ssize_t s[6], cached, window, threads;
    double scale, softcap;
    size_t count[6] = {0};
    buffers held = {.used = 0};
    attention a = {.sinks = NULL};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOO(nnnnnn)nnddn", &q, &k, &v, &sinks, &probs, &out, s, s + 1,
                          s + 2, s + 3, s + 4, s + 5, &cached, &window, &scale, &softcap, &threads))
        return NULL;
    if (!(a.q = aprfmt_hold_floats(&held, q, 0, "q", count)) ||
        !(a.k = aprfmt_hold_floats(&held, k, 0, "k", count + 1)) ||
        !(a.v = aprfmt_hold_floats(&held, v, 0, "v", count + 2)) ||
        (sinks != Py_None &&
         !(a.sinks = aprfmt_hold_floats(&held, sinks, 0, "sinks", count + 3))) ||
        !(a.probs = aprfmt_hold_floats(&held, probs, 1, "probs", count + 4)) ||
        !(a.out = aprfmt_hold_floats(&held, out, 1, "out", count + 5)))
        return done(&held, 0);
    int good = cached >= 0 && window >= 0;
    for (int i = 0; i < 6; i++) good = good && s[i] > 0 && s[i] < (1 << 28);
    if (good) {
        a.tokens = (size_t)s[0], a.heads = (size_t)s[1], a.kv_heads = (size_t)s[2];
        a.keys = (size_t)s[3], a.width = (size_t)s[4], a.value_width = (size_t)s[5];
        a.cached = (size_t)cached, a.window = (size_t)window;
        a.scale = (float)scale, a.softcap = (float)softcap;
        good = a.heads % a.kv_heads == 0 && a.cached + a.tokens == a.keys &&
               count[0] == a.tokens * a.heads * a.width &&
               count[1] == a.keys * a.kv_heads * a.width &&
               count[2] == a.keys * a.kv_heads * a.value_width &&
               (!a.sinks || count[3] == a.heads) && count[4] == a.tokens * a.heads * a.keys &&
               count[5] == a.tokens * a.heads * a.value_width;
    }
    if (!good) {
        aprfmt_error("attention: found %zu, %zu, %zu, %zu, %zu, %zu elements for shape (%zd, %zd, "
                     "%zd, %zd, %zd, %zd) after %zd positions; expected them to fit each other",
                     count[0], count[1], count[2], count[3], count[4], count[5], s[0], s[1], s[2],
                     s[3], s[4], s[5], cached);
        return done(&held, 0);
    }
    if (a.window && a.window < a.cached + 1)
        a.first = (a.cached + 1 - a.window) / KEY_RUN * KEY_RUN;
    const size_t seen = a.keys - a.first, key_runs = (seen + KEY_RUN - 1) / KEY_RUN;
    const size_t mix_runs = (a.value_width + MIX_RUN - 1) / MIX_RUN;
    if (a.tokens * a.heads * seen * a.width < ALONE) threads = 1;
    Py_BEGIN_ALLOW_THREADS aprfmt_share(aprfmt_level->scores, &a, key_runs, threads);
    aprfmt_share(aprfmt_level->probs, &a, a.tokens * a.heads, threads);
    aprfmt_share(aprfmt_level->mix, &a, a.kv_heads * mix_runs, threads);
    Py_END_ALLOW_THREADS return done(&held, 1);
}

PyDoc_STRVAR(softmax_doc,
             "softmax(scores, sinks, shape, cached, window, scale, softcap, threads)\n\nIn place, "
             "of float32 scores [heads, tokens, keys] = shape: what the causal mask leaves, scaled "
             "and capped.");

static PyObject *py_softmax(PyObject *module, PyObject *args) {
    PyObject *scores, *sinks;
    Py_ssize_t s[3], cached, window, threads;
    double scale, softcap;
    size_t count[2] = {0};
    buffers held = {.used = 0};
    attention a = {.by_head = 1};
    (void)module;
    if (!PyArg_ParseTuple(args, "OO(nnn)nnddn", &scores, &sinks, s, s + 1, s + 2, &cached, &window,
                          &scale, &softcap, &threads))
        return NULL;
    if (!(a.probs = aprfmt_hold_floats(&held, scores, 1, "scores", count)) ||
        (sinks != Py_None && !(a.sinks = aprfmt_hold_floats(&held, sinks, 0, "sinks", count + 1))))
        return done(&held, 0);
    int good = cached >= 0 && window >= 0;
    for (int i = 0; i < 3; i++) good = good && s[i] > 0 && s[i] < (1 << 28);
    if (good) {
        a.heads = (size_t)s[0], a.tokens = (size_t)s[1], a.keys = (size_t)s[2];
        a.cached = (size_t)cached, a.window = (size_t)window;
        a.scale = (float)scale, a.softcap = (float)softcap;
        good = a.cached + a.tokens == a.keys && count[0] == a.heads * a.tokens * a.keys &&
               (!a.sinks || count[1] == a.heads);
    }
    if (!good) {
        aprfmt_error("softmax: found %zu scores and %zu sinks for shape (%zd, %zd, %zd) after %zd "
                     "positions; expected them to fit each other",
                     count[0], count[1], s[0], s[1], s[2], cached);
        return done(&held, 0);
    }
    Py_BEGIN_ALLOW_THREADS aprfmt_share(aprfmt_level->probs, &a, a.heads * a.tokens, threads);
    Py_END_ALLOW_THREADS return done(&held, 1);
}

PyMethodDef APRFMT_STEPS[] = {
    {"rms_norm", py_rms_norm, METH_VARARGS, rms_norm_doc},
    {"rope", py_rope, METH_VARARGS, rope_doc},
    {"activate", py_activate, METH_VARARGS, activate_doc},
    {"softmax", py_softmax, METH_VARARGS, softmax_doc},
    {"attention", py_attention, METH_VARARGS, attention_doc},
    {NULL, NULL, 0, NULL},
};
