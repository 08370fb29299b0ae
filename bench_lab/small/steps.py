"""Steps of nano with 64 adapters over N slots: how many of which kind, and how long, with and without."""
import sys, time, tempfile, statistics, os
from collections import defaultdict
from pathlib import Path
from quire.bench.engine.session import open_session
from quire.bench.engine.dummy_adapters import write_adapters
from quire.bench.engine.workloads import workload
from quire.bench.engine.timing import generate_seconds
import quire.engine.recovery as rec
slots = int(sys.argv[1])
ctx = open_session(dict(model="qwen3-8b", load_format="dummy", max_model_len=4096, enable_lora=True, max_loras=slots, max_lora_rank=16, max_cpu_loras=64))
session = ctx.__enter__(); llm = session.llm
adapters = list(write_adapters(Path(tempfile.mkdtemp()), session.source.config, 64, 16, session.dtype))
catalog = llm.engine.adapters
for s in [catalog.find(a) for a in adapters]: s.check()
log = []; host = [0.0, 0.0]
launch, finish = rec.Recovery.launch, rec.Recovery.finish
def timed_launch(self, schedule, before):
    t = time.perf_counter(); out = launch(self, schedule, before); host[0] += time.perf_counter() - t; return out
def timed_finish(self, step):
    t = time.perf_counter(); out = finish(self, step); now = time.perf_counter(); host[1] += now - t
    chunks = step.schedule.chunks
    log.append((now, now - t, len(chunks), sum(c.count if hasattr(c, "count") else c.num_tokens for c in chunks)))
    return out
rec.Recovery.launch, rec.Recovery.finish = timed_launch, timed_finish
whole = workload("nano")
def run(load, chosen):
    llm.reset_prefix_cache(); log.clear(); host[:] = [0.0, 0.0]
    a = time.perf_counter(); s = generate_seconds(llm, load.prompts, load.params, chosen)
    last = a; kinds = defaultdict(lambda: [0, 0.0, 0, 0, 0.0])
    for now, waited, seqs, tokens in log:
        rows = (seqs + 31) // 32 * 32 if tokens == seqs else -((tokens + 1023) // 1024 * 1024)
        k = kinds[rows]; k[0] += 1; k[1] += now - last; k[2] += tokens; k[3] += seqs; k[4] += waited; last = now
    print(f"{load.output_tokens / s:,.0f} tok/s, {s:.2f} s, {len(log)} steps, host in launch {host[0]:.2f}, waiting {host[1]:.2f}", flush=True)
    for r, (n, t, tok, seqs, waited) in sorted(kinds.items()):
        print(f"   {'decodes up to' if r > 0 else 'tokens up to'} {abs(r):5d}: {n:5d} steps {t:6.2f} s, {1e3*t/n:7.2f} ms each, {tok/n:7.1f} tokens, {seqs/n:6.1f} sequences, waited {1e3*waited/n:6.2f}", flush=True)
spread = [adapters[i % 64] for i in range(len(whole.prompts))]
run(whole.warm_up(), None); run(whole.warm_up(), spread[:len(whole.warm_up().prompts)])
print("without"); run(whole, None); print("with"); run(whole, spread)
os._exit(0)
