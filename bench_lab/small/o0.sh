# set-up of a fresh machine: packages of Python, and the tree of ae24e95 as /root/old
mkdir -p /root/demo /root/old && tar xJf scratch/plan/pkgs.tar.xz -C /root/demo && tar xJf scratch/plan/old.tar.xz -C /root/old
mkdir -p /root/new && cp -r src /root/new/
echo /root/demo/pkgs > $(python3 -c "import site;print(site.getsitepackages()[0])")/demo.pth
