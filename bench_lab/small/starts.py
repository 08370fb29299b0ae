import os,subprocess,sys,time,re
# CPU of one server start with the tiny dummy model, by process
import glob
p=subprocess.Popen([sys.executable,'-m','quire','serve','/tmp/tiny8k','--port','0','--dtype','float32','--device','cpu','--num-blocks','512','--load-format','dummy'],stdout=subprocess.PIPE,stderr=subprocess.STDOUT,text=True)
t=time.time()
for l in p.stdout:
    print(l.rstrip()[:150])
    pass
        if "ready" in l: break
time.sleep(0.5)
def tree(pid):
    yield pid
    for c in subprocess.run(['pgrep','-P',str(pid)],capture_output=True,text=True).stdout.split(): yield from tree(int(c))
for q in tree(p.pid):
    s=open(f'/proc/{q}/stat').read().rsplit(')',1)[1].split()
    print(q,(int(s[11])+int(s[12]))/100,open(f'/proc/{q}/cmdline').read().replace('\0',' ')[:110])
print(time.time()-t)
p.terminate(); p.wait()
