# which rows of v reach the output: q = 0, so o = mean over j of v[j]; v is one-hot
import sys, torch
sys.path[:0]=["src","tests"]
from tilegrad.kernels.attention import triton_attention as TA, Mask
from tilegrad.kernels.attention.tiles import Tile
tile=Tile(64,64,4,1); TA.tiles_for=lambda *a:(tile,); TA.UNALIGNED=(tile,)
d,dv,T=97,5,64
q=torch.zeros(1,1,64,d,device="cuda",dtype=torch.bfloat16); k=torch.randn_like(q); 
bad={}
for j in range(T):
    for c in range(dv):
        v=torch.zeros(1,1,T,dv,device="cuda",dtype=torch.bfloat16); v[0,0,j,c]=64
        o=torch.full((1,1,64,dv),float("nan"),device="cuda",dtype=torch.bfloat16); lse=torch.empty(1,1,64,device="cuda")
        TA.fwd(q,k,v,Mask(),o=o,lse=lse,scratch={})
        want=torch.zeros(dv,device="cuda"); want[c]=1
        if not torch.equal(o[0,0].float(),want.expand(64,dv)): bad[(j,c)]=[round(x,2) for x in o[0,0].float().unique(dim=0).flatten().tolist()][:15]
print("wrong one-hots:",len(bad),"of",T*dv); 
for key in list(bad)[:40]: print(key,bad[key])
