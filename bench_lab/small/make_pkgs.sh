# What the GPU machine lacks, for o0.sh: packages of Python 3.12 on x86, and the tree before 17 and 18. Run in the root.
set -e
rm -rf /tmp/gpkgs; mkdir -p /tmp/gpkgs/pkgs
for p in gguf fastapi starlette uvicorn httptools python-multipart uvloop 'llguidance>=1.9,<2' pydantic pydantic_core annotated-types typing-inspection typing_extensions annotated-doc anyio sniffio idna h11 click pytest-xdist execnet sentencepiece redis; do
  .venv/bin/pip install -q --no-deps --target /tmp/gpkgs/pkgs --platform manylinux_2_39_x86_64 --platform manylinux_2_34_x86_64 --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --python-version 3.12 --implementation cp --only-binary=:all: "$p" 2>&1 | grep -v WARNING || true
done
tar cJf scratch/plan/pkgs.tar.xz -C /tmp/gpkgs pkgs
rm -rf /tmp/oldsrc; mkdir /tmp/oldsrc; git archive ae24e95 src | tar x -C /tmp/oldsrc; tar cJf scratch/plan/old.tar.xz -C /tmp/oldsrc src
ls -la scratch/plan/*.xz
