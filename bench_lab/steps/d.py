"""d.py MODEL batches [key=value]: ms a step: A old loads, B one kernel, C and the head in the graph; in turns."""
import os, sys, time, random
import torch
import quire.runner.graphs as g, quire.runner.runner as rr
from quire.runner.inputs import pack, packed_size
from quire.bench.engine.session import open_session
from quire import SamplingParams
MODE = "B"
new_load, new_record, new_replay, new_logits = g.StepGraphs._load, g.StepGraphs.record, g.StepGraphs.replay, rr.ModelRunner._logits
def old_load(self, shape, plan, drawn, adapted=False):
    columns = [t.block_tables.shape[1] for t in plan.tables]
    n = packed_size(*shape, columns); st = torch.empty(n, dtype=torch.int32, pin_memory=True)
    pack(plan, self.cache.layout.block_size, *shape, st.numpy()); self._packed[:n].copy_(st, non_blocking=True)
    if len(plan.fed_rows):
        c = min(len(drawn), g.MOST_DRAWN); self._drawn[:c].copy_(drawn[:c])
def load(self, *a, **k): return (old_load if MODE == "A" else new_load)(self, *a, **k)
def record(self, shapes=None):
    new_record(self, shapes)
    if shapes is not None: return
    self.heads = {}
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for shape in [s for s in self.shapes if s.is_decode and s.sequences <= 8]:
            self._load(shape, g.empty_plan(len(self._columns)), self._drawn)
            self.model.logits(self.forward(shape)); stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory, stream=stream):
                hidden = self.forward(shape); logits = self.model.logits(hidden)
            self.heads[shape] = (graph, hidden, logits)
    torch.cuda.current_stream().wait_stream(stream)
def replay(self, shape, plan, drawn, instead=None):
    self.last = None
    if MODE == "C" and shape in getattr(self, "heads", {}):
        self._load(shape, plan, drawn); graph, hidden, logits = self.heads[shape]; graph.replay(); self.last = logits; return hidden
    return new_replay(self, shape, plan, drawn, instead)
def logits(self, hidden, plan):
    last = getattr(self.graphs, "last", None) if self.graphs else None
    if last is not None and hidden is self.graphs.heads[self.graphs.shape_for(plan)][1]: return last[: len(plan.samples)]
    return new_logits(self, hidden, plan)
g.StepGraphs._load, g.StepGraphs.record, g.StepGraphs.replay, rr.ModelRunner._logits = load, record, replay, logits
model, batches = sys.argv[1], [int(b) for b in sys.argv[2].split(",")]; more = dict(a.split("=") for a in sys.argv[3:])
ctx = open_session(dict(model=model, load_format="dummy", max_model_len=4096, **more)); session = ctx.__enter__(); llm = session.llm
r = random.Random(1)
for batch in batches:
    prompts = [[r.randrange(1000, 20000) for _ in range(512)] for _ in range(batch)]
    def go(n):
        llm.reset_prefix_cache(); t = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.6)); return time.perf_counter() - t
    go(8); found = {m: [] for m in "ABC"}
    for _ in range(5):
        for MODE in "ABC" if batch <= 8 else "AB":
            a = min(go(1) for _ in range(2)); found[MODE].append((go(256) - a) / 255 * 1e3)
    print(model, more, batch, {m: [round(x, 4) for x in sorted(v)] for m, v in found.items()}, flush=True)
if "profile" in os.environ:
    for MODE in "BC":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p: go(12) if batch > 1 else go(40)
        ev = sorted((e.time_range.start, e.time_range.end, e.name) for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA)
        at = [i for i, e in enumerate(ev) if "_pick" in e[2]][-10]
        end = None
        print("MODE", MODE)
        for s, e, n in ev[at - 6 : at + 8]:
            print(f"  gap {0 if end is None else s-end:6.2f} dur {e-s:7.2f} {n[:60]}"); end = e
os._exit(0)
