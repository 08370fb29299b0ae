# set-up of a fresh machine: packages of Python, and the tree of ae24e95 as $HOME/old
mkdir -p $HOME/demo $HOME/old && tar xJf scratch/plan/pkgs.tar.xz -C $HOME/demo && tar xJf scratch/plan/old.tar.xz -C $HOME/old
mkdir -p $HOME/new && cp -r src $HOME/new/
echo $HOME/demo/pkgs > $(python3 -c "import site;print(site.getsitepackages()[0])")/demo.pth
