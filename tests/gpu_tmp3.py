import sys; sys.path[:0]=["src"]
import os, time
from tilegrad.bench import attention as A
from tilegrad.kernels.attention import tiles
from tilegrad.kernels.attention.tiles import Tile
import torch
out=os.environ["OUT"]+"/bench.jsonl"
t=time.time()
dev=torch.device("cuda")
w=A.PRESETS["window"][0]
def ms(shape):
    i=A.Inputs(shape,torch.bfloat16,dev); f,b,_=i.ours("triton"); f(); b()
    r=A.interleaved({"f":f,"b":b},8,dev); return {k:round(sorted(v)[4],3) for k,v in r.items()}
c16=[s for s in A.PRESETS["training"] if s.t in (2048,16384)]
for d,band,opts in ((128,True,{"dkdv":((64,128,8,2),(64,128,8,3),(64,64,4,2),(32,64,4,2)),"dq":((128,64,8,3),(64,64,4,2),(64,64,4,3))}),(128,False,{"dkdv":((64,128,8,2),(64,128,8,3),(64,64,4,2))}),(64,True,{"dkdv":((64,64,4,3),(128,64,4,2),(64,128,8,3))}),(64,False,{"dkdv":((64,128,8,3),(128,64,4,2),(128,128,8,2))})):
    key=(90,16,d,band); base=tiles.row(*key)
    for kern,ts in opts.items():
        for x in ts:
            tiles.set_row(key, base._replace(**{kern:Tile(*x)}))
            print(key,kern,x,[(str(s),ms(s)["b"]) for s in ([w] if d==128 and band else [])+[s for s in c16 if s.d==d and s.causal==band]],flush=True)
    tiles.set_row(key,base)
print("tiles",time.time()-t,flush=True)
A.FLEX_LENGTHS=(16384,65536)
A.PRESETS["x"]=(w,)+tuple(s for s in A.PRESETS["training"] if s.t==16384 and s.causal)
A.peers_on=lambda d: ("flex",)
A.bench_attention(device="cuda", preset="x", repeats=8, out=out); print("flex", time.time()-t, flush=True)
