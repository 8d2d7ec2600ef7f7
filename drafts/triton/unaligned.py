import sys, multiprocessing, torch
sys.path[:0]=["src","tests"]
from concurrent.futures import ProcessPoolExecutor
from tilegrad.kernels.attention.tiles import Tile
def one(job):
    tile,(d,dv),layout,causal=job
    from tilegrad.kernels.attention import triton_attention as TA
    from cases import Case, build, run, oracle
    TA.UNALIGNED=(Tile(*tile),); TA.tiles_for=lambda *a:(Tile(*tile),)
    call=build(Case(b=1,hkv=2,tq=200,tk=270,d=d,dv=dv,dtype=torch.bfloat16,causal=causal,layout=layout,device="cuda"))
    try: got=run(call,"triton")
    except Exception as e: return job, type(e).__name__+" "+str(e)[:100]
    x=oracle(call)
    out=[]
    for n in got:
        e=(got[n].double()-x[n]).abs(); e=e.nan_to_num(9e9,9e9)
        bad=(e>0.05*x[n][x[n].isfinite()].abs().max()).nonzero()
        out.append(f"{n} {float(e.max()):.1e}" + (f" bad {len(bad)} first {bad[0].tolist()} last {bad[-1].tolist()}" if len(bad) else ""))
    return job,"; ".join(out)
if __name__=="__main__":
    jobs=[(t,dd,"bthd",c) for t in ((128,64,8,3),(64,64,4,3),(64,64,4,1)) for dd in ((97,5),(97,97),(5,5),(100,5),(97,64)) for c in (False,)]
    jobs+=[((128,128,8,2),(97,5),"bhtd",True),((64,64,4,2),(97,5),"fused",True),((64,64,4,2),(97,5),"bhtd",False)]
    with ProcessPoolExecutor(16,mp_context=multiprocessing.get_context("spawn")) as pool:
        for j,r in pool.map(one,jobs): print(j,r,flush=True)
