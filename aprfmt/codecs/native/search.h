/* ggml's searches for the scale of a block, in eight blocks at a time: one a lane.
 *
 * The same functions under the same names, described at length, stand in aprfmt/codecs/scale_searches.py.
 * The order of every operation decides bits: sums run in order of index, which lanes keep, and what
 * is fused is what aprfmt/codecs/arithmetic.py says. `fuse` is a constant wherever these are
 * inlined. */

#define SMALLEST 1e-15f /* GROUP_MAX_EPS: a group below it counts as all zero */

FN vf multiply_add(vf a, vf b, vf c, int fuse) { return fuse ? fused(a, b, c) : a * b + c; }

/* ggml's nearest_int of a product: ties to even within +-2**22, its very bits outside of it. */
FN vi from_magic(vf v) { return ((vi)v & 0x007fffff) - 0x00400000; }
FN vf magic(void) { return f_all(12582912.0f); }
FN vi nearest_product(vf a, vf b, int fuse) {
    return from_magic(multiply_add(a, b, magic(), fuse));
}
FN vi nearest(vf v) { return from_magic(v + magic()); }
FN vi clamp(vi v, int low, int high) { return i_less_of(i_more_of(v, i_all(low)), i_all(high)); }

/* The element of largest magnitude in each lane, the first of equals; 0 if all are. */
FN vf first_largest(const vf *x, int n) {
    vf most = f_all(0.0f), at = most;
    for (int i = 0; i < n; i++) {
        vf magnitude = f_abs(x[i]);
        vi more = (vi)(magnitude > most);
        most = f_pick(more, magnitude, most);
        at = f_pick(more, x[i], at);
    }
    return at;
}

typedef struct {
    vf lx, l2; /* sums of w*x*l and of w*l*l */
} fit;

FN fit fit_codes(const vf *x, const vf *w, int n, int nmax, vf iscale, int fuse) {
    fit sums = {f_all(0.0f), f_all(0.0f)};
    for (int i = 0; i < n; i++) {
        vf l = to_f(clamp(nearest_product(iscale, x[i], fuse), -nmax, nmax - 1));
        sums.lx = multiply_add(w[i] * x[i], l, sums.lx, fuse);
        sums.l2 = multiply_add(w[i] * l, l, sums.l2, fuse);
    }
    return sums;
}

/* Scale, and codes in 0..2*nmax-1, for x = scale * (code - nmax) under weights w. */
FN vf signed_scale(const vf *x, const vf *w, int n, int nmax, vi *code, int fuse) {
    const vf largest = first_largest(x, n), zero = f_all(0.0f);
    const vi none = (vi)(f_abs(largest) < f_all(SMALLEST));
    vf best_iscale = f_all((float)-nmax) / largest;
    fit sums = fit_codes(x, w, n, nmax, best_iscale, fuse);
    vf scale = f_pick((vi)(sums.l2 != zero), sums.lx / sums.l2, zero);
    vf best = scale * sums.lx;
    for (int step = -9; step <= 9; step++) {
        if (step == 0) continue;
        vf wanted = multiply_add(f_all(0.1f), f_all((float)step), f_all((float)nmax), fuse);
        vf iscale = -wanted / largest;
        sums = fit_codes(x, w, n, nmax, iscale, fuse);
        vi better = (vi)(sums.l2 > zero) & (vi)(sums.lx * sums.lx > best * sums.l2);
        scale = f_pick(better, sums.lx / sums.l2, scale);
        best = f_pick(better, scale * sums.lx, best);
        best_iscale = f_pick(better, iscale, best_iscale);
    }
    for (int i = 0; i < n; i++) {
        vi l = clamp(nearest_product(best_iscale, x[i], fuse), -nmax, nmax - 1) + nmax;
        code[i] = ~none & l;
    }
    return f_pick(none, zero, scale);
}

/* Five times over the elements: put each where the others' best scale wants it, if that helps.
 * Codes are kept as int8 from -nmax to nmax - 1 or, unsigned, as uint8 up to nmax; unsigned, an
 * element that is alone stays. */
FN void move_codes(const vf *x, const vf *w, int n, vf *l, fit *sums, int nmax, int is_signed,
                   int fuse) {
    const int low = is_signed ? -nmax : INT32_MIN, high = is_signed ? nmax - 1 : nmax;
    const vf zero = f_all(0.0f);
    for (int round = 0; round < 5; round++) {
        vi changed = i_all(0);
        for (int i = 0; i < n; i++) {
            vf wx = w[i] * x[i];
            vf slx = multiply_add(-wx, l[i], sums->lx, fuse);
            vf sl2 = multiply_add(-(w[i] * l[i]), l[i], sums->l2, fuse);
            vi code = clamp(nearest(x[i] * sl2 / slx), low, high);
            vf moved = to_f(code);
            vi better = (vi)(slx > zero) & (vi)(moved != l[i]);
            if (!is_signed) better &= (vi)(sl2 > zero);
            slx = multiply_add(wx, moved, slx, fuse);
            sl2 = multiply_add(w[i] * moved, moved, sl2, fuse);
            better &= (vi)(sl2 > zero) & (vi)(slx * slx * sums->l2 > sums->lx * sums->lx * sl2);
            l[i] = f_pick(better, is_signed ? moved : to_f(code & 255), l[i]);
            sums->lx = f_pick(better, slx, sums->lx);
            sums->l2 = f_pick(better, sl2, sums->l2);
            changed |= better;
        }
        if (!any(changed)) break;
    }
}

/* As signed_scale with weights x*x, by moving one code at a time. */
FN vf refined_scale(const vf *x, int n, int nmax, vi *code, int fuse) {
    const vf largest = first_largest(x, n), zero = f_all(0.0f);
    const vi none = (vi)(f_abs(largest) < f_all(SMALLEST));
    const vf iscale = f_all((float)-nmax) / largest;
    vf w[16], l[16];
    for (int i = 0; i < n; i++) w[i] = x[i] * x[i];
    for (int i = 0; i < n; i++)
        l[i] = to_f(clamp(nearest_product(iscale, x[i], fuse), -nmax, nmax - 1));
    fit sums = fit_codes(x, w, n, nmax, iscale, fuse);
    move_codes(x, w, n, l, &sums, nmax, 1, fuse);
    for (int i = 0; i < n; i++) code[i] = ~none & (__builtin_convertvector(l[i], vi) + nmax);
    return f_pick(none | ~(vi)(sums.l2 > zero), zero, sums.lx / sums.l2);
}

FN vf positive_error(const vf *x, const vf *w, int n, vf iscale, const vi *code, int fuse) {
    const vf scale = f_all(1.0f) / iscale;
    vf error = f_all(0.0f);
    for (int i = 0; i < n; i++) {
        vf apart = multiply_add(-scale, to_f(code[i]), x[i], fuse);
        error = multiply_add(w[i] * apart, apart, error, fuse);
    }
    return error;
}

FN void positive_codes(const vf *x, int n, int nmax, vf iscale, vi *code, int fuse) {
    for (int i = 0; i < n; i++)
        code[i] = i_less_of(nearest_product(iscale, x[i], fuse), i_all(nmax));
}

/* Scale, and codes in 0..nmax, for non-negative x = scale * code under weights w. A negative x,
 * which fused searches give for a group where one element alone has importance, gets its code
 * modulo 256, as in C. */
FN vf positive_scale(const vf *x, const vf *w, int n, int nmax, vi *code, int fuse) {
    const vf zero = f_all(0.0f);
    vf largest = zero, l[16];
    for (int i = 0; i < n; i++)
        largest = f_more_of(largest, x[i]); /* a NaN loses against what follows */
    const vi none = (vi)(largest < f_all(SMALLEST));
    vf iscale = f_all((float)nmax) / largest;
    for (int i = 0; i < n; i++) code[i] = nearest_product(iscale, x[i], fuse) & 255;
    vf best = positive_error(x, w, n, iscale, code, fuse);
    for (int step = -4; step <= 4; step++) {
        if (step == 0) continue;
        vf tried =
            multiply_add(f_all(0.1f), f_all((float)step), f_all((float)nmax), fuse) / largest;
        positive_codes(x, n, nmax, tried, code, fuse);
        vf error = positive_error(x, w, n, tried, code, fuse);
        vi better = (vi)(error < best);
        best = f_pick(better, error, best);
        iscale = f_pick(better, tried, iscale);
    }
    fit sums = {zero, zero};
    positive_codes(x, n, nmax, iscale, code, fuse);
    for (int i = 0; i < n; i++) {
        vf q = to_f(code[i]);
        sums.lx = multiply_add(w[i] * x[i], q, sums.lx, fuse);
        sums.l2 = multiply_add(w[i] * q, q, sums.l2, fuse);
        l[i] = to_f(code[i] & 255);
    }
    move_codes(x, w, n, l, &sums, nmax, 0, fuse);
    for (int i = 0; i < n; i++) code[i] = ~none & __builtin_convertvector(l[i], vi);
    return f_pick(none | ~(vi)(sums.l2 > zero), zero, sums.lx / sums.l2);
}

/* Which inverse scales scale_and_min tries: (first + i*step + nmax) / range for i in 0..count. */
typedef struct {
    float first, step;
    int count, absolute; /* absolute: compare weighted absolute errors, not squared ones */
} steps;

static const steps WEIGHTED_STEPS = {-0.9f, 0.05f, 36, 0};

FN vf range_error(const vf *x, const vf *w, const vf *l, int n, vf scale, vf low, int absolute,
                  int fuse) {
    vf error = f_all(0.0f);
    for (int i = 0; i < n; i++) {
        vf apart = multiply_add(scale, l[i], low, fuse) - x[i];
        error = multiply_add(w[i], absolute ? f_abs(apart) : apart * apart, error, fuse);
    }
    return error;
}

/* Scale and *min, which is subtracted and so never negative, and codes in 0..nmax for x =
 * scale*code - min. */
FN vf scale_and_min(const vf *x, const vf *w, int n, int nmax, const steps *tries, vf *min,
                    vi *code, int fuse) {
    const vf zero = f_all(0.0f), top = f_all((float)nmax);
    vf low = x[0], high = x[0], sum_w = w[0], sum_x = w[0] * x[0], l[32];
    for (int i = 1; i < n; i++) {
        low = f_less_of(x[i], low);
        high = f_more_of(x[i], high);
        sum_w += w[i];
        sum_x = multiply_add(w[i], x[i], sum_x, fuse);
    }
    low = f_pick((vi)(low > zero), zero, low);
    const vi flat = (vi)(high == low);
    vf bottom = low, best_from = low; /* best_from: what the best codes were counted from */
    vf best_iscale = top / (high - low), scale = f_all(1.0f) / best_iscale;
    for (int i = 0; i < n; i++) {
        l[i] = to_f(clamp(nearest_product(best_iscale, x[i] - low, fuse), 0, nmax));
    }
    vf best = range_error(x, w, l, n, scale, low, tries->absolute, fuse);
    for (int k = 0; k <= tries->count; k++) {
        vf wanted =
            multiply_add(f_all(tries->step), f_all((float)k), f_all(tries->first), fuse) + top;
        vf iscale = wanted / (high - bottom), sum_l = zero, sum_l2 = zero, sum_xl = zero;
        for (int i = 0; i < n; i++) {
            l[i] = to_f(clamp(nearest_product(iscale, x[i] - bottom, fuse), 0, nmax));
            vf wl = w[i] * l[i];
            sum_l += wl;
            sum_l2 = multiply_add(wl, l[i], sum_l2, fuse);
            sum_xl = multiply_add(wl, x[i], sum_xl, fuse);
        }
        vf determinant = multiply_add(sum_w, sum_l2, -(sum_l * sum_l), fuse);
        vf new_scale = multiply_add(-sum_x, sum_l, sum_w * sum_xl, fuse) / determinant;
        vf new_bottom = multiply_add(sum_x, sum_l2, -(sum_l * sum_xl), fuse) / determinant;
        vi above = (vi)(new_bottom > zero);
        new_scale = f_pick(above, sum_xl / sum_l2, new_scale);
        new_bottom = f_pick(above, zero, new_bottom);
        vf error = range_error(x, w, l, n, new_scale, new_bottom, tries->absolute, fuse);
        vi better = (vi)(determinant > zero) & (vi)(error < best);
        best = f_pick(better, error, best);
        scale = f_pick(better, new_scale, scale);
        best_iscale = f_pick(better, iscale, best_iscale);
        best_from = f_pick(better, bottom, best_from);
        bottom = f_pick(better, new_bottom, bottom);
    }
    for (int i = 0; i < n; i++) {
        code[i] = ~flat & clamp(nearest_product(best_iscale, x[i] - best_from, fuse), 0, nmax);
    }
    *min = -f_pick(flat, low, bottom);
    return f_pick(flat, zero, scale);
}
