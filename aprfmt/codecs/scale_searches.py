"""ggml's searches for the scale of a block, over many blocks at a time.

A *group* is the elements that share one scale.

Each search tries a few scales near the obvious one, rounds, fits the best scale to what came out
and keeps what lowers the weighted error. The order of every operation decides bits, so it is that
of ggml-quants.c: make_qx_quants (signed_scale), make_q3_quants (refined_scale), make_qkx2_quants
and make_qkx3_quants (scale_and_min), make_qp_quants (positive_scale). What `fused` means stands in
arithmetic.py.

Arrays are [size, n]: element first, so that a loop over the elements of all blocks works on
contiguous rows. Codes come back as int32.
"""

from dataclasses import dataclass

import numpy as np

from aprfmt.codecs.arithmetic import (
    F32,
    I32,
    largest_magnitude,
    multiply_add,
    nearest_int,
    nearest_product,
    ordered_sum,
    sum_of_products,
)

SMALLEST = np.float32(1e-15)  # GROUP_MAX_EPS: below it a group counts as all zero
_TENTH = np.float32(0.1)


def _safe_ratio(a: F32, b: F32, where: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> F32:
    """Return a / b where the mask `where` is True, and 0 elsewhere."""
    result: F32 = np.divide(a, b, out=np.zeros_like(a), where=where)
    return result


def signed_scale(x: F32, nmax: int, weights: F32 | None, fused: bool) -> tuple[F32, I32]:
    """Return (scale [n], codes [size, n] in 0..2*nmax-1) so that x is about scale * (code - nmax).

    x is [size, n], one group of elements in each column. `weights` default to x*x. A group of zeros
    has scale 0 and codes 0.
    """
    largest = largest_magnitude(x.T)
    zero = np.abs(largest) < SMALLEST
    w = x * x if weights is None else weights
    wx = w * x

    def fit_sums(iscale: F32) -> tuple[I32, F32, F32]:
        """Return (codes [size, n], sum of w*x*q, sum of w*q*q) under inverse scales `iscale` [n].

        q are the signed codes of x, w the elements' weights; the sums are over each group.
        """
        code = nearest_product(iscale, x, fused)
        np.clip(code, -nmax, nmax - 1, out=code)
        q = code.astype(np.float32)
        return code, sum_of_products(wx, q, fused), sum_of_products(w * q, q, fused)

    # The obvious scale, then eighteen near it; the best fit stays.
    code, sum_lx, sum_l2 = fit_sums(np.float32(-nmax) / largest)
    scale = _safe_ratio(sum_lx, sum_l2, sum_l2 != 0)
    best = scale * sum_lx
    for step in (*range(-9, 0), *range(1, 10)):
        numerator = -multiply_add(_TENTH, np.float32(step), np.float32(nmax), fused)
        tried, sum_lx, sum_l2 = fit_sums(numerator / largest)
        better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2)
        np.copyto(code, tried, where=better)
        np.copyto(scale, sum_lx / sum_l2, where=better)
        np.copyto(best, scale * sum_lx, where=better)
    # Make codes unsigned, and clear groups of zeros.
    code += nmax
    code[:, zero] = 0
    scale[zero] = 0
    return scale, code


def refined_scale(x: F32, nmax: int, fused: bool) -> tuple[F32, I32]:
    """Return (scale [n], codes [size, n]) as `signed_scale` does, found by moving single codes.

    `x` is [size, n], codes are -nmax to nmax - 1 with nmax added. `fused`: sums are made as by
    fused multiply-add.
    """
    largest = largest_magnitude(x.T)
    zero = np.abs(largest) < SMALLEST
    w = x * x
    code = nearest_product(np.float32(-nmax) / largest, x, fused)
    np.clip(code, -nmax, nmax - 1, out=code)
    q = code.astype(np.float32)
    sum_lx, sum_l2 = sum_of_products(w * x, q, fused), sum_of_products(w * q, q, fused)
    _move_codes(x, w, q, sum_lx, sum_l2, nmax, True, fused)
    scale = _safe_ratio(sum_lx, sum_l2, sum_l2 > 0)
    code = q.astype(np.int32) + nmax
    code[:, zero] = 0
    scale[zero] = 0
    return scale, code


def _move_codes(
    x: F32, w: F32, q: F32, sum_lx: F32, sum_l2: F32, nmax: int, signed: bool, fused: bool
) -> None:
    """Change codes `q` one element at a time where that lowers the error, in place.

    Up to five times each element takes the code that fits best the scale which the others imply.
    `sum_lx` and `sum_l2`, the sums of w*x*q and w*q*q, are changed in place too. Codes are kept as
    int8 in -nmax..nmax-1 if `signed`, else as uint8 up to nmax. Without a sign, an element that is
    alone in its group does not change.
    """
    stored = np.int8 if signed else np.uint8
    bounds = (-nmax, nmax - 1) if signed else (None, nmax)
    wx = w * x
    for _ in range(5):
        changed = False
        for i in range(len(x)):
            # Take the element out of the sums, and find the code that fits the rest.
            slx = multiply_add(-wx[i], q[i], sum_lx, fused)
            sl2 = multiply_add(-(w[i] * q[i]), q[i], sum_l2, fused)
            candidate = (slx > 0) if signed else (slx > 0) & (sl2 > 0)
            code = np.clip(nearest_int(x[i] * sl2 / slx), *bounds)
            moved = code.astype(np.float32)
            candidate &= moved != q[i]
            # Put it back with that code where the fit improves.
            slx = multiply_add(wx[i], moved, slx, fused)
            sl2 = multiply_add(w[i] * moved, moved, sl2, fused)
            better = candidate & (sl2 > 0) & (slx * slx * sum_l2 > sum_lx * sum_lx * sl2)
            if better.any():
                changed = True
                np.copyto(q[i], code.astype(stored), where=better)
                np.copyto(sum_lx, slx, where=better)
                np.copyto(sum_l2, sl2, where=better)
        if not changed:
            break


def positive_scale(x: F32, nmax: int, w: F32, fused: bool) -> tuple[F32, I32]:
    """Return (scale [n], codes [size, n] in 0..nmax) so that non-negative x is about scale * code.

    `w` weighs the elements. A negative x, which fused searches give for a group where one element
    alone has importance, gets its code modulo 256, as in C.
    """
    largest = np.zeros(x.shape[1], np.float32)
    for row in x:  # not np.max: in C a NaN loses against what comes after it
        largest = np.where(largest > row, largest, row)
    zero = largest < SMALLEST

    def weighted_error(iscale: F32, q: F32) -> F32:
        """Return the weighted square error [n] of codes `q` of x under inverse scales `iscale`."""
        diff = multiply_add(-(np.float32(1) / iscale), q, x, fused)
        return sum_of_products(w * diff, diff, fused)

    def round_codes(iscale: F32) -> I32:
        """Return the codes [size, n] of x under the inverse scales `iscale` [n], at most nmax."""
        return np.minimum(nearest_product(iscale, x, fused), nmax)

    # Try inverse scales near the obvious one.
    iscale = np.float32(nmax) / largest
    best = weighted_error(iscale, (nearest_product(iscale, x, fused) & 255).astype(np.float32))
    for step in (*range(-4, 0), *range(1, 5)):
        tried = multiply_add(_TENTH, np.float32(step), np.float32(nmax), fused) / largest
        found = weighted_error(tried, round_codes(tried).astype(np.float32))
        better = found < best
        np.copyto(best, found, where=better)
        np.copyto(iscale, tried, where=better)
    # Fit the scale to the best codes, after moving single codes.
    code = round_codes(iscale)
    q = code.astype(np.float32)
    sum_lx, sum_l2 = sum_of_products(w * x, q, fused), sum_of_products(w * q, q, fused)
    q = (code & 255).astype(np.float32)
    _move_codes(x, w, q, sum_lx, sum_l2, nmax, False, fused)
    scale = _safe_ratio(sum_lx, sum_l2, sum_l2 > 0)
    code = q.astype(np.int32)
    code[:, zero] = 0
    scale[zero] = 0
    return scale, code


@dataclass(frozen=True)
class ScaleSteps:
    """Which inverse scales are tried: (first + i*step + nmax) / range for i in 0..count."""

    first: float
    step: float
    count: int
    absolute: bool = False  # compare weighted absolute errors, not squared ones


def scale_and_min(
    x: F32, nmax: int, w: F32, steps: ScaleSteps, fused: bool
) -> tuple[F32, F32, I32]:
    """Return (scale [n], min [n], codes [size, n] in 0..nmax): x is about scale * code - min.

    `min` is what is subtracted, so never negative. `w` weighs the elements, `steps` are the scales
    tried. A group whose elements are all one negative number, or all zero, has scale 0 and codes 0.
    """
    # From the smallest element, or 0, to the largest.
    low = np.take_along_axis(x, np.argmin(x, axis=0)[None], axis=0)[0]  # the first of equals
    high = x.max(axis=0)
    sum_w, sum_x = ordered_sum(w), sum_of_products(w[1:], x[1:], fused, start=w[0] * x[0])
    low[low > 0] = 0
    flat = high == low
    bottom = low.copy()  # the best minimum so far
    scale = np.float32(1) / (np.float32(nmax) / (high - low))

    def round_codes(iscale: F32) -> I32:
        """Return the codes [size, n] of x less its minimum, under inverse scales `iscale`."""
        code = nearest_product(iscale, x - bottom, fused)
        return np.clip(code, 0, nmax, out=code)

    def weighted_error(scale: F32, q: F32, minimum: F32) -> F32:
        """Return the weighted error [n] of x by scale * q + minimum; `steps` says if squared."""
        diff = multiply_add(scale, q, minimum, fused) - x
        return sum_of_products(w, np.abs(diff) if steps.absolute else diff * diff, fused)

    code = round_codes(np.float32(nmax) / (high - low))
    best = weighted_error(scale, code.astype(np.float32), low)
    # Try inverse scales; fit scale and min to the codes of each by least squares.
    first, step = np.float32(steps.first), np.float32(steps.step)
    for i in range(steps.count + 1):
        numerator = multiply_add(step, np.float32(i), first, fused) + np.float32(nmax)
        tried = round_codes(numerator / (high - bottom))
        q = tried.astype(np.float32)
        wl = w * q
        sum_l = ordered_sum(wl)  # rounded products: they are multiplied on below
        sum_l2, sum_xl = sum_of_products(wl, q, fused), sum_of_products(wl, x, fused)
        determinant = multiply_add(sum_w, sum_l2, -(sum_l * sum_l), fused)
        new_scale = multiply_add(-sum_x, sum_l, sum_w * sum_xl, fused) / determinant
        new_bottom = multiply_add(sum_x, sum_l2, -(sum_l * sum_xl), fused) / determinant
        above = new_bottom > 0
        np.copyto(new_scale, sum_xl / sum_l2, where=above)
        new_bottom[above] = 0
        found = weighted_error(new_scale, q, new_bottom)
        better = (determinant > 0) & (found < best)
        np.copyto(code, tried, where=better)
        np.copyto(best, found, where=better)
        np.copyto(scale, new_scale, where=better)
        np.copyto(bottom, new_bottom, where=better)
    # Groups of one value have no scale.
    code[:, flat] = 0
    scale[flat] = 0
    np.copyto(bottom, low, where=flat)
    return scale, -bottom, code
