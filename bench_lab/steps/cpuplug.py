import json, os, resource, time
out = open(f"build/cpu/{os.getpid()}.jsonl", "w")
def cpu():
    a, b = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return a.ru_utime + a.ru_stime, b.ru_utime + b.ru_stime
last = [None]
def pytest_runtest_logstart(nodeid, location):
    now = cpu()
    if last[0] is None:
        out.write(json.dumps(["START", *now]) + "\n")
    last[0] = (nodeid, now, time.time())
def pytest_runtest_logfinish(nodeid, location):
    if last[0] is None: return
    n, (a, b), t = last[0]; c, d = cpu()
    out.write(json.dumps([nodeid, c - a, d - b, time.time() - t]) + "\n"); out.flush()
def pytest_sessionfinish(session):
    out.write(json.dumps(["END", *cpu()]) + "\n"); out.flush()
