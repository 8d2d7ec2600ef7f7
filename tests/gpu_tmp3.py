import sys; sys.path[:0]=["src"]
import os, time
from tilegrad.bench import attention as A
A.FLEX_LENGTHS=()
out=os.environ["OUT"]+"/bench.jsonl"
t=time.time()
A.bench_attention(device="cuda", preset="training", repeats=15, out=out); print("training", time.time()-t, flush=True)
