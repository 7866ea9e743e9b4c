/* What a step of decoding does between its products, on float32: norms, rotations, activations,
 * attention of a few queries. Every result is a function of its own row or element, so it depends
 * neither on what else is computed with it nor on the number of threads. */

/* e**x to about an ulp: x = n ln 2 + r with ln 2 in two parts, a polynomial in r (Cephes, expf.c),
 * times 2**n in two steps, so that what is subnormal comes out so. */
FN vf f_exp(vf x) {
    const vf most = f_all(88.722839f), least = f_all(-104.0f), magic = f_all(0x1.8p23f);
    const vf bounded = f_more_of(f_less_of(x, most), least);
    const vf n = (bounded * f_all(1.44269504088896341f) + magic) - magic;
    vf r = dot_step(n, f_all(-0.693359375f), bounded);
    r = dot_step(n, f_all(2.12194440e-4f), r);
    vf y = f_all(1.9875691500e-4f);
    y = dot_step(y, r, f_all(1.3981999507e-3f));
    y = dot_step(y, r, f_all(8.3334519073e-3f));
    y = dot_step(y, r, f_all(4.1665795894e-2f));
    y = dot_step(y, r, f_all(1.6666665459e-1f));
    y = dot_step(y, r, f_all(5.0000001201e-1f));
    y = dot_step(y, r * r, r) + f_all(1.0f);
    const vi whole = __builtin_convertvector(n, vi), half = whole >> 1;
    y = y * (vf)((half + 127) << 23) * (vf)((whole - half + 127) << 23);
    y = f_pick((vi)(x > most), f_all(INFINITY), y);
    y = f_pick((vi)(x < least), f_all(0.0f), y);
    return f_pick((vi)(x == x), y, x);
}

/* x / (1 + e**-z) */
FN vf f_gate(vf x, vf z) { return x / (f_all(1.0f) + f_exp(-z)); }

/* x (1 + erf(x / sqrt 2)) / 2, as the complement, which loses nothing where erf is near -1. */
FN vf f_gelu(vf x) {
    vf y;
    for (int lane = 0; lane < 8; lane++) y[lane] = erfcf(x[lane] * -0.70710678118654752f);
    return x * f_all(0.5f) * y;
}

/* gelu_tanh is x (1 + tanh u) / 2 = x / (1 + e**-2u), u = sqrt(2 / pi) (x + 0.044715 x**3); the
 * second form loses nothing where tanh is near -1. */
FN vf f_activated(vf x, int kind) {
    if (kind == SILU) return f_gate(x, x);
    if (kind == GELU) return f_gelu(x);
    if (kind == GELU_TANH) {
        vf cubic = dot_step(f_all(0.044715f) * x * x, x, x);
        return f_gate(x, f_all(1.5957691216057308f) * cubic);
    }
    return f_pick((vi)(x < f_all(0.0f)), f_all(0.0f), x); /* RELU; a NaN stays */
}

FN void activate(int kind, const float *x, const float *up, float *out, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        vf y = f_activated(f_load(x + i), kind);
        f_store(out + i, up ? y * f_load(up + i) : y);
    }
    if (i == n) return;
    vf y = f_activated(f_load_some(x + i, n - i), kind);
    if (up) y *= f_load_some(up + i, n - i);
    memcpy(out + i, &y, 4 * (n - i));
}

TARGET static void run_activate(int kind, const float *x, const float *up, float *out, size_t n) {
    if (kind == SILU)
        activate(SILU, x, up, out, n);
    else if (kind == GELU_TANH)
        activate(GELU_TANH, x, up, out, n);
    else if (kind == GELU)
        activate(GELU, x, up, out, n);
    else
        activate(RELU, x, up, out, n);
}

/* x / sqrt(mean(x**2) + eps) * (weight + offset) of each row; the squares are added in float64. */
TARGET static void run_rms_norm(const float *x, const float *weight, float *out, size_t rows,
                                size_t n, float eps, float offset) {
    const size_t whole = n & ~(size_t)7;
    for (; rows--; x += n, out += n) {
        vd sum_low = {0}, sum_high = {0}, low, high;
        for (size_t i = 0; i < whole; i += 8) {
            low_high(f_load(x + i), &low, &high);
            sum_low += low * low;
            sum_high += high * high;
        }
        double sum = lanes_sum(sum_low, sum_high);
        for (size_t i = whole; i < n; i++) sum += (double)x[i] * (double)x[i];
        const float root = sqrtf((float)(sum / (double)n) + eps);
        const vf by = f_all(root), more = f_all(offset);
        for (size_t i = 0; i < whole; i += 8) {
            f_store(out + i, f_load(x + i) / by * (f_load(weight + i) + more));
        }
        for (size_t i = whole; i < n; i++) out[i] = x[i] / root * (weight[i] + offset);
    }
}

/* Rotate the first 2 * pairs of `width` elements of every head; products and sums round apart. The
 * result is in split halves. */
TARGET static void run_rope(const float *x, const float *cos, const float *sin, float *out,
                            const rotation *r) {
    const size_t step = r->interleaved ? 2 : 1, apart = r->interleaved ? 1 : r->pairs;
    for (size_t t = 0; t < r->tokens; t++, cos += r->pairs, sin += r->pairs) {
        for (size_t h = 0; h < r->heads; h++, x += r->width, out += r->width) {
            float *const second = out + r->pairs;
            size_t i = 0;
            for (; step == 1 && i + 8 <= r->pairs; i += 8) {
                vf a = f_load(x + i), b = f_load(x + i + apart);
                vf c = f_load(cos + i), s = f_load(sin + i);
                f_store(out + i, a * c - b * s);
                f_store(second + i, b * c + a * s);
            }
            for (; i < r->pairs; i++) {
                float a = x[step * i], b = x[step * i + apart];
                out[i] = a * cos[i] - b * sin[i];
                second[i] = b * cos[i] + a * sin[i];
            }
            memcpy(out + 2 * r->pairs, x + 2 * r->pairs, 4 * (r->width - 2 * r->pairs));
        }
    }
}

/* Attention in three steps, each split into parts of its own: scores of a run of keys, the softmax
 * of one query and head, the mix of a run of elements. A query sees the keys [from, to). */
FN void seen_by(const attention *a, size_t token, size_t *from, size_t *to) {
    *to = a->cached + token + 1;
    *from = a->window && a->window < *to ? *to - a->window : 0;
}

/* Query or key `row` times `other`, in four sums of eight lanes that are added to one. */
FN vf lanes_of(const float *row, const float *other, size_t width) {
    const size_t whole = width & ~(size_t)31;
    vf sum[4];
    for (int j = 0; j < 4; j++) sum[j] = f_all(0.0f);
    for (size_t i = 0; i < whole; i += 32) {
        for (int j = 0; j < 4; j++)
            sum[j] = dot_step(f_load(row + i + 8 * j), f_load(other + i + 8 * j), sum[j]);
    }
    if (whole < width) add_last(row + whole, other + whole, width - whole, sum);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

FN vf total_of_eight(const vf *t) {
    return ((t[0] + t[4]) + (t[2] + t[6])) + ((t[1] + t[5]) + (t[3] + t[7]));
}

/* Ask for n elements before they are needed; the address may lie past the end. */
FN void ask_for(const float *at, size_t n) {
    for (size_t i = 0; i < n; i += 16) __builtin_prefetch(at + i);
}

TARGET static void run_scores(void *work, size_t part) {
    const attention *a = work;
    const size_t group = a->heads / a->kv_heads, stride = a->kv_heads * a->width;
    const size_t first = a->first + part * KEY_RUN;
    const size_t last = first + KEY_RUN < a->keys ? first + KEY_RUN : a->keys;
    for (size_t key = first; key < last; key += 8) {
        const size_t count = last - key < 8 ? last - key : 8;
        const float *k = a->k + key * stride;
        for (size_t kv = 0; kv < a->kv_heads; kv++, k += a->width) {
            for (size_t i = 0; i < a->tokens * group; i++) {
                const size_t row = i / group * a->heads + kv * group + i % group;
                const float *q = a->q + row * a->width;
                float lanes[64] = {0};
                vf turned[8];
                for (size_t j = 0; j < count; j++) {
                    if (!i) ask_for(k + (j + 16) * stride, a->width);
                    f_store(lanes + 8 * j, lanes_of(q, k + j * stride, a->width));
                }
                turn8(lanes, 8, turned);
                vf scores = total_of_eight(turned) * f_all(a->scale);
                memcpy(a->probs + row * a->keys + key, &scores, 4 * count);
            }
        }
    }
}

/* The largest of x[n] and `most`; a NaN is passed over. */
FN float largest(const float *x, size_t n, float most) {
    vf high = f_all(most);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) high = f_more_of(f_load(x + i), high);
    float lanes[8];
    f_store(lanes, high);
    for (int j = 0; j < 8; j++) most = lanes[j] > most ? lanes[j] : most;
    for (; i < n; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* x becomes e**(x - most); returns their sum, added in float64. */
FN double exponentials(float *x, size_t n, float most) {
    vd sum_low = {0}, sum_high = {0}, low, high;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        vf e = f_exp(f_load(x + i) - f_all(most));
        f_store(x + i, e);
        low_high(e, &low, &high);
        sum_low += low;
        sum_high += high;
    }
    double sum = lanes_sum(sum_low, sum_high);
    vf e = f_exp(f_load_some(x + i, n - i) - f_all(most));
    memcpy(x + i, &e, 4 * (n - i));
    for (; i < n; i++) sum += (double)x[i];
    return sum;
}

TARGET static void run_probs(void *work, size_t row) {
    const attention *a = work;
    const size_t token = a->by_head ? row % a->tokens : row / a->heads;
    const size_t head = a->by_head ? row / a->tokens : row % a->heads;
    size_t from, to;
    seen_by(a, token, &from, &to);
    float *p = a->probs + row * a->keys + from, sink[1];
    const size_t n = to - from;
    if (a->by_head) {
        memset(p - from, 0, 4 * from);
        memset(p + n, 0, 4 * (a->keys - to));
        for (size_t i = 0; i < n; i++) p[i] *= a->scale;
    }
    if (a->softcap != 0) {
        for (size_t i = 0; i < n; i++) p[i] = tanhf(p[i] / a->softcap) * a->softcap;
    }
    *sink = a->sinks ? a->sinks[head] : -INFINITY;
    const float most = largest(p, n, *sink);
    double sum = exponentials(p, n, most);
    if (a->sinks) sum += exponentials(sink, 1, most);
    const float total = (float)sum;
    for (size_t i = 0; i < n; i++) p[i] /= total;
}

/* Elements [at, at + n) of a head, n <= MIX_RUN, of all queries of one group. Keys are added in
 * order within runs that begin at multiples of KEY_RUN, and the runs in order. */
FN void mix_run(const attention *a, size_t kv, size_t at, size_t n) {
    const size_t group = a->heads / a->kv_heads;
    for (size_t i = 0; i < a->tokens * group; i++) {
        const size_t row = i / group * a->heads + kv * group + i % group;
        memset(a->out + row * a->value_width + at, 0, 4 * n);
    }
    for (size_t run = a->first; run < a->keys; run += KEY_RUN) {
        for (size_t i = 0; i < a->tokens * group; i++) {
            const size_t token = i / group, row = token * a->heads + kv * group + i % group;
            size_t from, to;
            seen_by(a, token, &from, &to);
            from = from > run ? from : run;
            to = to < run + KEY_RUN ? to : run + KEY_RUN;
            if (from >= to) continue;
            const float *p = a->probs + row * a->keys;
            float *out = a->out + row * a->value_width + at;
            const size_t stride = a->kv_heads * a->value_width;
            const float *v = a->v + (from * a->kv_heads + kv) * a->value_width + at;
            if (n == MIX_RUN) {
                vf sum[MIX_RUN / 8];
                for (int j = 0; j < MIX_RUN / 8; j++) sum[j] = f_all(0.0f);
                for (size_t key = from; key < to; key++, v += stride) {
                    const vf by = f_all(p[key]);
                    if (!i) ask_for(v + 16 * stride, MIX_RUN);
                    for (int j = 0; j < MIX_RUN / 8; j++)
                        sum[j] = dot_step(f_load(v + 8 * j), by, sum[j]);
                }
                for (int j = 0; j < MIX_RUN / 8; j++)
                    f_store(out + 8 * j, f_load(out + 8 * j) + sum[j]);
                continue;
            }
            for (size_t j = 0; j < n; j += 8) {
                const size_t some = n - j < 8 ? n - j : 8;
                vf sum = f_all(0.0f);
                for (size_t key = from; key < to; key++)
                    sum = dot_step(f_load_some(v + (key - from) * stride + j, some),
                                   f_all(p[key]), sum);
                sum += f_load_some(out + j, some);
                memcpy(out + j, &sum, 4 * some);
            }
        }
    }
}

TARGET static void run_mix(void *work, size_t part) {
    const attention *a = work;
    const size_t runs = (a->value_width + MIX_RUN - 1) / MIX_RUN;
    const size_t kv = part / runs, at = part % runs * MIX_RUN;
    mix_run(a, kv, at, a->value_width - at < MIX_RUN ? a->value_width - at : MIX_RUN);
}
