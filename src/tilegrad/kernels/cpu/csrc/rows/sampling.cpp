// Sampling: one thread for each row. Compiled once per instruction set, without fused multiply-adds: the results have the bits
// of kernels/sampling/torch_ops.py. The equations are in kernels/sampling/__init__.py and elementary.py.

#include "rows/sampling.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace tilegrad {
namespace ISA {
namespace {

constexpr int BLOCK = 64;    // numbers computed together: their loops become vector instructions
constexpr int DIGIT = 11;    // bits of a key that one histogram counts
constexpr float INFINITE = std::numeric_limits<float>::infinity(), LARGEST = std::numeric_limits<float>::max();

template <class To, class From>
inline To bits_of(From x) {
    static_assert(sizeof(To) == sizeof(From), "the same size");
    To out;
    std::memcpy(&out, &x, sizeof out);
    return out;
}

// exp(x), x ≤ 0
inline float exponential(float x) {
    const float inside = x < -87.0f ? -87.0f : x;
    const float n = std::floor(inside * float(1.4426950408889634) + 0.5f);
    const float r = (inside - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = float(1.0 / 5040);
    p = p * r + float(1.0 / 720);
    p = p * r + float(1.0 / 120);
    p = p * r + float(1.0 / 24);
    p = p * r + float(1.0 / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const float e = p * bits_of<float>((int32_t(n) + 127) * (1 << 23));
    return x < -87.0f ? 0.0f : e;
}

// log(x), x > 0 and normal
inline float logarithm(float x) {
    const int32_t bits = bits_of<int32_t>(x), exponent = (bits - 0x3F3504F3) >> 23;
    const float m = bits_of<float>(bits - exponent * (1 << 23)), s = (m - 1.0f) / (m + 1.0f), q = s * s, k = float(exponent);
    float p = float(1.0 / 9);
    p = p * q + float(1.0 / 7);
    p = p * q + float(1.0 / 5);
    p = p * q + float(1.0 / 3);
    return ((p * q * (2.0f * s) + k * -2.12194440e-4f) + 2.0f * s) + k * 0.693359375f;
}

inline double logarithm(double x) {
    const int64_t bits = bits_of<int64_t>(x), exponent = (bits - 0x3FE6A09E667F3BCD) >> 52;
    const double m = bits_of<double>(bits - exponent * (int64_t(1) << 52)), s = (m - 1) / (m + 1), q = s * s, k = double(exponent);
    double p = 1.0 / 23;
    for (int n = 21; n >= 3; n -= 2) p = p * q + 1.0 / n;
    return ((p * q * (2 * s) + k * 1.90821492927058770002e-10) + 2 * s) + k * 6.93147180369123816490e-01;
}

// A key in the order of the numbers; −0 and 0 are equal.
inline uint32_t ordered(float y) {
    const uint32_t bits = bits_of<uint32_t>(y + 0.0f);
    return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

inline float penalised(float l, float penalty) {
    if (l == -INFINITE) return l;
    const float y = l < 0 ? l * penalty : l / penalty;
    return y < -LARGEST ? -LARGEST : y > LARGEST ? LARGEST : y;
}

struct Range {
    float top;
    bool finite;  // no NaN, no +inf, not −inf only
};

Range range_of(const float* x, int64_t v) {
    float tops[16];
    int32_t wrong[16] = {};
    for (float& top : tops) top = -INFINITE;
    int64_t i = 0;
    const auto look = [&](int64_t at, int j) {
        tops[j] = x[at] > tops[j] ? x[at] : tops[j];
        wrong[j] |= !(x[at] < INFINITE);
    };
    for (; i + 16 <= v; i += 16)
        for (int j = 0; j < 16; ++j) look(i + j, j);
    for (; i < v; ++i) look(i, 0);
    Range out{-INFINITE, true};
    for (int j = 0; j < 16; ++j) {
        out.top = tops[j] > out.top ? tops[j] : out.top;
        out.finite = out.finite && !wrong[j];
    }
    out.finite = out.finite && out.top > -INFINITE;
    return out;
}

// f(i, j) for all i < v, in blocks: j = i % BLOCK
template <class F>
inline void in_blocks(int64_t v, F f) {
    int64_t i = 0;
    for (; i + BLOCK <= v; i += BLOCK)
        for (int j = 0; j < BLOCK; ++j) f(i + j, j);
    for (int j = 0; i < v; ++i, ++j) f(i, j);
}

inline int64_t mass(float e, float scale) { return int64_t(e * scale + 0.5f); }

// Σ of the masses of exp(x − top)
int64_t total_mass(const float* x, int64_t v, float top, float scale) {
    int64_t sums[BLOCK] = {}, total = 0;
    in_blocks(v, [&](int64_t i, int j) { sums[j] += mass(exponential(x[i] - top), scale); });
    for (int64_t sum : sums) total += sum;
    return total;
}

// The smallest key t of which the keys above t have a mass below `bound`. keys: v numbers, which are overwritten.
// mass_of(key): the mass of one number. Numbers that have the digits found so far are moved to the front.
template <class Mass>
uint32_t smallest_key(uint32_t* keys, int64_t v, double bound, Mass mass_of) {
    int64_t above = 0;
    uint32_t found = 0;
    for (int shift = 32 - DIGIT; shift > -DIGIT; shift -= DIGIT) {
        const int low = shift > 0 ? shift : 0, width = shift > 0 ? DIGIT : DIGIT + shift;
        const uint32_t mask = (1u << width) - 1;
        int64_t masses[1 << DIGIT] = {};
        for (int64_t i = 0; i < v; ++i) masses[keys[i] >> low & mask] += mass_of(keys[i]);
        // the smallest digit of which the numbers with a larger one have too little mass
        uint32_t digit = mask;
        while (digit && double(above + masses[digit]) < bound) above += masses[digit--];
        int64_t kept = 0;
        for (int64_t i = 0; i < v; ++i)
            if ((keys[i] >> low & mask) == digit) keys[kept++] = keys[i];
        v = kept;
        found |= digit << low;
    }
    return found;
}

// g of BLOCK tokens: indices → noise
void gumbel(const uint32_t* index, float* noise, uint64_t seed, uint32_t drawn, uint64_t sequence) {
    uint32_t c0[BLOCK], c1[BLOCK], c2[BLOCK], c3[BLOCK];
    for (int j = 0; j < BLOCK; ++j) c0[j] = index[j], c1[j] = drawn, c2[j] = uint32_t(sequence), c3[j] = uint32_t(sequence >> 32);
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9, k1 += 0xBB67AE85)
        for (int j = 0; j < BLOCK; ++j) {
            const uint64_t x = uint64_t(c0[j]) * 0xD2511F53u, y = uint64_t(c2[j]) * 0xCD9E8D57u;
            c0[j] = uint32_t(y >> 32) ^ c1[j] ^ k0;
            c1[j] = uint32_t(y);
            c2[j] = uint32_t(x >> 32) ^ c3[j] ^ k1;
            c3[j] = uint32_t(x);
        }
    for (int j = 0; j < BLOCK; ++j) {
        const float drawn_v = (float(c0[j]) + 0.5f) * 2.3283064365386963e-10f, most = 0.99999994f;
        const float v = drawn_v < most ? drawn_v : most, u = 1.0f - v;
        noise[j] = -logarithm((v - (1.0f - u)) / u - logarithm(u));
    }
}

struct Row {
    const Sample& call;
    const int64_t r, v;
    const float* l;
    const uint8_t* seen;
    const float *settings;
    float* numbers;    // y, then z
    uint32_t* places;  // keys, then the kept tokens

    Row(const Sample& call, int64_t r)
        : call(call), r(r), v(call.v), l(reinterpret_cast<const float*>(call.logits.data) + r * call.logits.stride),
          seen(call.seen.data ? reinterpret_cast<const uint8_t*>(call.seen.data) + r * call.seen.stride : nullptr),
          settings(call.settings ? call.settings + 5 * r : nullptr),
          numbers(reinterpret_cast<float*>(call.numbers.data) + r * call.numbers.stride),
          places(reinterpret_cast<uint32_t*>(call.places.data) + r * call.places.stride) {}

    float scale() const { return float(std::ldexp(1.0, int(call.mass_bits))); }

    int64_t draw(float raw_top) {
        const float temperature = settings[0], top_k = settings[1], top_p = settings[2], min_p = settings[3], penalty = settings[4];
        float top = raw_top;
        const float* y = l;
        if (seen) {
            for (int64_t i = 0; i < v; ++i) numbers[i] = seen[i] ? penalised(l[i], penalty) : l[i];
            y = numbers;
            top = range_of(y, v).top;
        }
        if (!(temperature > 0)) {
            int64_t first = 0;
            while (y[first] != top) ++first;
            return first;
        }
        uint32_t smallest_y = 0;
        float smallest_e = min_p;
        if (top_k > 0 && top_k < float(v)) {
            for (int64_t i = 0; i < v; ++i) places[i] = ordered(y[i]);
            smallest_y = smallest_key(places, v, top_k, [](uint32_t) { return int64_t(1); });
        }
        int64_t kept = 0;  // tokens and their z, in order
        for (int64_t i = 0; i < v; ++i)
            if (ordered(y[i]) >= smallest_y) {
                numbers[kept] = y[i];
                places[kept++] = uint32_t(i);
            }
        const float divisor = temperature, times = scale();
        float z[BLOCK], e[BLOCK];
        if (top_p < 1) {
            int64_t total = 0;
            uint32_t* keys = exponentials();
            in_blocks(kept, [&](int64_t i, int) { keys[i] = bits_of<uint32_t>(exponential((numbers[i] - top) / divisor)); });
            for (int64_t i = 0; i < kept; ++i) total += mass(bits_of<float>(keys[i]), times);
            const double bound = double(total) * double(top_p);
            const uint32_t key = smallest_key(keys, kept, bound, [&](uint32_t x) { return mass(bits_of<float>(x), times); });
            const float least = bits_of<float>(key);
            if (!(least < smallest_e)) smallest_e = least < 1.0f ? least : 1.0f;
        }
        float best = -INFINITE, noise[BLOCK];
        int64_t token = places[0];
        uint32_t index[BLOCK] = {};
        for (int64_t i = 0; i < kept; i += BLOCK) {
            const int m = int(kept - i < BLOCK ? kept - i : BLOCK);
            for (int j = 0; j < m; ++j) z[j] = (numbers[i + j] - top) / divisor, e[j] = exponential(z[j]);
            int some = 0;
            for (int j = 0; j < m; ++j) some += e[j] >= smallest_e, index[j] = places[i + j];
            if (!some) continue;
            gumbel(index, noise, uint64_t(call.seeds[r]), uint32_t(call.drawn[r]), uint64_t(call.sequences[r]));
            for (int j = 0; j < m; ++j)
                if (e[j] >= smallest_e && z[j] + noise[j] > best) best = z[j] + noise[j], token = index[j];
        }
        return token;
    }

    uint32_t* exponentials() const { return places + v; }

    void run() {
        int64_t& token = call.tokens[r];
        float& logprob = call.logprobs[r];
        if (!settings && token < 0) {
            logprob = 0.0f;
            return;
        }
        const Range range = range_of(l, v);
        if (!range.finite) {
            logprob = settings ? 0.0f : std::numeric_limits<float>::quiet_NaN();
            if (settings) token = -1;
            return;
        }
        if (settings) {
            token = draw(range.top);
            if (seen) const_cast<uint8_t*>(seen)[token] = 1;
        }
        const double total = logarithm(std::ldexp(double(total_mass(l, v, range.top, scale())), -int(call.mass_bits)));
        logprob = float((double(l[token]) - double(range.top)) - total);
    }
};

void rows(const Sample& call, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) Row(call, r).run();
}

}  // namespace

SamplingKernels sampling_kernels() { return {rows}; }

}  // namespace ISA
}  // namespace tilegrad
