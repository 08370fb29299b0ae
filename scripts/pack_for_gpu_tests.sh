#!/bin/sh
# Puts into a folder the packages that a machine with a GPU and no network lacks for the tests:
#
#   scripts/pack_for_gpu_tests.sh FOLDER [VERSION]     here; VERSION is that of Python there (3.12)
#   PYTHONPATH=FOLDER make test-gpu                    there, on x86-64
#
# What torch, Triton, transformers, hypothesis, xxhash and prometheus_client are or bring is there
# already, so each package comes without what it depends on. No test of a GPU needs Numba, or what
# the server needs. PYTHON is any Python with pip.
set -eu

folder=${1:?"usage: $0 FOLDER [VERSION OF PYTHON]"}
version=${2:-3.12}

platforms=
for tag in manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_17 manylinux2014; do
    platforms="$platforms --platform ${tag}_x86_64"
done

rm -rf "$folder"
# shellcheck disable=SC2086
"${PYTHON:-python3}" -m pip --disable-pip-version-check install --quiet --no-deps --no-compile \
    --only-binary=:all: --python-version "$version" --implementation cp $platforms \
    --target "$folder" 'gguf>=0.17' 'llguidance>=1.9,<2' \
    'pytest>=9' pluggy iniconfig pygments 'pytest-xdist>=3.8' execnet \
    'jsonschema>=4.20' jsonschema-specifications referencing rpds-py
rm -rf "$folder/bin"
du -sh "$folder"
