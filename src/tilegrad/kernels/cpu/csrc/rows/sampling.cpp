// Sampling: one thread for each row. Compiled once per instruction set, without fused multiply-adds, so the results have the bits
// of kernels/sampling/torch_ops.py. The equations are in kernels/sampling/__init__.py and elementary.py.

#include "rows/sampling.h"

#include "attention/dropout.h"
#include "simd/vector.h"

namespace tilegrad {
namespace ISA {
namespace {

constexpr int N = Lanes<float>::N, BLOCK = 64;  // BLOCK: numbers computed together
constexpr int DIGIT = 11;                       // bits of a key that one histogram counts
constexpr float MOST_NOISE = 23.0f;             // g is at most log(2³³) = 22.9
constexpr float INFINITE = __builtin_inff(), LARGEST = __FLT_MAX__;

template <class To, class From>
inline To bits_of(From x) {
    static_assert(sizeof(To) == sizeof(From), "the same size");
    To out;
    std::memcpy(&out, &x, sizeof out);
    return out;
}

// exp(x), x ≤ 0
inline V32 exp_of(V32 x) {
    const V32 inside = x < -87.0f ? all(-87.0f) : x;
    const V32 t = inside * float(1.4426950408889634) + 0.5f;
    const I32 cut = __builtin_convertvector(t, I32), power = cut + (__builtin_convertvector(cut, V32) > t);  // floor(t)
    const V32 n = __builtin_convertvector(power, V32);
    const V32 r = (inside - n * 0.693359375f) - n * -2.12194440e-4f;
    V32 p = all(float(1.0 / 5040));
    p = p * r + float(1.0 / 720);
    p = p * r + float(1.0 / 120);
    p = p * r + float(1.0 / 24);
    p = p * r + float(1.0 / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return x < -87.0f ? V32{} : p * (V32)((power + 127) << 23);
}

// log(x), x > 0 and normal
inline V32 log_of(V32 x) {
    const I32 bits = (I32)x, exponent = (bits - 0x3F3504F3) >> 23;
    const V32 m = (V32)(bits - (exponent << 23)), s = (m - 1.0f) / (m + 1.0f), q = s * s;
    const V32 k = __builtin_convertvector(exponent, V32);
    V32 p = all(float(1.0 / 9));
    p = p * q + float(1.0 / 7);
    p = p * q + float(1.0 / 5);
    p = p * q + float(1.0 / 3);
    return ((p * q * (2.0f * s) + k * -2.12194440e-4f) + 2.0f * s) + k * 0.693359375f;
}

inline double log_of(double x) {
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
    bool finite;  // no NaN, no +inf, and not only −inf
};

Range range_of(const float* x, int64_t v) {
    V32 tops[4];
    I32 right[4];
    for (int u = 0; u < 4; ++u) tops[u] = all(-INFINITE), right[u] = ~I32{};
    float top = -INFINITE;
    bool finite = true;
    int64_t i = 0;
    for (; i + 4 * N <= v; i += 4 * N)
        for (int u = 0; u < 4; ++u) {
            const V32 y = load(x + i + u * N);
            tops[u] = y > tops[u] ? y : tops[u];
            right[u] &= y < INFINITE;
        }
    for (; i < v; ++i) top = x[i] > top ? x[i] : top, finite = finite && x[i] < INFINITE;
    for (int u = 0; u < 4; ++u)
        for (int n = 0; n < N; ++n) top = tops[u][n] > top ? tops[u][n] : top, finite = finite && right[u][n];
    return {top, finite && top > -INFINITE};
}

// Calls f(i, block, m) for each block of x. A block has the m numbers from x + i on, padded with −inf to BLOCK.
template <class F>
inline void in_blocks(const float* x, int64_t v, F f) {
    for (int64_t i = 0; i < v; i += BLOCK) {
        float block[BLOCK];
        const int m = int(v - i < BLOCK ? v - i : BLOCK);
        for (int j = m; j < BLOCK; ++j) block[j] = -INFINITE;
        std::memcpy(block, x + i, m * sizeof(float));
        f(i, block, m);
    }
}

inline int64_t mass(float e, float scale) { return int64_t(e * scale + 0.5f); }

// Σ of the masses of exp(x − top)
int64_t total_mass(const float* x, int64_t v, float top, float scale) {
    int64_t total = 0;
    in_blocks(x, v, [&](int64_t, float* e, int) {
        for (int j = 0; j < BLOCK; j += N) store(e + j, exp_of(load(e + j) - top) * scale + 0.5f);
        for (int j = 0; j < BLOCK; ++j) total += int64_t(e[j]);
    });
    return total;
}

// The smallest key t such that the keys above t have a total mass below `bound`; mass_of(key) is the mass of one key. The v
// keys are overwritten: keys that have the digits found so far are moved to the front.
template <class Mass>
uint32_t smallest_key(uint32_t* keys, int64_t v, double bound, Mass mass_of) {
    int64_t above = 0;
    uint32_t found = 0;
    for (int shift = 32 - DIGIT; shift > -DIGIT; shift -= DIGIT) {
        const int low = shift > 0 ? shift : 0, width = shift > 0 ? DIGIT : DIGIT + shift;
        const uint32_t mask = (1u << width) - 1;
        int64_t masses[1 << DIGIT] = {};
        for (int64_t i = 0; i < v; ++i) masses[keys[i] >> low & mask] += mass_of(keys[i]);
        // the smallest digit for which the keys with larger digits have a mass below `bound`
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

// noise = g of the BLOCK tokens in `index`
void gumbel(const uint32_t* index, float* noise, uint64_t seed, uint32_t drawn, uint64_t sequence) {
    const U32 c1 = U32{} + drawn, c2 = U32{} + uint32_t(sequence), c3 = U32{} + uint32_t(sequence >> 32);
    for (int j = 0; j < BLOCK; j += DRAWS * N) {
        U32 words[DRAWS];
        std::memcpy(words, index + j, sizeof words);
        philox(words, c1, c2, c3, seed);
        for (int n = 0; n < DRAWS; ++n) {
            const V32 drawn_v = (__builtin_convertvector(words[n], V32) + 0.5f) * 2.3283064365386963e-10f;
            const V32 v = drawn_v < 0.99999994f ? drawn_v : all(0.99999994f), u = 1.0f - v;
            store(noise + j + n * N, -log_of((v - (1.0f - u)) / u - log_of(u)));
        }
    }
}

struct Row {
    const Sample& call;
    const int64_t r, v;
    const float* l;
    const uint8_t* seen;
    const float *settings;
    float* numbers;    // y, later y of the kept tokens
    uint32_t* places;  // v keys of y, later the kept tokens; then v keys of e

    Row(const Sample& call, int64_t r)
        : call(call), r(r), v(call.v), l(reinterpret_cast<const float*>(call.logits.data) + r * call.logits.stride),
          seen(call.seen.data ? reinterpret_cast<const uint8_t*>(call.seen.data) + r * call.seen.stride : nullptr),
          settings(call.settings ? call.settings + 5 * r : nullptr),
          numbers(reinterpret_cast<float*>(call.numbers.data) + r * call.numbers.stride),
          places(reinterpret_cast<uint32_t*>(call.places.data) + r * call.places.stride) {}

    float scale() const { return float(int64_t(1) << call.mass_bits); }

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
        int64_t kept = 0;  // tokens in places, with their y in numbers
        for (int64_t i = 0; i < v; ++i) {
            const float number = y[i];
            numbers[kept] = number;
            places[kept] = uint32_t(i);
            kept += ordered(number) >= smallest_y;
        }
        const float divisor = temperature, times = scale();
        if (top_p < 1) {
            int64_t total = 0;
            uint32_t* keys = exponentials();
            in_blocks(numbers, kept, [&](int64_t i, float* e, int m) {
                for (int j = 0; j < BLOCK; j += N) store(e + j, exp_of((load(e + j) - top) / divisor));
                for (int j = 0; j < BLOCK; ++j) total += mass(e[j], times);
                std::memcpy(keys + i, e, m * sizeof(float));
            });
            const double bound = double(total) * double(top_p);
            const uint32_t key = smallest_key(keys, kept, bound, [&](uint32_t x) { return mass(bits_of<float>(x), times); });
            const float least = bits_of<float>(key);
            if (!(least < smallest_e)) smallest_e = least < 1.0f ? least : 1.0f;
        }
        float best = -INFINITE;
        int64_t token = places[0];
        in_blocks(numbers, kept, [&](int64_t i, float* z, int m) {
            float e[BLOCK], noise[BLOCK];
            uint32_t index[BLOCK] = {};
            I32 some{};
            for (int j = 0; j < BLOCK; j += N) {
                const V32 x = (load(z + j) - top) / divisor, y = exp_of(x);
                store(z + j, x);
                store(e + j, y);
                some |= (y >= smallest_e) & (x + MOST_NOISE > best);
            }
            if (!any<float>(some)) return;
            std::memcpy(index, places + i, m * sizeof(uint32_t));
            gumbel(index, noise, uint64_t(call.seeds[r]), uint32_t(call.drawn[r]), uint64_t(call.sequences[r]));
            for (int j = 0; j < m; ++j)
                if (e[j] >= smallest_e && z[j] + noise[j] > best) best = z[j] + noise[j], token = index[j];
        });
        return token;
    }

    uint32_t* exponentials() const { return places + v; }

    void run() {
        int64_t& token = call.tokens[r];
        float& logprob = call.logprobs[r];
        if (settings && call.drawn[r] < 0) return;
        if (!settings && token < 0) {
            logprob = 0.0f;
            return;
        }
        const Range range = range_of(l, v);
        if (!range.finite) {
            logprob = settings ? 0.0f : __builtin_nanf("");
            if (settings) token = -1;
            return;
        }
        if (settings) {
            token = draw(range.top);
            if (seen) const_cast<uint8_t*>(seen)[token] = 1;
        }
        const double total = log_of(double(total_mass(l, v, range.top, scale())) / double(int64_t(1) << call.mass_bits));
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
