import sys

sys.path[:0] = ["src"]
import os
import time

from tilegrad.bench import attention as A

out = os.environ["OUT"] + "/bench.jsonl"
t = time.time()
A.FLEX_LENGTHS = ()
A.bench_attention(device="cuda", preset="training", repeats=15, out=out)
print("training", time.time() - t, flush=True)
A.FLEX_LENGTHS = (16384, 65536)
A.PRESETS["x"] = tuple(s for s in A.PRESETS["training"] if s.t == 16384)
A.peers_on = lambda d: ("flex",)
A.bench_attention(device="cuda", preset="window", repeats=15, out=out)
print("window", time.time() - t, flush=True)
A.bench_attention(device="cuda", preset="x", repeats=10, out=out)
print("flex", time.time() - t, flush=True)
