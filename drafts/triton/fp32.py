import sys, multiprocessing, time
sys.path[:0]=["src","tests"]
import torch
from concurrent.futures import ProcessPoolExecutor, as_completed
import triton_on_gpu as G
from triton_specs import specs
if __name__=="__main__":
    every=specs(); nums=[n for n,s in enumerate(every) if dict(s.values)["dtype"]==torch.float32]
    b=time.time()
    with ProcessPoolExecutor(16,mp_context=multiprocessing.get_context("spawn"),max_tasks_per_child=1) as pool:
        fs=[pool.submit(G.check_spec,n,list(range(n,int(sys.argv[1]),44))) for n in sorted(nums,key=G._work,reverse=True)]
        G.report([f.result() for f in as_completed(fs)],time.time()-b)
