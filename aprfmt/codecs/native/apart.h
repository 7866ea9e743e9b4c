/* How far one float32 array is from another, with NaN and infinities counted, in one pass.
 *
 * Sums are taken as numpy takes them: runs of at most RUN elements are added in eight float64 lanes,
 * and halves of what is longer are added as a tree. So a result is that of numpy's sum of the same
 * float64 terms, bit for bit, on every level. */

enum { RUN = 128 };

typedef struct {
    double dd, yy;
} two_sums;

FN double eight_sum(vd low, vd high) {
    return ((low[0] + low[1]) + (low[2] + low[3])) + ((high[0] + high[1]) + (high[2] + high[3]));
}

/* Whether x[n] and y[n] are all finite. */
FN int both_finite(const float *x, const float *y, size_t n) {
    vi most = i_all(0);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        most = i_more_of(most, (vi)f_abs(f_load(x + i)));
        most = i_more_of(most, (vi)f_abs(f_load(y + i)));
    }
    if (any((vi)(most >= 0x7f800000))) return 0;
    for (; i < n; i++) {
        if (!isfinite(x[i]) || !isfinite(y[i])) return 0;
    }
    return 1;
}

/* Copy a run without what is not finite on one side, which is counted: zeros stand for it. */
FN void leave_odd_out(const float *x, const float *y, size_t n, size_t base, float *kept_x,
                      float *kept_y, apart_from *found) {
    for (size_t i = 0; i < n; i++) {
        const int odd_x = !isfinite(x[i]), odd_y = !isfinite(y[i]);
        kept_x[i] = odd_x || odd_y ? 0.0f : x[i];
        kept_y[i] = odd_x || odd_y ? 0.0f : y[i];
        if (!odd_x && !odd_y) continue;
        found->odd_x += (size_t)odd_x;
        found->odd_y += (size_t)odd_y;
        if (x[i] == y[i] || (isnan(x[i]) && isnan(y[i]))) {
            if (!found->both++) found->both_at = base + i;
        } else {
            if (!found->alone++) found->alone_at = base + i;
        }
    }
}

/* x[n] and y[n], n <= RUN, from place `base` on. */
FN two_sums one_run(const float *x, const float *y, size_t n, size_t base, apart_from *found) {
    float kept_x[RUN], kept_y[RUN];
    if (!both_finite(x, y, n)) {
        leave_odd_out(x, y, n, base, kept_x, kept_y, found);
        x = kept_x;
        y = kept_y;
    }
    const size_t whole = n & ~(size_t)7;
    vd dd[2] = {{0}}, yy[2] = {{0}}, most = {0};
    for (size_t i = 0; i < whole; i += 8) {
        vd a[2], b[2];
        low_high(f_load(x + i), a, a + 1);
        low_high(f_load(y + i), b, b + 1);
        for (int k = 0; k < 2; k++) {
            const vd delta = a[k] - b[k];
            dd[k] += delta * delta;
            yy[k] += b[k] * b[k];
            most = d_more_of(most, d_abs(delta));
        }
    }
    two_sums sum = {eight_sum(dd[0], dd[1]), eight_sum(yy[0], yy[1])};
    double largest = d_most(most);
    for (size_t i = whole; i < n; i++) {
        const double delta = fabs((double)x[i] - (double)y[i]);
        sum.dd += delta * delta;
        sum.yy += (double)y[i] * (double)y[i];
        if (delta > largest) largest = delta;
    }
    if (largest > found->most) {
        size_t i = 0;
        while (fabs((double)x[i] - (double)y[i]) != largest) i++;
        found->most = largest;
        found->at = base + i;
    }
    return sum;
}

TARGET static two_sums runs_below(const float *x, const float *y, size_t n, size_t base,
                                  apart_from *found) {
    if (n <= RUN) return one_run(x, y, n, base, found);
    const size_t half = n / 2 - n / 2 % 8;
    const two_sums a = runs_below(x, y, half, base, found);
    const two_sums b = runs_below(x + half, y + half, n - half, base + half, found);
    return (two_sums){a.dd + b.dd, a.yy + b.yy};
}

FN void measure_apart(const float *x, const float *y, size_t n, apart_from *found) {
    const two_sums sum = runs_below(x, y, n, 0, found);
    found->dd = sum.dd;
    found->yy = sum.yy;
}
