"""One run at a time in a dump folder: two would write over each other's checkpoints and numbers."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from titan_runtime.errors import RunError

FILE = ".titan-lock"


class FolderLock:
    """Holds the folder until `release` or the end of this process, however it ends; forked children do not hold it."""

    def __init__(self, folder: Path) -> None:
        """Take the lock. Raises RunError when another process has it, OSError when the folder cannot be written."""
        folder.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._handle, 200).decode(errors="replace").strip()
            os.close(self._handle)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise RunError(
                    f"{folder} is in use by another run ({holder or 'unknown process'})",
                    hint="wait until it has ended, or start with another --dump-folder",
                ) from None
            self._handle = -1  # a file system without locks: nothing can be told, and that is no reason not to train
            return
        try:
            os.ftruncate(self._handle, 0)
            os.write(self._handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError:
            return  # a full disk: the lock holds without its label

    def release(self) -> None:
        """Let others have the folder."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1
