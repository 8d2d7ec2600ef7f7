import random
import sys
import time

sys.path[:0] = ["src", "tests"]
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch
from cases import build, oracle, run, whole_matrices
from tolerance import assert_no_worse
from triton_specs import specs


def comp(n):
    try:
        from test_triton import compile_spec

        compile_spec(n)
        return ""
    except Exception as e:
        return f"{n} {type(e).__name__} {str(e)[-600:]}"


if __name__ == "__main__":
    t = time.time()
    every = specs()
    from cases import Case

    case = Case(
        tq=300,
        tk=400,
        d=64,
        dv=64,
        group=2,
        causal=True,
        bias="hk",
        sinks=True,
        dropout_p=0.2,
        dlse=True,
        dtype=torch.bfloat16,
        device="cuda",
    )
    with ProcessPoolExecutor(16, mp_context=multiprocessing.get_context("spawn")) as pool:
        errs = [e for e in pool.map(comp, range(len(every))) if e]
    print("compiled", len(every), time.time() - t, "errors", len(errs))
    [print(e) for e in errs[:6]]
    bad = 0
    N = int(sys.argv[1])
    t = time.time()
    n = 0
    while n < N and time.time() - t < float(sys.argv[2]):
        sp = every[n % len(every)]
        c = sp.case(random.Random(n), "cuda")
        try:
            call = build(c, n)
            assert_no_worse(run(call, "triton"), oracle(call), whole_matrices(call), c.dtype)
        except AssertionError as e:
            bad += 1
            if bad < 12:
                print("BAD", n, str(e), c)
        except Exception as e:
            bad += 1
            if bad < 12:
                print("ERR", n, type(e).__name__, str(e)[-300:], c)
        n += 1
    from tilegrad.kernels.attention import triton_attention as ta

    print(
        "shapes",
        n,
        "bad",
        bad,
        "specialisations of the forward",
        sum(f.kernel in ("fwd", "decode") for f in ta.fits.values()),
        time.time() - t,
        flush=True,
    )
    call = build(case)
    first = run(call, "triton", deterministic=True)
    t = time.time()
    eq = all(
        all(torch.equal(first[k], x) for k, x in run(call, "triton", deterministic=True).items()) for _ in range(200)
    )
    print("200 repeats bit-equal", eq, time.time() - t, flush=True)
    try:
        from test_triton import test_more_than_2_to_the_31_elements as big

        t = time.time()
        big()
        print("2^31 ok", time.time() - t)
    except Exception as e:
        print("2^31", type(e).__name__, str(e)[-300:])
