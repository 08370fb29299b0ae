"""Which worker runs which tests: whole files, and those of one folder as long as others have work.

What a file's tests share is made once, then; and the servers that the files of a folder share are
started by one worker, unless no other folder is left.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from xdist.scheduler import LoadFileScheduling

DEPTH = 3  # tests/api/server: the folders within it share its servers


class WholeFiles(LoadFileScheduling):
    def __init__(self, config: Any, log: Any = None) -> None:
        config.option.loadscopereorder = False  # the order says which tests take long
        super().__init__(config, log)

    def _assign_work_unit(self, node: Any) -> None:
        self.workqueue.move_to_end(self._best_for(node), last=False)
        super()._assign_work_unit(node)

    def _best_for(self, node: Any) -> str:
        """The first file of the folder that the worker is in, or of one that no worker is in."""
        folders = {
            each: _folder_of([*files][-1]) for each, files in self.assigned_work.items() if files
        }
        here, taken = folders.get(node), set(folders.values())

        def preference(file: str) -> int:
            folder = _folder_of(file)
            return 0 if folder == here else 1 if folder not in taken else 2

        return min(self.workqueue, key=preference)


def _folder_of(file: str) -> tuple[str, ...]:
    return PurePosixPath(file).parent.parts[:DEPTH]
