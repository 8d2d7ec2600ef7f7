import sys, time, random, itertools, multiprocessing, traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
import torch
from cases import Case, build
from tolerance import allowed_error, _error, _largest
from tilegrad.kernels.attention import reference, hopper_attention as ha
from tilegrad.kernels.attention.contract import output_shapes
from tilegrad.kernels.attention.hopper_attention import Tiling
BASE = Case(b=2, hkv=2, tq=300, tk=333, d=128, dv=128, dtype=torch.bfloat16, device="cuda")
def C(**k):
    d = k.pop("d", 128); return replace(BASE, d=d, dv=d, **k)
CASES = [C(), C(causal=True), C(d=64), C(d=64, causal=True), C(d=256), C(d=256, causal=True), C(d=96, causal=True, layout="bthd"), C(d=40, layout="fused"),
  C(group=3, causal=True, layout="fused"), C(window=(40, 7)), C(window=(100, None), tq=700, tk=700), C(causal=True, window=(200, None), tq=900, tk=900, d=64),
  C(causal=True, tq=500, tk=200), C(causal=True, tq=130, tk=900, dtype=torch.float16), C(softcap=2.0, causal=True), C(softcap=30.0, d=64, scale=-0.2), C(scale=-0.2), C(scale=0.0, causal=True),
  C(sinks=True, causal=True, tq=400, tk=250), C(lengths=((300, 300), (0, 50), (77, 500), (128, 128), (40, 0), (1, 1)), causal=True),
  C(lengths=((300, 300), (0, 50), (77, 500), (640, 128), (40, 0), (1, 1)), sinks=True, d=64, group=2), C(lengths=((1000, 1000), (200, 500)), window=(64, 0), d=256, dtype=torch.float16),
  C(d=192, group=2, sinks=True), C(d=24, causal=True, dtype=torch.float16), C(tq=1, tk=1), C(tq=2000, tk=2000, causal=True, b=3, hkv=3), C(tq=2000, tk=1100, d=64, b=4, hkv=4), C(tq=1500,tk=1500,d=256,causal=True,b=3,hkv=4)]
VAR = {64: {"3q2": Tiling(3,128,3,2), "2q2": Tiling(2,128,2,2)}, 128: {"q2": Tiling(2,128,2,2)}, 256: {"q1": Tiling(2,64,2,1)}}
ha.SHORT_COLUMNS = 0
SC={}
def fwd_check(case, seed=0):
    SC['taken']=torch.ones(1,dtype=torch.int32,device='cuda')
    call = build(case, seed)
    q,k,v,mask = call.q, call.k, call.v, call.mask
    osh, lsh = output_shapes(q, v, mask)
    o = torch.full(osh, float("nan"), dtype=q.dtype, device="cuda"); lse = torch.full(lsh, float("nan"), device="cuda")
    ha.fwd(q,k,v,mask,o=o,lse=lse,scratch=SC)
    ha.fwd(q,k,v,mask,o=o,lse=lse,scratch=SC)
    torch.cuda.synchronize()
    x = reference.forward(q.double(),k.double(),v.double(),mask); y = reference.forward(q,k,v,mask)
    largest = max(map(_largest, x)); out=[]
    for n,g,e,yy in zip(("o","lse"),(o,lse),x,y):
        if g.isnan().any(): out.append(f"{n}: {int(g.isnan().sum())} NaN of {g.numel()}"); continue
        if not torch.equal(g.isinf(), e.isinf()): out.append(f"{n}: inf differ"); continue
        er, al = _error(g,e), allowed_error(e,yy,q.dtype,largest)
        if er>al: out.append(f"{n}: {er:.2e}>{al:.2e}")
    return out
def job(a):
    kind, x = a
    try:
        if kind == "case":
            r = fwd_check(CASES[x]) + fwd_check(CASES[x], 1)
            return f"case {x} {'ok' if not r else r} " + (str(CASES[x]) if r else "")
        D, name, causal = x
        ha.TILINGS[D] = VAR[D][name]
        r = fwd_check(C(d=D, causal=causal, tq=1000, tk=1000, b=2, hkv=8))
        return f"{x} {'ok' if not r else r}"
    except Exception as e:
        return f"{a} {type(e).__name__} {str(e)[-300:]}"
def t(fns, reps=8):
    from tilegrad.bench.attention import interleaved
    ms = interleaved(fns, reps, torch.device("cuda"))
    return {n: sorted(v)[len(v)//2] for n, v in ms.items()}
if __name__ == "__main__":
    what = sys.argv[1]
    if what == "check":
        t0=time.time()
        jobs = [("case", i) for i in range(len(CASES))] + [("v", (D,n,c)) for D in VAR for n in VAR[D] for c in (False, True)]
        with ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
            for r in pool.map(job, jobs): 
                if not r.rstrip().endswith("ok"): print(r, flush=True)
        print("checked", len(jobs), "in", round(time.time()-t0), flush=True)
    if what == "time":
        import torch.nn.functional as F
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from tilegrad.kernels.attention.mask import Mask
        SC['taken']=torch.ones(1,dtype=torch.int32,device='cuda')
        sms = ha.multiprocessors(torch.device("cuda"))
        for D, causal, T in [(64,True,1024),(64,True,2048),(64,True,4096),(64,True,16384),(64,False,1024),(64,False,4096),(128,True,1024),(128,True,4096),(128,False,1024),(128,False,4096),(256,True,1024),(256,False,1024),(256,False,4096)]:
            B,H = 16384//T, 2048//D
            q,k,v = (torch.randn(B,H,T,D,device="cuda",dtype=torch.bfloat16) for _ in range(3))
            o = torch.empty_like(q); lse=torch.empty(B,H,T,device="cuda"); mask=Mask(causal=causal)
            fns = {}
            def peer(b):
                def f():
                    with sdpa_kernel(b), torch.no_grad(): F.scaled_dot_product_attention(q,k,v,is_causal=causal)
                return f
            if T==1024: fns["cudnn"]=peer(SDPBackend.CUDNN_ATTENTION)
            t0=time.time()
            def ours(tl, programs=None):
                own={}
                def f():
                    ha.TILINGS[D]=tl; ha._launches=own
                    ha.fwd(q,k,v,mask,o=o,lse=lse,scratch=SC)
                return f
            for n, tl in VAR[D].items(): fns[n]=ours(tl)
            ms = t(fns, 7)
            fl = 4.0*B*H*T*T*D*(0.5 if causal else 1)
            print(f"D{D} {'c' if causal else 'f'} {T}: " + "  ".join(f"{n} {fl/m/1e9:.0f}" for n,m in ms.items()) + f"  | {time.time()-t0:.1f} s", flush=True)
        ha._launches={}
        ha.TILINGS.update({64: VAR[64]["3q2"], 128: VAR[128]["q2"], 256: VAR[256]["q1"]})
        from tilegrad.bench.attention import PRESETS, Inputs
        for name in ("varlen", "window"):
            for shape in PRESETS[name]:
                x = Inputs(shape, torch.bfloat16, torch.device("cuda")); o=torch.empty_like(x.q); lse=torch.empty(x.q.shape[1::-1] if shape.lengths else x.q.shape[:3], device="cuda")
                fns={"3/n": lambda: ha.fwd(x.q,x.k,x.v,x.mask,o=o,lse=lse,scratch=SC)}
                ms=t(fns,5); print(shape, {n: f"{m:.3f}ms {shape.flops(False)/m/1e9:.0f}T" for n,m in ms.items()}, flush=True)
        q,k,v = (torch.randn(1,8,256,128,device="cuda",dtype=torch.bfloat16) for _ in range(3)); o=torch.empty_like(q); lse=torch.empty(1,8,256,device="cuda")
        from tilegrad.kernels.attention.contract import fwd_plan, attention_fwd
        from tilegrad.kernels.attention.checks import form_of
        mask=Mask(causal=True)
        for name, f in (("ha.fwd", lambda: ha.fwd(q,k,v,mask,o=o,lse=lse,scratch=SC)), ("fwd_plan", lambda: fwd_plan(q,k,v,mask,o,lse,"triton")), ("attention_fwd triton", lambda: attention_fwd(q,k,v,mask,o=o,lse=lse,kernel="triton")), ("form", lambda: form_of(("x",),(q,k,v,o,lse),mask)), ("descriptor", lambda: ha.tile_descriptor(q,False,64,128)), ("sizes", lambda: ha.sizes_of(q,k,v,mask))):
            f(); best=1e9
            for n in range(5):
                torch.cuda.synchronize(); t0=time.perf_counter()
                for _ in range(200): f()
                best=min(best,(time.perf_counter()-t0)/200*1e6)
            print("host us", name, round(best,1))
