import re,sys
# every asm with packed_element 4: the operand's first registers must be the last dimension's 4
def check(s):
    lay={m.group(1):m.group(2) for m in re.finditer(r"^(#\w+) = (#ttg\.\w+<.*?>)\s*$",s,re.M)}
    out=set()
    for m in re.finditer(r'elementwise_inline_asm "(.{0,40}).*?packed_element = 4.*?: (.*?) ->',s):
        for shape,l in re.findall(r"tensor<([^>]*?), (#\w+)>",m.group(2)):
            d=lay[l]; r=re.match(r"#ttg.linear<\{register = (\[.*?\]\]|\[\]),",d)
            if r:
                reg=eval(r.group(1)); ok=[b[-1] for b in reg[:2]]==[1,2] and all(sum(b)==b[-1] for b in reg[:2])
            else:
                spt=eval(re.search(r"sizePerThread = (\[.*?\])",d).group(1)); order=eval(re.search(r"order = (\[.*?\])",d).group(1)); ok=spt[-1]%4==0 and order[0]==len(spt)-1
            out.add((ok,shape,d[:90] if not ok else ""))
    return out
if __name__=="__main__":
    print(sys.argv[1].split("/")[-1], sorted({(o[0],o[1]) for o in check(open(sys.argv[1]).read())}), [o[2] for o in check(open(sys.argv[1]).read()) if not o[0]])
