"""check / det / time of hopper_bwd. usage: job.py check|time ..."""
import sys, os, time, itertools, multiprocessing, traceback, random
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
import torch
from cases import Case, build, oracle, whole_matrices
from tolerance import assert_no_worse
from tilegrad.kernels.attention import hopper_bwd as H, hopper_tma
from tilegrad.kernels.attention.triton_attention import sizes_of

H.TILES0=dict(H.TILES)
def scratch_for(q, sizes, varlen, det, K=None):
    K=q if K is None else K
    out={}
    for n,(s,d) in H.workspace(q,K,sizes,varlen,det).items():
        x=torch.empty(s,dtype=d,device=q.device); out[n]=x.fill_(float("nan")) if d.is_floating_point else x.fill_(7)
    return out

def bwd(call, o, lse, det=False, scratch=None):
    q,k,v,mask=call.q,call.k,call.v,call.mask
    sizes=sizes_of(q,k,v,mask)
    nan=lambda x: torch.full_like(x,float("nan"))
    g={"dq":nan(q),"dk":nan(k),"dv":nan(v)}
    ds=None if mask.sinks is None else torch.zeros_like(mask.sinks)
    H.launch(q,k,v,o,lse,call.do,call.dlse,mask,sizes,**g,dsinks=ds,scratch=scratch or scratch_for(q,sizes,mask.varlen,det,k),deterministic=det)
    if ds is not None: g["dsinks"]=ds
    return g

def check(case, det=False, seed=0, split=False):
    H.LEAST_STEPS = 1 if split else 10**6
    H._prepared.clear()
    call=build(case,seed)
    exact,yard=oracle(call),whole_matrices(call)
    o,lse=exact["o"].to(case.dtype),exact["lse"].float()
    got=bwd(call,o,lse,det)
    torch.cuda.synchronize()
    assert_no_worse(got,{n:exact[n] for n in got},{n:yard[n] for n in got},case.dtype)
    if det:
        for _ in range(20):
            again=bwd(call,o,lse,True)
            assert all(torch.equal(got[n],again[n]) for n in ("dq","dk","dv")),"not bit-equal"

bf,hf=torch.bfloat16,torch.float16
def cases(dims):
    B=dict(device="cuda",dtype=bf)
    out=[]
    for d in dims:
        e=dict(d=d,dv=d,**B)
        out+=[(Case(b=2,hkv=2,tq=256,tk=256,**e),False),(Case(b=2,hkv=2,tq=256,tk=256,causal=True,**e),False),
          (Case(b=1,hkv=2,tq=300,tk=177,**e),False),(Case(b=2,hkv=1,tq=129,tk=333,causal=True,group=3,**e),False),
          (Case(b=1,hkv=2,tq=333,tk=129,causal=True,dlse=True,sinks=True,**e),False),
          (Case(b=2,hkv=2,tq=400,tk=400,window=(70,13),layout="fused",**{**e,"dtype":hf}),False),
          (Case(b=2,hkv=2,tq=400,tk=431,window=(90,None),layout="bthd",**e),False),
          (Case(b=1,hkv=2,tq=200,tk=300,softcap=2.0,causal=True,**{**e,"dtype":hf}),False),
          (Case(b=1,hkv=2,tq=200,tk=300,scale=-0.3,causal=True,dlse=True,**e),False),
          (Case(b=1,hkv=2,tq=150,tk=130,scale=0.0,**e),False),
          (Case(b=1,hkv=2,lengths=((5,9),(300,200),(0,7),(129,0),(1,1),(200,333)),causal=True,sinks=True,**e),False),
          (Case(b=1,hkv=2,lengths=((65,190),(256,256),(17,128)),group=2,**e),False),
          (Case(b=2,hkv=2,tq=700,tk=700,causal=True,**e),True),(Case(b=2,hkv=4,tq=700,tk=900,**e),True),
          (Case(b=2,hkv=2,tq=700,tk=700,window=(100,50),group=2,**e),True),
          (Case(b=1,hkv=2,lengths=((300,290),(256,513),(700,650)),causal=True,**e),True)]
    return out
def name(case,det):
    ref=Case()
    return " ".join(f"{f}={getattr(case,f)}" for f in case.__dataclass_fields__ if getattr(case,f)!=getattr(ref,f) and f not in("device",))+(" det" if det else "")
POISON=False
def one(args):
    global POISON
    case,det,split=args
    if POISON: return "poisoned"
    try:
        check(case,det,split=split); return None
    except Exception as e:
        if "CUDA" in str(e): POISON=True
        return f"RED {'split ' if split else ''}{name(case,det)}: {type(e).__name__} {str(e)[:160]}"
def run_checks(dims,procs=14):
    cs=[(c,d,False) for c,d in cases(dims)]+[(c,d,True) for c,d in cases([64,128,256]) if not d and (c.group>1 or c.lengths or c.window or c.softcap)]
    cs+=[(c,d,False) for c,d in cases([40,200])[::5]]
    bad=0; t=time.time()
    with ProcessPoolExecutor(procs,mp_context=multiprocessing.get_context("spawn")) as pool:
        fs=[pool.submit(one,c) for c in cs]
        for f in as_completed(fs):
            try: r=f.result()
            except Exception as e: r=f"RED pool {type(e).__name__}"
            if r: bad+=1; print(r,flush=True)
    print(f"checked {len(cs)} red {bad} in {time.time()-t:.0f}s",flush=True)

# ---- timing
def variants(d,causal):
    t=H.TILES0[H.width_of(d)]
    if d==64: return {"halves":(t,None),"whole":(t._replace(halves=False),None),"halvespin":(t._replace(pin=True),None)}
    if d==128: return {"plain":(t,None),"pin":(t._replace(pin=True),None)}
    return {"4":(t,None),"2":(t._replace(slices=2,dq_slots=1,out_slots=1),None)}
def with_variant(d,var):
    tile,span=var
    H.TILES[H.width_of(d)]=tile; H._prepared.clear()
    if span is not None: H.heads_together=span
SPAN0=H.heads_together
def problem(d,causal,T,tokens=16384,hidden=2048):
    from tilegrad import Mask
    B,Hh=max(1,tokens//T),hidden//d
    q,k,v,do=(torch.randn(B,Hh,T,d,device="cuda",dtype=bf) for _ in range(4))
    return q,k,v,do,Mask(causal=causal)
def compile_variant(a):
    d,causal,n=a
    try:
        H.heads_together=SPAN0
        with_variant(d,variants(d,causal)[n])
        q,k,v,do,mask=problem(d,causal,256,512,256)
        sizes=sizes_of(q,k,v,mask); sc=scratch_for(q,sizes,False,False)
        H.launch(q,k,v,q,torch.zeros(q.shape[:3],device="cuda"),do,None,mask,sizes,dq=q.clone(),dk=q.clone(),dv=q.clone(),dsinks=None,scratch=sc,deterministic=False)
        torch.cuda.synchronize()
    except Exception as e: return f"{a} {type(e).__name__} {str(e)[:200]}"
def bench(fn,rep=60):
    import triton
    return triton.testing.do_bench(fn,warmup=8,rep=rep,return_mode="median")
def run_time(dims,Ts,causals,which=None,breakdown=False,det=False):
    from torch.nn.attention import sdpa_kernel, SDPBackend
    import torch.nn.functional as F
    t0=time.time()
    todo=[(d,c,n) for d in dims for c in causals for n in variants(d,c) if "@" not in n and (which is None or n in which)]
    with ProcessPoolExecutor(12,mp_context=multiprocessing.get_context("spawn")) as pool:
        for r in pool.map(compile_variant,todo):
            if r: print(r,flush=True)
    print(f"compiled in {time.time()-t0:.0f}s",flush=True)
    for d,causal,T in itertools.product(dims,causals,Ts):
        q,k,v,do,mask=problem(d,causal,T)
        B,Hh=q.shape[:2]
        fl=10.0*B*Hh*T*T*d*(0.5 if causal else 1)
        qq,kk,vv=[x.detach().requires_grad_() for x in (q,k,v)]
        row=[]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): oc=F.scaled_dot_product_attention(qq,kk,vv,is_causal=causal)
        out=torch.ops.aten._scaled_dot_product_flash_attention(q,k,v,0.0,causal)
        o,lse=out[0],out[1]
        sizes=sizes_of(q,k,v,mask); sc=scratch_for(q,sizes,False,True)
        dq,dk,dv=torch.empty_like(q),torch.empty_like(k),torch.empty_like(v)
        def go(det=False): H.launch(q,k,v,o,lse,do,None,mask,sizes,dq=dq,dk=dk,dv=dv,dsinks=None,scratch=sc,deterministic=det)
        fns={"cudnn":(lambda: torch.autograd.grad(oc,(qq,kk,vv),do,retain_graph=True),None)}
        for n,var in variants(d,causal).items():
            if which is None or n in which: fns[n]=(go,var)
        times={n:[] for n in fns}
        for _ in range(3):
            for n,(f,var) in list(fns.items()):
                H.heads_together=SPAN0
                if var: with_variant(d,var)
                try: times[n].append(bench(f,rep=25))
                except Exception as e: row.append(f"{n} ERR {str(e)[:60]}"); del fns[n]
        med={n:sorted(t)[len(t)//2] for n,t in times.items() if t}
        cud=med["cudnn"]
        row+= [f"{n} {fl/t/1e9:.0f}" for n,t in med.items()]
        best=max(cud/t for n,t in med.items() if n!="cudnn")
        H.heads_together=SPAN0; with_variant(d,next(iter(variants(d,causal).values())))
        if breakdown:
            continue
            kl=H.kernel_launch
            for nm in ("_hopper_rows_kernel","_hopper_bwd_kernel","_hopper_dq_kernel"):
                H.kernel_launch=lambda kern,*a: kl(kern,*a) if kern.__name__==nm else None
                row.append(f"{nm.split('_')[2]} {bench(go)*1e3:.0f}us")
            H.kernel_launch=kl
        if det:
            try: row.append(f"det {fl/bench(lambda: go(True))/1e9:.0f}")
            except Exception as e: row.append("det ERR "+str(e)[:50])
        print(f"D{d} {'c' if causal else 'f'} {T}: "+"  ".join(row)+f" | {best:.3f}",flush=True)
        del oc,out
if __name__=="__main__":
    if sys.argv[1]=="check": run_checks([int(x) for x in sys.argv[2].split(',')])
    if sys.argv[1]=="time":
        run_time([int(x) for x in sys.argv[2].split(',')],[int(x) for x in sys.argv[3].split(',')],[bool(int(x)) for x in sys.argv[4].split(',')])
    if sys.argv[1]=="host":
        q,k,v,do,mask=problem(128,True,1024); sizes=sizes_of(q,k,v,mask); sc=scratch_for(q,sizes,False,False); lse=torch.zeros(q.shape[:3],device="cuda")
        f=lambda: H.launch(q,k,v,q,lse,do,None,mask,sizes,dq=q,dk=k,dv=v,dsinks=None,scratch=sc,deterministic=False)
        f(); torch.cuda.synchronize()
        o=torch.randn_like(q); lse=torch.full(q.shape[:3],8.0,device="cuda"); A=[torch.full_like(q,float("nan")) for _ in range(3)]
        H.launch(q,k,v,o,lse,do,None,mask,sizes,dq=A[0],dk=A[1],dv=A[2],dsinks=None,scratch=sc,deterministic=False)
        for drop in range(3):
            Bq=[torch.full_like(q,float("nan")) for _ in range(3)]; args={n:(None if i==drop else Bq[i]) for i,n in enumerate(("dq","dk","dv"))}
            H.launch(q,k,v,o,lse,do,None,mask,sizes,**args,dsinks=None,scratch=sc,deterministic=False); torch.cuda.synchronize()
            print("without",drop,[float((a-b).abs().max()) for i,(a,b) in enumerate(zip(A,Bq)) if i!=drop])
        for _ in range(3):
            t=time.perf_counter(); [f() for _ in range(50)]; t=time.perf_counter()-t; torch.cuda.synchronize(); print(f"host {t/50*1e6:.1f} us")
