/* Distances of two float32 arrays of finite values, in one pass.
 *
 * Lane i of eight adds the products of elements i, i + 8, ... in float64, the lanes are added as a
 * fixed tree and what is left after them in order: a result is a function of the data alone, bit
 * for bit, on every level. Each product is rounded before it is added. */

typedef int64_t vl __attribute__((vector_size(32))); /* four lanes */

FN vd d_all(double x) { return (vd){x, x, x, x}; }
FN vd d_pick(vl mask, vd a, vd b) { return (vd)((mask & (vl)a) | (~mask & (vl)b)); }
FN vd d_abs(vd v) { return (vd)((vl)v & INT64_MAX); }
FN vd d_more_of(vd a, vd b) {
#ifdef APRFMT_AVX2
    return (vd)_mm256_max_pd((__m256d)a, (__m256d)b);
#else
    return d_pick((vl)(a > b), a, b);
#endif
}
FN double d_most(vd v) {
    double most = v[0];
    for (int i = 1; i < 4; i++) most = v[i] > most ? v[i] : most;
    return most;
}
FN vu u_more_of(vu a, vu b) {
#ifdef APRFMT_AVX2
    return (vu)_mm256_max_epu32((__m256i)a, (__m256i)b);
#else
    return (vu)i_pick((vi)(a > b), (vi)a, (vi)b);
#endif
}

/* The place of every value among all float32 numbers; both zeros have one. */
FN vi places(vf v) {
    const vi sign = (vi)v >> 31;
    return (((vi)v & 0x7fffffff) ^ sign) - sign;
}

/* A distance in steps: none of equal values, infinitely many where a step is zero or no number. */
FN vd in_steps(vd delta, vd step) {
    vd ratio = delta / step;
    ratio = d_pick((vl)(ratio == ratio), ratio, d_all(INFINITY));
    return d_pick((vl)(delta == d_all(0.0)), d_all(0.0), ratio);
}

FN double one_in_steps(double delta, double step) {
    if (delta == 0.0) return 0.0;
    const double ratio = delta / step;
    return isnan(ratio) ? (double)INFINITY : ratio;
}

FN double step_at(const two_arrays *p, steps_kind kind, size_t i) {
    return kind == STEP_OF_ALL ? p->step : kind == STEPS_F32 ? (double)p->floats[i] : p->doubles[i];
}

FN void step_lanes(const two_arrays *p, steps_kind kind, size_t i, vd *low, vd *high) {
    if (kind == STEP_OF_ALL) {
        *low = *high = d_all(p->step);
    } else if (kind == STEPS_F32) {
        low_high(f_load(p->floats + i), low, high);
    } else {
        memcpy(low, p->doubles + i, sizeof *low);
        memcpy(high, p->doubles + i + 4, sizeof *high);
    }
}

/* `kind` is a constant wherever this is inlined. Returns 0 where a value is not finite. */
FN int add_distances(const two_arrays *p, steps_kind kind, distances *d) {
    const float *x = p->x, *y = p->y;
    const size_t whole = p->count & ~(size_t)7;
    vd dd[2] = {{0}}, aa[2] = {{0}}, bb[2] = {{0}}, ab[2] = {{0}}, most = {0}, off = {0};
    vl beyond = {0};
    vi differ = i_all(0), magnitude = i_all(0);
    vu ulp = {0};
    for (size_t i = 0; i < whole; i += 8) {
        const vf v = f_load(x + i), w = f_load(y + i);
        vd a[2], b[2], step[2];
        low_high(v, a, a + 1);
        low_high(w, b, b + 1);
        if (kind != NO_STEPS) step_lanes(p, kind, i, step, step + 1);
        magnitude = i_more_of(magnitude, (vi)f_abs(v));
        magnitude = i_more_of(magnitude, (vi)f_abs(w));
        differ -= (vi)(v != w);
        const vi one = places(v), other = places(w);
        ulp = u_more_of(ulp, (vu)i_more_of(one, other) - (vu)i_less_of(one, other));
        for (int k = 0; k < 2; k++) {
            const vd delta = a[k] - b[k];
            dd[k] += delta * delta;
            aa[k] += a[k] * a[k];
            bb[k] += b[k] * b[k];
            ab[k] += a[k] * b[k];
            most = d_more_of(most, d_abs(delta));
            if (kind != NO_STEPS) {
                const vd ratio = in_steps(d_abs(delta), step[k]);
                off = d_more_of(off, ratio);
                beyond -= (vl)(ratio > d_all(1.0));
            }
        }
    }
    if (any((vi)(magnitude >= 0x7f800000))) return 0;
    *d = (distances){.dd = lanes_sum(dd[0], dd[1]), .aa = lanes_sum(aa[0], aa[1]),
                     .bb = lanes_sum(bb[0], bb[1]), .ab = lanes_sum(ab[0], ab[1]),
                     .most = d_most(most), .off = d_most(off)};
    for (int k = 0; k < 8; k++) {
        d->changed += (uint64_t)differ[k];
        if (ulp[k] > d->ulp) d->ulp = ulp[k];
    }
    for (int k = 0; k < 4; k++) d->beyond += (uint64_t)beyond[k];
    for (size_t i = whole; i < p->count; i++) {
        if (!isfinite(x[i]) || !isfinite(y[i])) return 0;
        const double a = (double)x[i], b = (double)y[i], delta = fabs(a - b);
        const vi one = places(f_all(x[i])), other = places(f_all(y[i]));
        const uint32_t apart = one[0] > other[0] ? (uint32_t)one[0] - (uint32_t)other[0]
                                                 : (uint32_t)other[0] - (uint32_t)one[0];
        d->changed += x[i] != y[i];
        d->dd += delta * delta;
        d->aa += a * a;
        d->bb += b * b;
        d->ab += a * b;
        if (delta > d->most) d->most = delta;
        if (apart > d->ulp) d->ulp = apart;
        if (kind != NO_STEPS) {
            const double ratio = one_in_steps(delta, step_at(p, kind, i));
            if (ratio > d->off) d->off = ratio;
            d->beyond += ratio > 1.0;
        }
    }
    return 1;
}

/* The first element whose distance is `most`. */
FN size_t first_apart(const two_arrays *p, double most) {
    size_t i = 0;
    while (i < p->count && fabs((double)p->x[i] - (double)p->y[i]) != most) i++;
    return i;
}
