import time,sys
def r():
    f=open('/proc/stat').readline().split()[1:]; f=list(map(int,f)); return f[3]+f[4],sum(f[:8]),f[4]
a=r(); t0=time.time()
while True:
    time.sleep(5); b=r(); print(f"{time.time()-t0:6.0f} idle {100*(b[0]-a[0])/(b[1]-a[1]):5.1f} io {100*(b[2]-a[2])/(b[1]-a[1]):4.1f}",flush=True); a=b
