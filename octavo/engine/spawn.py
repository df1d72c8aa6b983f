"""The process of an engine core, started before it is known what the core should be.

Importing torch is most of a start, so the core begins with it while the front still imports the server and reads the
model's configuration. That is why this module imports nothing but the standard library.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import weakref

# Names of the two sockets inside a core's private folder.
INPUT_SOCKET = "in"
OUTPUT_SOCKET = "out"
# A socket path longer than this does not fit the kernel's address structure.
MAX_SOCKET_PATH = 107


class SpawnedCore:
    """A core's process and private folder; a `ProcessClient` talks to it. `end`, or the end of this object, ends both."""

    def __init__(self, executor: str | None = None):
        """The process imports what the executor of this name needs while it waits for its configuration."""
        self.folder = _make_private_folder()
        self.process = _spawn(self.folder, executor)
        self.end = weakref.finalize(self, _release, self.process, self.folder)


def _make_private_folder() -> str:
    """A folder that only this user can enter, short enough for a socket path."""
    folder = tempfile.mkdtemp(prefix="octavo-")
    if len(f"{folder}/{OUTPUT_SOCKET}") > MAX_SOCKET_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="octavo-", dir="/tmp")
    return folder


def _spawn(folder: str, executor: str | None) -> "subprocess.Popen[bytes]":
    """Start a core. It finds modules where this process does, and ends when its standard input does."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path))
    command = [sys.executable, "-P", "-m", "octavo.engine.core_process", folder]
    return subprocess.Popen([*command, executor] if executor else command, stdin=subprocess.PIPE, env=environment)


def _release(process: "subprocess.Popen[bytes]", folder: str) -> None:
    """Leave nothing behind: no process, no socket, no folder."""
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)
