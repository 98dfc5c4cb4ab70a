#!/usr/bin/env bash
# Builds the sdist and the wheel, installs the wheel into a clean environment and uses it from
# outside the tree. Dependencies are seen through a .pth file, so that they are not installed twice.
set -euo pipefail
tree=$PWD
bin=$(cd "$VENV/bin" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$bin/python" -m build --quiet --outdir "$work/dist" .
"$bin/python" -m venv "$work/venv"
site=$("$work/venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
"$bin/python" -c 'import site; print(site.getsitepackages()[0])' >"$site/dependencies.pth"
"$work/venv/bin/pip" install --quiet --no-deps "$work"/dist/*.whl
cd "$work"
"$work/venv/bin/python" - "$tree" <<'PYTHON'
import sys

import bnconvert
import bnconvert.kernels.ops
from bnconvert import convert_sync_batchnorm
from importlib.resources import files
from torch import nn

assert not bnconvert.__file__.startswith(sys.argv[1]), bnconvert.__file__
assert convert_sync_batchnorm(nn.BatchNorm2d(3)).process_group is None
assert list(files("bnconvert.kernels").joinpath("cuda").glob("*.cuh")), "no kernel sources"
assert files("bnconvert").joinpath("py.typed").is_file()
PYTHON
"$work/venv/bin/bnconvert" --version
