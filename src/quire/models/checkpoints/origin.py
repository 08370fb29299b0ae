"""Where a model comes from, in words, before anything is opened or fetched and without torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from quire.models.checkpoints import demo, hub
from quire.progress import human_bytes, say


def announce(name: str, load_format: str = "auto") -> None:
    """Say at once what is loaded and from where: importing torch alone takes seconds."""
    say(f"Loading {origin(name, load_format)}")


def origin(name: str, load_format: str = "auto") -> str:
    """`smollm2, the built-in model: /home/me/.cache/quire/….gguf, 94 MiB`, or the like."""
    if load_format == "dummy":
        return f"{name}: its shape, with random weights"
    if name == demo.NAME:
        return f"{name}, the built-in model: {_demo()}"
    path = Path(name).expanduser()
    if path.is_dir():
        return f"the folder {path}{_size(path.glob('*.safetensors'))}"
    if path.is_file():
        return f"the file {path}{_size([path])}"
    if hub.NAME.fullmatch(name):
        return f"{name} from the Hugging Face Hub: {_hub(name)}"
    return name


def _demo() -> str:
    path = demo.model_path()
    if path.is_file():
        return f"{path}{_size([path])}"
    return f"downloaded to {path.parent} first, {demo.WHEEL_BYTES / 1e6:.0f} MB"


def _hub(name: str) -> str:
    folder = hub.cached_folder(name)
    if folder.is_dir():
        return f"kept in {folder}"
    return f"downloaded to {folder} first"


def _size(files: Iterable[Path]) -> str:
    """The size of the files that are there; the loader complains of a link that leads nowhere."""
    sizes = [file.stat().st_size for file in files if file.is_file()]
    return f", {human_bytes(sum(sizes))}" if sizes else ""
