import re, sys, collections
lines = open(sys.argv[1]).read().splitlines()
ins = []  # (addr, text)
labels = {}
for l in lines:
    m = re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", l)
    if m: ins.append((int(m[1], 16), m[2].strip()))
    m = re.match(r"\s*(\.L_x_\d+):", l)
    if m: labels[m[1]] = len(ins)
loops = []
for i, (a, t) in enumerate(ins):
    m = re.search(r"BRA.*`\((\.L_x_\d+)\)", t)
    if m and labels.get(m[1], 1 << 30) <= i: loops.append((labels[m[1]], i))
def op(t):
    t = re.sub(r"^@!?U?P\d+\s+", "", t)
    return t.split()[0]
for s, e in loops:
    body = [op(t) for _, t in ins[s:e + 1]]
    n = sum(o.startswith("HGMMA") for o in body)
    if n == 0: continue
    inner = any((s2, e2) != (s, e) and s <= s2 and e2 <= e and any(op(t).startswith("HGMMA") for _, t in ins[s2:e2+1]) for s2, e2 in loops)
    if inner: continue
    c = collections.Counter(o.split(".")[0] for o in body)
    print(s, e, len(body), "HGMMA", n, dict(c.most_common()))
    if len(sys.argv) > 2:
        for a, t in ins[s:e + 1]: print(hex(a), t)
        break
