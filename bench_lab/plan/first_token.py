"""Where the time to the first token goes, tiers off and on: medians of stages, in ms."""
import json, random, statistics, subprocess, sys, time

def arm(host):
    from quire import LLM, SamplingParams
    from quire.engine.engine import Engine
    stamps = []
    def timed(owner, name, label):
        original = getattr(owner, name)
        def run(*a, **k):
            t = time.perf_counter(); out = original(*a, **k); stamps.append((label, t, time.perf_counter())); return out
        setattr(owner, name, run)
    extra = {"host_cache_bytes": "8GiB"} if host else {}
    llm = LLM("qwen3-8b", load_format="dummy", max_model_len=4096, num_blocks=4000, **extra)
    import quire.engine.schedule.scheduler as s, quire.engine.recovery as rec, quire.engine.commit as com
    import quire.engine.schedule.tiering as tier
    timed(s.Scheduler, "plan", "plan"); timed(rec.Recovery, "launch", "launch"); timed(rec.Recovery, "finish", "finish")
    timed(com.Commit, "step", "commit"); timed(Engine, "advance", "advance")
    timed(tier.ChainTiering if hasattr(tier, "ChainTiering") else tier.Tiering, "tell_uses", "tell_uses")
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    print("ready", flush=True)
    for line in sys.stdin:
        r = random.Random(int(line)); prompt = [r.randint(0, 10000) for _ in range(512)]
        llm.reset_prefix_cache(); time.sleep(0.05); stamps.clear()
        t = time.perf_counter(); llm.generate([prompt], [params], use_tqdm=False); e = time.perf_counter()
        found = {"total": e - t}
        for label, a, b in stamps:
            found[label] = found.get(label, 0) + b - a
            found["n " + label] = found.get("n " + label, 0) + 1
        first = min(a for l, a, b in stamps if l == "advance"); last = max(b for l, a, b in stamps if l == "advance")
        found["before advance"] = first - t; found["after advance"] = e - last
        print(json.dumps(found), flush=True)
    llm.close()

if sys.argv[1:]:
    arm(sys.argv[1] == "on")
else:
    arms = {n: subprocess.Popen([sys.executable, __file__, n], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for n in ("off", "on")}
    for p in arms.values():
        while "ready" != p.stdout.readline().strip(): pass
    found = {n: [] for n in arms}
    for i in range(45):
        for n, p in arms.items():
            p.stdin.write(f"{i}\n"); p.stdin.flush()
            found[n].append(json.loads(p.stdout.readline()))
    keys = sorted({k for each in found.values() for f in each for k in f})
    for k in keys:
        print(f"{k:18s}", *(f"{n} {(1 if k.startswith('n ') else 1e3) * statistics.median(f.get(k, 0) for f in each[5:]):8.3f}" for n, each in found.items()))
    for p in arms.values(): p.stdin.close(); p.wait()
