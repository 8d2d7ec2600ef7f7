// The native kernel without Python: random calls of every feature in buffers of exactly their size, against whole matrices
// in double. It is built with sanitizers and run under valgrind by test_native.py, and under emulators by hand.
//
//   native_driver [isa …]     default: every instruction set of this machine

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention/call.h"

using tilegrad::Call;
using tilegrad::View;

extern "C" {
int64_t tilegrad_native_supported();
int64_t tilegrad_native_scratch(const Call*, int64_t backward);
void tilegrad_native_run(const Call*, int64_t backward);
}

namespace {

std::mt19937 generator(1);

double normal() { return std::normal_distribution<double>()(generator); }
int64_t pick(std::vector<int64_t> from) { return from[generator() % from.size()]; }

uint16_t to_bfloat16(double x) {
    float f = float(x);
    uint32_t u;
    memcpy(&u, &f, 4);
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

double from_bfloat16(uint16_t h) {
    uint32_t u = uint32_t(h) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// (B, H, T, D), or (B, T, H, D) in memory; sized to the byte.
struct Tensor {
    int64_t b, h, t, d, dtype, size;
    bool by_token;
    std::unique_ptr<char[]> data;

    Tensor(int64_t b, int64_t h, int64_t t, int64_t d, int64_t dtype, bool by_token, bool random)
        : b(b), h(h), t(t), d(d), dtype(dtype), size(dtype == tilegrad::FLOAT64 ? 8 : dtype == tilegrad::FLOAT32 ? 4 : 2),
          by_token(by_token), data(new char[size_t(b * h * t * d * size)]) {
        for (int64_t i = 0; i < b * h * t * d; ++i) put(i, random ? normal() : std::nan(""));
    }

    View view() { return {data.get(), h * t * d, by_token ? d : t * d, by_token ? h * d : d, 1}; }
    int64_t index(int64_t x, int64_t y, int64_t z, int64_t w) { View v = view(); return x * v.b + y * v.h + z * v.t + w; }

    double get(int64_t i) const {
        if (dtype == tilegrad::FLOAT64) return reinterpret_cast<double*>(data.get())[i];
        if (dtype == tilegrad::FLOAT32) return reinterpret_cast<float*>(data.get())[i];
        return from_bfloat16(reinterpret_cast<uint16_t*>(data.get())[i]);
    }

    void put(int64_t i, double x) {
        if (dtype == tilegrad::FLOAT64) reinterpret_cast<double*>(data.get())[i] = x;
        else if (dtype == tilegrad::FLOAT32) reinterpret_cast<float*>(data.get())[i] = float(x);
        else reinterpret_cast<uint16_t*>(data.get())[i] = to_bfloat16(x);
    }

    double at(int64_t x, int64_t y, int64_t z, int64_t w) { return get(index(x, y, z, w)); }
};

// Philox4×32-10 of kernels/philox.py, number by number.
uint32_t philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t seed) {
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
        const uint64_t x = uint64_t(c0) * 0xD2511F53, y = uint64_t(c2) * 0xCD9E8D57;
        c0 = uint32_t(y >> 32) ^ c1 ^ k0, c1 = uint32_t(y), c2 = uint32_t(x >> 32) ^ c3 ^ k1, c3 = uint32_t(x);
    }
    return c0;
}

// A bias whose sizes are 1 where it is broadcast.
View broadcast(Tensor& x) {
    View v = x.view();
    return {v.data, x.b == 1 ? 0 : v.b, x.h == 1 ? 0 : v.h, x.t == 1 ? 0 : v.t, x.d == 1 ? 0 : v.d};
}

int64_t at(const View& v, int64_t b, int64_t h, int64_t t, int64_t d) { return b * v.b + h * v.h + t * v.t + d * v.d; }

struct Error {
    double worst = 0, largest = 1e-3;
    void see(double got, double want) {
        if (std::isinf(want) && got == want) return;
        double e = std::fabs(got - want);
        if (!(e <= worst)) worst = std::isnan(e) ? std::numeric_limits<double>::infinity() : e;
        if (std::fabs(want) > largest) largest = std::fabs(want);
    }
};

bool check(int64_t isa, int number) {
    const int64_t dtype = pick({tilegrad::FLOAT32, tilegrad::FLOAT32, tilegrad::BFLOAT16, tilegrad::FLOAT64});
    const int64_t b = pick({1, 2}), hkv = pick({1, 2}), group = pick({1, 1, 2, 3}), hq = hkv * group;
    const int64_t tq = pick({0, 1, 2, 17, 33, 64, 65, 130}), tk = pick({0, 1, 5, 16, 31, 64, 113, 200});
    const int64_t d = pick({1, 3, 8, 32, 40, 64, 97, 128, 300}), dv = pick({d, d, 5, 24, 64});
    const bool by_token = generator() % 2, causal = generator() % 2, has_sinks = generator() % 2, has_dlse = generator() % 2;
    const int64_t statistic = dtype == tilegrad::FLOAT64 ? tilegrad::FLOAT64 : tilegrad::FLOAT32;
    Tensor q(b, hq, tq, d, dtype, by_token, true), k(b, hkv, tk, d, dtype, by_token, true), v(b, hkv, tk, dv, dtype, by_token, true);
    Tensor o(b, hq, tq, dv, dtype, by_token, false), g(b, hq, tq, dv, dtype, by_token, true);
    Tensor lse(b, hq, tq, 1, statistic, false, false), dlse(b, hq, tq, 1, statistic, false, true);
    Tensor dq(b, hq, tq, d, dtype, by_token, false), dk(b, hkv, tk, d, dtype, by_token, false), dvt(b, hkv, tk, dv, dtype, by_token, false);
    Tensor sinks(1, hq, 1, 1, statistic, false, true), slopes(b, hq, 1, 1, tilegrad::FLOAT32, false, true);
    Tensor dsinks(1, hq, 1, 1, statistic, false, false);
    for (int64_t h = 0; h < hq; ++h) dsinks.put(h, 0);

    Call call{};
    call.dtype = dtype; call.b = b; call.hq = hq; call.hkv = hkv; call.tq = tq; call.tk = tk; call.d = d; call.dv = dv;
    call.left = pick({-1, -1, 0, 3, 40}); call.right = causal ? 0 : pick({-1, -1, 2, 50});
    call.threads = pick({1, 2, 3}); call.isa = isa; call.sinks_dtype = statistic;
    call.scale = 1 / std::sqrt(double(d)); call.softcap = double(pick({0, 0, 2}));
    call.q = q.view(); call.k = k.view(); call.v = v.view(); call.o = o.view(); call.lse = lse.view();
    call.do_ = g.view(); call.dq = dq.view(); call.dk = dk.view(); call.dv_ = dvt.view();
    if (has_dlse) call.dlse = dlse.view();
    if (has_sinks) { call.sinks = sinks.view(); call.dsinks = dsinks.view(); }
    if (generator() % 3 == 0) call.slopes = slopes.view();
    // A float bias with its gradient, in every form, or a bool bias: bytes, about a fifth of them 0.
    const int64_t kind = pick({0, 0, 1, 2}), form = kind ? int64_t(generator() % 16) : 0;
    const int64_t bb = form & 1 ? b : 1, bh = form & 2 ? hq : 1, bq = form & 4 ? tq : 1, bk = form & 8 ? tk : 1;
    Tensor bias(bb, bh, bq, bk, statistic, false, true), dbias(bb, bh, bq, bk, statistic, false, true);
    std::vector<char> attends(size_t(bb * bh * bq * bk));
    for (size_t n = 0; n < attends.size(); ++n) {
        attends[n] = generator() % 5 != 0;
        dbias.put(int64_t(n), 0);
        if (generator() % 7 == 0) bias.put(int64_t(n), -std::numeric_limits<double>::infinity());
    }
    call.bias_dtype = kind == 0 ? tilegrad::NONE : kind == 1 ? statistic : int64_t(tilegrad::BOOL);
    call.dbias_dtype = statistic;
    call.dkv_dtype = call.dtype;
    if (kind) call.bias = broadcast(bias);
    if (kind == 1) call.dbias = broadcast(dbias);
    if (kind == 2) call.bias.data = attends.data();
    // One or two intervals of rows for each column. Most columns repeat the previous one, so that tiles are masked out.
    const int64_t runs = pick({0, 0, 1, 2}), ib = pick({1, b}), ih = pick({1, hkv});
    std::vector<int32_t> intervals(size_t(ib * ih * tk * 2 * runs));
    for (size_t n = 0; n < intervals.size(); n += 2) {
        const size_t before = size_t(2 * runs);
        if (n >= before && generator() % 9) {
            intervals[n] = intervals[n - before];
            intervals[n + 1] = intervals[n + 1 - before];
        } else {
            intervals[n] = int32_t(generator() % (tq + 1));
            intervals[n + 1] = intervals[n] + int32_t(generator() % (tq + 1 - intervals[n]));
        }
    }
    const View of_columns{reinterpret_cast<char*>(intervals.data()), ib == 1 ? 0 : ih * tk * 2 * runs, ih == 1 ? 0 : tk * 2 * runs, 2 * runs, 1};
    if (!intervals.empty()) call.intervals = of_columns;
    call.dropout_p = double(pick({0, 0, 1})) / 4;
    call.dropout_threshold = int64_t(call.dropout_p * 4294967296.0);
    call.seed = int64_t(0x123456789abcdef0);
    for (int64_t backward = 0; backward < 2; ++backward) {
        call.scratch_bytes = tilegrad_native_scratch(&call, backward);
        std::unique_ptr<char, void (*)(void*)> scratch(
            static_cast<char*>(std::aligned_alloc(64, size_t(call.scratch_bytes + 63) / 64 * 64)), std::free);
        call.scratch = scratch.get();
        tilegrad_native_run(&call, backward);
    }

    Error eo, el, edq, edk, edv, es, eb;
    std::vector<double> wdb(attends.size());
    std::vector<double> wdk(b * hkv * tk * d), wdv(b * hkv * tk * dv), wds(hq);
    for (int64_t x = 0; x < b; ++x)
        for (int64_t h = 0; h < hq; ++h)
            for (int64_t i = 0; i < tq; ++i) {
                const int64_t kv = h / group;
                std::vector<double> s(tk), slope(tk, 1.0), keep(tk, 1.0), wo(dv), wdq(d);
                double sum = has_sinks ? std::exp(sinks.get(h)) : 0;
                for (int64_t j = 0; j < tk; ++j) {
                    const int64_t distance = i + tk - tq - j;
                    double y = 0;
                    for (int64_t e = 0; e < d; ++e) y += q.at(x, h, i, e) * k.at(x, kv, j, e);
                    y *= call.scale;
                    if (call.softcap != 0) { double t = std::tanh(y / call.softcap); slope[j] = 1 - t * t; y = call.softcap * t; }
                    if (kind == 1) y += bias.get(at(call.bias, x, h, i, j));
                    if (call.slopes.data) y -= slopes.at(x, h, 0, 0) * double(std::labs(distance));
                    if (call.dropout_p > 0) {
                        const uint32_t word = philox(uint32_t(j), uint32_t(i), uint32_t(h), uint32_t(x), uint64_t(call.seed));
                        keep[j] = word < call.dropout_threshold ? 0 : 1 / (1 - call.dropout_p);
                    }
                    const bool seen = (kind != 2 || attends[at(call.bias, x, h, i, j)]) && (call.left < 0 || distance <= call.left) && (call.right < 0 || distance >= -call.right);
                    bool masked = false;
                    for (int64_t n = 0; call.intervals.data && n < runs; ++n) {
                        const int32_t* run = intervals.data() + at(call.intervals, x, kv, j, 2 * n);
                        masked |= run[0] <= i && i < run[1];
                    }
                    s[j] = seen && !masked ? std::exp(y) : 0;
                    sum += s[j];
                }
                double delta = has_dlse && sum > 0 ? -dlse.at(x, h, i, 0) : 0;
                for (int64_t j = 0; j < tk; ++j) {
                    if (sum > 0) s[j] /= sum;
                    for (int64_t e = 0; e < dv; ++e) wo[e] += s[j] * keep[j] * v.at(x, kv, j, e);
                }
                for (int64_t e = 0; e < dv; ++e) { eo.see(o.at(x, h, i, e), wo[e]); delta += wo[e] * g.at(x, h, i, e); }
                el.see(lse.at(x, h, i, 0), std::log(sum));
                for (int64_t j = 0; j < tk; ++j) {
                    double dp = 0;
                    for (int64_t e = 0; e < dv; ++e) {
                        dp += keep[j] * g.at(x, h, i, e) * v.at(x, kv, j, e);
                        wdv[((x * hkv + kv) * tk + j) * dv + e] += s[j] * keep[j] * g.at(x, h, i, e);
                    }
                    if (kind == 1) wdb[at(call.bias, x, h, i, j)] += s[j] * (dp - delta);
                    const double ds = s[j] * (dp - delta) * slope[j] * call.scale;
                    for (int64_t e = 0; e < d; ++e) {
                        wdq[e] += ds * k.at(x, kv, j, e);
                        wdk[((x * hkv + kv) * tk + j) * d + e] += ds * q.at(x, h, i, e);
                    }
                }
                if (has_sinks) wds[h] -= std::exp(sinks.get(h)) / sum * delta;
                for (int64_t e = 0; e < d; ++e) edq.see(dq.at(x, h, i, e), wdq[e]);
            }
    for (int64_t x = 0; x < b; ++x)
        for (int64_t h = 0; h < hkv; ++h)
            for (int64_t j = 0; j < tk; ++j) {
                for (int64_t e = 0; e < d; ++e) edk.see(dk.at(x, h, j, e), wdk[((x * hkv + h) * tk + j) * d + e]);
                for (int64_t e = 0; e < dv; ++e) edv.see(dvt.at(x, h, j, e), wdv[((x * hkv + h) * tk + j) * dv + e]);
            }
    if (has_sinks) for (int64_t h = 0; h < hq; ++h) es.see(dsinks.get(h), wds[h]);

    for (size_t n = 0; kind == 1 && n < attends.size(); ++n) eb.see(dbias.get(int64_t(n)), wdb[n]);

    double largest = 0;
    for (const Error& e : {eo, el, edq, edk, edv, es, eb}) largest = std::max(largest, e.largest);
    const double allowed = (dtype == tilegrad::FLOAT64 ? 1e-12 : dtype == tilegrad::FLOAT32 ? 2e-5 : 6e-2) * largest;
    bool good = true;
    const char* names[] = {"o", "lse", "dq", "dk", "dv", "dsinks", "dbias"};
    int n = 0;
    for (const Error& e : {eo, el, edq, edk, edv, es, eb}) {
        if (!(e.worst <= allowed)) {
            std::printf("call %d isa %ld dtype %ld b %ld hq %ld hkv %ld tq %ld tk %ld d %ld dv %ld left %ld right %ld cap %g sinks %d alibi %d"
                        " bias %ld form %ld intervals %ld dropout %g threads %ld: %s is off by %g of %g\n", number, long(isa), long(dtype), long(b), long(hq), long(hkv), long(tq),
                        long(tk), long(d), long(dv), long(call.left), long(call.right), call.softcap, has_sinks,
                        call.slopes.data != nullptr, long(kind), long(form), long(runs), call.dropout_p, long(call.threads), names[n], e.worst, largest);
            good = false;
        }
        ++n;
    }
    return good;
}

}  // namespace

int main(int argc, char** argv) {
    const std::vector<std::string> names = {"portable", "avx2", "avx512", "amx"};
    const char* count = std::getenv("CALLS");
    const int calls = count ? std::atoi(count) : 60;
    int bad = 0, ran = 0;
    for (int64_t isa = 0; isa < 4; ++isa) {
        bool asked = argc == 1;
        for (int n = 1; n < argc; ++n) asked |= names[isa] == argv[n];
        if (!asked || !(tilegrad_native_supported() >> isa & 1)) continue;
        generator.seed(1);
        for (int n = 0; n < calls; ++n, ++ran) bad += !check(isa, n);
    }
    std::printf("%d calls, %d wrong\n", ran, bad);
    return bad || !ran;
}
