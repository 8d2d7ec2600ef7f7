"""The arithmetic of sampling in Triton, which gives the same bits as the other kernels: exp and log of elementary.py, integer
masses, and thresholds that are found a few bits at a time."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(3.4028234663852886e38)
INFINITY = tl.constexpr(float("inf"))
LEAST_KEY = tl.constexpr(-2147483648)


@triton.jit
def exp_(x):
    """exp(x) for x ≤ 0, as in elementary.py."""
    inside = tl.maximum(x, -87.0)
    n = tl.floor(inside * LOG2E + 0.5)
    r = (inside - n * 0.693359375) - n * -2.12194440e-4
    p = tl.full(x.shape, 1 / 5040, tl.float32)
    p = p * r + 1 / 720
    p = p * r + 1 / 120
    p = p * r + 1 / 24
    p = p * r + 1 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.0, 0.0, p * power)


@triton.jit
def log_(x):
    """log(x) for a normal x > 0, as in elementary.py."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = tl.div_rn(m - 1.0, m + 1.0)
    q = s * s
    p = tl.full(x.shape, 1 / 9, tl.float32)
    p = p * q + 1 / 7
    p = p * q + 1 / 5
    p = p * q + 1 / 3
    k = exponent.to(tl.float32)
    return ((p * q * (2.0 * s) + k * -2.12194440e-4) + 2.0 * s) + k * 0.693359375


@triton.jit
def log_of_total(total, scale):
    """log(total / scale) in float64; `scale` is a power of 2."""
    x = total.to(tl.float64) / scale
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    m = (bits - (exponent << 52)).to(tl.float64, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    q = s * s
    p = tl.full([], 1 / 23, tl.float64)
    for n in tl.static_range(10):
        p = p * q + tl.full([], 1 / (21 - 2 * n), tl.float64)
    k = exponent.to(tl.float64)
    low = tl.full([], 1.90821492927058770002e-10, tl.float64)
    high = tl.full([], 6.93147180369123816490e-01, tl.float64)
    return ((p * q * (2.0 * s) + k * low) + 2.0 * s) + k * high


@triton.jit
def mass_of(e, scale):
    return (e * scale + 0.5).to(tl.int64)


@triton.jit
def penalised(l, row_seen, i, inside, penalty, SEEN: tl.constexpr):
    y = l
    if SEEN:
        seen = tl.load(row_seen + i, mask=inside, other=0)
        y = tl.where(l < 0.0, l * penalty, tl.div_rn(l, penalty))
        y = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)
        y = tl.where((seen == 0) | (l == -INFINITY), l, y)
    return y


@triton.jit
def order_key(y):
    """Integers in the order of the numbers y; −0 and 0 are equal."""
    bits = tl.where(y == 0.0, 0.0, y).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number_of(key):
    """The inverse of `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def smallest_kept(row, V, bound, scale, MASSES: tl.constexpr, TILE: tl.constexpr):
    """The smallest t such that the keys above t have a total mass below `bound`. `row` has e with their masses, or y with mass
    1 each. t is found two bits at a time, from the highest down. For y the highest bit is the sign, which counts in reverse."""
    cols = tl.arange(0, TILE)
    t = tl.full([], 0 if MASSES else LEAST_KEY, tl.int32)
    counted: tl.constexpr = tl.int64 if MASSES else tl.int32
    passes: tl.constexpr = 15 if MASSES else 16
    for step in range(passes):
        shift = 2 * (passes - 1 - step)
        one = tl.full([], 1, tl.int32) << shift
        above0 = tl.zeros([TILE], counted)
        above1 = tl.zeros([TILE], counted)
        above2 = tl.zeros([TILE], counted)
        for k in range(0, V, TILE):
            x = tl.load(row + k + cols, mask=k + cols < V, other=0.0)
            if MASSES:
                key, mass = x.to(tl.int32, bitcast=True), mass_of(x, scale)
            else:
                key, mass = order_key(x), (k + cols < V).to(tl.int32)
            above0 += tl.where(key > (t | (one - 1)), mass, 0)
            above1 += tl.where(key > ((t ^ one) | (one - 1)), mass, 0)
            above2 += tl.where(key > ((t ^ (one << 1)) | (one - 1)), mass, 0)
        digit = (tl.sum(above0, 0).to(tl.float64) >= bound).to(tl.int32)
        digit += (tl.sum(above1, 0).to(tl.float64) >= bound).to(tl.int32)
        digit += (tl.sum(above2, 0).to(tl.float64) >= bound).to(tl.int32)
        t = t ^ (digit << shift)
    return t


@triton.jit
def kth_largest(key, n, k, most):
    """The k-th largest of n keys in registers, found two bits at a time; the other elements are LEAST_KEY. Stops early, with a
    smaller t, if at most `most` keys are larger than or equal to t. One sum adds three counts of 20 bits each."""
    t = tl.full([], LEAST_KEY, tl.int32)
    shift = tl.full([], 30, tl.int32)
    kept = n
    while (shift >= 0) & (kept > most):
        one = tl.full([], 1, tl.int32) << shift
        edge = t | (one - 1)
        counts = (key > edge).to(tl.int64) + ((key > (edge ^ one)).to(tl.int64) << 20)
        counts = tl.sum(counts + ((key > (edge ^ (one << 1))).to(tl.int64) << 40), 0)
        above0, above1, above2 = counts & 0xFFFFF, (counts >> 20) & 0xFFFFF, counts >> 40
        digit = (above0 >= k).to(tl.int32) + (above1 >= k).to(tl.int32) + (above2 >= k).to(tl.int32)
        above = tl.where(digit == 1, above0, tl.where(digit == 2, above1, above2)).to(tl.int32)
        kept = tl.where(digit == 0, kept, above)
        t = t ^ (digit << shift)
        shift -= 2
    return t


@triton.jit
def smallest_kept_mass(e, mass, bound):
    """The smallest t such that the e above t have a total mass below `bound`, found four bits at a time. All e are in
    registers. t is not a positive number if the total mass of all e is below `bound`."""
    digits, key = tl.arange(0, 16), e.to(tl.int32, bitcast=True)
    t = tl.full([], LEAST_KEY, tl.int32)
    for step in range(8):
        shift = 28 - 4 * step
        edges = (t + (digits << shift)) | ((tl.full([], 1, tl.int32) << shift) - 1)
        above = tl.sum(tl.where(key[None, :] > edges[:, None], mass[None, :], 0), 1)
        t += tl.sum((above.to(tl.float64) >= bound).to(tl.int32), 0) << shift
    return t.to(tl.float32, bitcast=True)


@triton.jit
def gumbel(seed, i, drawn, sequence):
    zero = tl.zeros(i.shape, tl.uint32)
    low, high = (sequence & 0xFFFFFFFF).to(tl.uint32), ((sequence >> 32) & 0xFFFFFFFF).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, i.to(tl.uint32), zero + drawn.to(tl.uint32), zero + low, zero + high)
    v = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    u = 1.0 - v
    lost = tl.div_rn(v - (1.0 - u), u)
    return -log_(lost - log_(u))


@triton.jit
def total_mass(row, V, top, scale, TILE: tl.constexpr):
    """Σ of the masses of exp(l − top)."""
    cols = tl.arange(0, TILE)
    masses = tl.zeros([TILE], tl.int64)
    for k in range(0, V, TILE):
        l = tl.load(row + k + cols, mask=k + cols < V, other=-INFINITY)
        masses += mass_of(exp_(l - top), scale)
    return tl.sum(masses, 0)
