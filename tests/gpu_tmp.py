import os, sys, time, traceback
sys.path[:0]=["src","tests"]
import torch
from dataclasses import replace
from cases import Case, build, oracle, run, whole_matrices
from tolerance import assert_no_worse
B=Case(device="cuda", dtype=torch.bfloat16, d=64, dv=64, tq=300, tk=300)
cs=dict(plain=B, causal=replace(B,causal=True), fp16=replace(B,causal=True,dtype=torch.float16), fp32=replace(B,causal=True,dtype=torch.float32),
 gqa=replace(B,group=3,causal=True), softcap=replace(B,softcap=2.0), bias=replace(B,bias="bhqk"), bias2=replace(B,bias="hk"), bias3=replace(B,bias="qk",bias_dtype=torch.bfloat16),bias4=replace(B,bias="h"),boolb=replace(B,bias="BK"), alibi=replace(B,alibi="bh"), sinks=replace(B,sinks=True,dlse=True),
 drop=replace(B,dropout_p=0.25,causal=True), win=replace(B,window=(90,30),tq=411,tk=500), varlen=replace(B,lengths=((50,90),(0,30),(400,333),(70,0),(1,1)),causal=True,group=2), neg=replace(B,scale=-0.3,causal=True), zero=replace(B,scale=0.0,causal=True),
 ragd=replace(B,d=40,dv=5,layout="fused"), d97=replace(B,d=97,dv=97,layout="bthd"), d128=replace(B,d=128,dv=128,causal=True), d256=replace(B,d=256,dv=256,causal=True), d256f=replace(B,d=256,dv=64,dtype=torch.float32), d1=replace(B,d=1,dv=1),
 split=replace(B,b=1,hkv=1,group=4,tq=3,tk=5000,causal=True,sinks=True,dropout_p=.25), none=replace(B,tk=0,sinks=True,dlse=True), empty=replace(B,tq=500,tk=200,causal=True,dlse=True), all=replace(B,causal=True,window=(77,3),softcap=3.0,bias="hk",alibi="bh",sinks=True,dropout_p=.2,dlse=True,group=2,dtype=torch.float32))
bad=0
for n,c in cs.items():
    t=time.time(); call=build(c)
    try:
        got=run(call,"triton"); torch.cuda.synchronize()
        assert_no_worse(got,oracle(call),whole_matrices(call),c.dtype); r="ok"
        again=run(call,"triton"); assert all(torch.equal(got[k],again[k]) for k in got), "not bit-equal"
    except AssertionError as e: r="BAD "+str(e); bad+=1
    except Exception as e: r="ERR "+type(e).__name__+" "+str(e)[-400:]; bad+=1
    print(n, r, f"{time.time()-t:.1f}s", flush=True)
print("BAD", bad, flush=True)
