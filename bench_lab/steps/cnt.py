import sys,re,collections
L=open(sys.argv[1]).read().split("\n")
# labels and instructions
ins=[];labels={}
for l in L:
    m=re.match(r"\s*(\.L_x_\d+):",l)
    if m: labels[m.group(1)]=len(ins); continue
    m=re.search(r"/\*[0-9a-f]{4}\*/\s+(.*?);",l)
    if m: ins.append(m.group(1))
best=None
for i,s in enumerate(ins):
    m=re.search(r"BRA.*?(\.L_x_\d+)",s)
    if m and labels.get(m.group(1),10**9)<i:
        a=labels[m.group(1)]
        if best is None or i-a>best[1]-best[0]: best=(a,i)
print("total",len(ins),"loop",best, best and best[1]-best[0]+1)
if best:
    c=collections.Counter(re.sub(r"^@!?U?P\d+ ","",s).split()[0].split(".")[0] for s in ins[best[0]:best[1]+1])
    print(c.most_common(30))
