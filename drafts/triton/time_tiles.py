import sys, os, multiprocessing, time, torch
from concurrent.futures import ProcessPoolExecutor
from statistics import median
sys.path[:0]=["src","tests"]
from tilegrad.bench.attention import Inputs, Shape, interleaved
from tilegrad.kernels.attention.tiles import Tile
def thunk(inputs, kernel, tile, out):
    from tilegrad.kernels.attention import triton_attention as TA
    q,k,v,mask=inputs.q,inputs.k,inputs.v,inputs.mask
    own=TA.tiles_for
    def run():
        TA.tiles_for=lambda *a:(tile,)
        try:
            if kernel=="fwd": TA.fwd(q,k,v,mask,o=out["o"],lse=out["lse"],scratch={})
            else:
                w={n:(out[n] if n in kernel else None) for n in ("dq","dk","dv")} if kernel!="dkdv" else {"dq":None,"dk":out["dk"],"dv":out["dv"]}
                TA.bwd(q,k,v,out["o"],out["lse"],inputs.do,None,mask,**w,dbias=None,dsinks=None,scratch=out["scratch"],deterministic=True)
        finally: TA.tiles_for=own
    return run
def prepare(inputs):
    f,b,out=inputs.ours("triton")
    q=inputs.q
    out["scratch"]={n:torch.empty(s,dtype=torch.float32,device=q.device) for n,s in (("delta",q.shape[:3]),("lse2",q.shape[:3]))}
    f(); return out
def compile_one(job):
    (d,causal,dt,kernel,tile)=job
    from tilegrad.kernels.attention import triton_attention as TA
    inputs=Inputs(Shape(1,1,256,d,causal),getattr(torch,dt),torch.device("cuda"))
    q=inputs.q
    out={n:torch.zeros_like(q) for n in ("o","dq","dk","dv")}|{"lse":torch.zeros(q.shape[:3],device="cuda")}
    out["scratch"]={n:torch.zeros(q.shape[:3],device="cuda") for n in ("delta","lse2")}
    try:
        thunk(inputs,kernel,Tile(*tile),out)(); torch.cuda.synchronize()
        fit=[f for f in TA.fits.values()][-1]
        return (fit.compiled.n_spills,fit.compiled.n_regs,"")
    except Exception as e: return (0,0,type(e).__name__+str(e)[:80])
def main(jobs, tokens, hidden, T, reps):
    ctx=multiprocessing.get_context("spawn")
    began=time.time()
    with ProcessPoolExecutor(16,mp_context=ctx) as pool: info=dict(zip(jobs,pool.map(compile_one,jobs)))
    print(f"compiled {len(jobs)} in {time.time()-began:.0f} s",flush=True)
    groups={}
    for j in jobs: groups.setdefault(j[:3],{}).setdefault(j[3],[]).append(j)
    dev=torch.device("cuda")
    for (d,causal,dt),kernels in groups.items():
        shape=Shape(tokens//T,hidden//d,T,d,causal); inputs=Inputs(shape,getattr(torch,dt),dev); out=prepare(inputs)
        for kernel,js in kernels.items():
            th={}
            for j in js:
                if info[j][2]: print(d,causal,dt,kernel,j[4],info[j][2]); continue
                th[str(j[4])]=thunk(inputs,kernel,Tile(*j[4]),out)
            if not th: continue
            ms={n:median(x) for n,x in interleaved(th,reps,dev).items()}
            pr={"fwd":2,"dkdv":4,"dq":3,"dk":3,"dv":2}[kernel]*shape.flops(False)/2
            print(d,"causal" if causal else "full",dt,kernel," ".join(f"{n.replace(' ','')}:{m:.3f}ms/{pr/m/1e9:.0f}T/sp{info[[j for j in js if str(j[4])==n][0]][0]}" for n,m in sorted(ms.items(),key=lambda x:x[1])),flush=True)
        del inputs,out; torch.cuda.empty_cache()
BF=[]
for c in (True,False):
    BF+=[(64,c,"bfloat16","dkdv",t) for t in ((64,64,4,3),(64,64,4,2),(128,64,4,2))]
    BF+=[(128,c,"bfloat16","dkdv",t) for t in ((64,64,4,2),(64,128,8,3),(64,128,8,2))]
    BF+=[(256,c,"bfloat16","dkdv",t) for t in ((64,64,8,2),(32,32,4,2))]
    BF+=[(256,c,"bfloat16","dk",t) for t in ((32,128,8,3),(64,128,8,1))]
    BF+=[(256,c,"bfloat16","dv",t) for t in ((64,128,8,2),(32,128,8,3))]
    BF+=[(256,c,"bfloat16","dq",t) for t in ((128,32,8,3),(128,32,8,2),(64,64,8,2))]
FP=[]
FT={(64,"fwd"):((32,32,8,1),(64,32,8,1),(16,32,4,1)),(64,"dkdv"):((32,32,8,1),(64,32,8,1),(16,32,8,1)),(64,"dq"):((32,32,8,1),(64,32,8,1),(32,16,4,1)),
    (128,"fwd"):((32,32,8,1),(32,16,8,1),(16,32,8,1)),(128,"dkdv"):((32,32,8,1),(16,32,8,1),(32,16,4,1)),(128,"dq"):((32,32,8,1),(32,16,8,1),(16,32,8,1)),
    (256,"fwd"):((32,16,8,1),(16,32,8,1),(16,16,4,1)),(256,"dkdv"):((16,16,8,1),(16,32,8,1),(32,16,8,1)),(256,"dq"):((32,16,8,1),(16,32,8,1),(16,16,8,1))}
for (d,k),ts in FT.items(): FP+=[(d,True,"float32",k,t) for t in ts]
if __name__=="__main__":
    if sys.argv[1]=="bf": main(BF,16384,2048,4096,8)
    if sys.argv[1]=="fp": main(FP,4096,2048,2048,4)
