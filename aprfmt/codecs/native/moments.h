/* Statistics of float32 in one stream: counts, extremes, sum, and squares about the mean.
 *
 * Elements are taken in segments of SEGMENT; lane i of a segment adds elements i, i + 8, ... in
 * float64, the lanes are added as a fixed tree, and segments are merged in order (Chan, Golub and
 * LeVeque, 1983). So the result is a function of the data alone, bit for bit, on every level. NaN
 * and infinity are counted and otherwise left out. */

FN double lanes_sum(vd a, vd b) {
    vd c = a + b;
    return (c[0] + c[1]) + (c[2] + c[3]);
}

FN void low_high(vf v, vd *low, vd *high) {
#ifdef APRFMT_AVX2
    *low = (vd)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v));
    *high = (vd)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1));
#else
    *low = (vd){(double)v[0], (double)v[1], (double)v[2], (double)v[3]};
    *high = (vd){(double)v[4], (double)v[5], (double)v[6], (double)v[7]};
#endif
}

/* Keep the finite values of x[n] in `kept` and count the others; returns how many were kept. */
FN size_t finite_only(const float *x, size_t n, float *kept, moments *m) {
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        if (bits > 0x7f800000)
            m->nan++;
        else if (bits == 0x7f800000)
            m->inf++;
        else
            kept[count++] = x[i];
    }
    return count;
}

/* Add x[n], n <= SEGMENT, all finite; returns 0 without adding anything if one is not. */
FN int finite_segment(const float *x, size_t n, moments *m) {
    const size_t whole = n & ~(size_t)7;
    vd sum_low = {0}, sum_high = {0}, low, high;
    vf least = f_all(x[0]), most = least;
    vi zeros = i_all(0), magnitude = i_all(0);
    for (size_t i = 0; i < whole; i += 8) {
        vf v = f_load(x + i);
        low_high(v, &low, &high);
        sum_low += low;
        sum_high += high;
        least = f_less_of(v, least);
        most = f_more_of(v, most);
        magnitude = i_more_of(magnitude, (vi)v & 0x7fffffff);
        zeros -= (vi)(v == f_all(0.0f));
    }
    double sum = lanes_sum(sum_low, sum_high);
    uint64_t zero_count = 0;
    for (size_t i = whole; i < n; i++) {
        vf v = f_all(x[i]);
        sum += (double)x[i];
        least = f_less_of(v, least);
        most = f_more_of(v, most);
        magnitude = i_more_of(magnitude, (vi)v & 0x7fffffff);
        zero_count += x[i] == 0.0f;
    }
    if (any((vi)(magnitude >= 0x7f800000))) return 0;
    double mean = sum / (double)n;
    vd about_low = {0}, about_high = {0}, centre = {mean, mean, mean, mean};
    for (size_t i = 0; i < whole; i += 8) {
        low_high(f_load(x + i), &low, &high);
        low -= centre;
        high -= centre;
        about_low += low * low;
        about_high += high * high;
    }
    double about = lanes_sum(about_low, about_high);
    for (size_t i = whole; i < n; i++) {
        double d = (double)x[i] - mean;
        about += d * d;
    }
    for (int i = 0; i < 8; i++) {
        zero_count += (uint64_t)zeros[i];
        if (least[i] < m->least) m->least = least[i];
        if (most[i] > m->most) m->most = most[i];
    }
    double before = (double)m->finite, now = (double)n;
    double apart = before ? mean - m->sum / before : 0.0;
    m->about += about + apart * apart * before * now / (before + now);
    m->sum += sum;
    m->finite += n;
    m->zeros += zero_count;
    return 1;
}

FN void segment(const float *x, size_t n, moments *m) {
    float kept[SEGMENT];
    m->count += n;
    if (finite_segment(x, n, m)) return;
    n = finite_only(x, n, kept, m);
    if (n) finite_segment(kept, n, m);
}

/* Index of the first NaN or infinity of x[n], n <= SEGMENT; n if there is none. */
FN size_t not_finite(const float *x, size_t n) {
    vi most = i_all(0);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) most = i_more_of(most, (vi)f_load(x + i) & 0x7fffffff);
    if (any((vi)(most >= 0x7f800000))) i = 0;
    for (; i < n; i++) {
        if (!isfinite(x[i])) return i;
    }
    return n;
}

/* What a second rounding changed in x[n] to make it y[n], n <= SEGMENT: numbers that differ, finite
 * ones that became infinite or NaN, and others that became zero. NaN stays equal to NaN. */
FN void add_changes(const float *x, const float *y, size_t n, changes *c) {
    vi differ = i_all(0), over = differ, under = differ;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const vf a = f_load(x + i), b = f_load(y + i);
        const vi lost = (vi)(((vi)a & 0x7fffffff) < 0x7f800000) & ~(vi)(((vi)b & 0x7fffffff) < 0x7f800000);
        differ -= (vi)(a != b) & ~((vi)(a != a) & (vi)(b != b));
        over -= lost;
        under -= (vi)(a != f_all(0.0f)) & (vi)(b == f_all(0.0f));
    }
    int32_t lane[3][8];
    i_store(lane[0], differ);
    i_store(lane[1], over);
    i_store(lane[2], under);
    for (int k = 0; k < 8; k++) {
        c->differ += (size_t)lane[0][k];
        c->over += (size_t)lane[1][k];
        c->under += (size_t)lane[2][k];
    }
    for (; i < n; i++) {
        c->differ += x[i] != y[i] && !(isnan(x[i]) && isnan(y[i]));
        c->over += isfinite(x[i]) && !isfinite(y[i]);
        c->under += x[i] != 0 && y[i] == 0;
    }
}
