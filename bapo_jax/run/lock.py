"""One process at a time writes into a run directory.

The file `lock` names the holder. The kernel's lock on it (flock) ends with the holder, however that ends. A network file system may
not show that lock to other machines, so the holder also counts up in the file, every RENEW_S seconds. Where the file is another
machine's, a newcomer watches for WATCH_S: if the number stands still, the holder is gone. No clocks are compared.

Who removes or renames the file or its directory takes the holder's place away from it, so that the holder ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = 'lock'
RENEW_S, WATCH_S = 5.0, 20.0
_SIZE = 512  # bytes of the file, blanks at the end: renewing it takes no room on a full disk
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # what file systems without flock say


class DirectoryInUse(ValueError):
    """Another process works in the directory."""


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Inside, the directory is this process's. Leaves no directory behind that it made and nothing was written into.

    Raises DirectoryInUse, naming the holder, ValueError for a path that is no UTF-8, and OSError for one that cannot be made. Should
    another process take the directory though this one lives (a machine that slept, a network that broke), or should directory or lock be
    removed or renamed, this process ends with status 1 and writes nothing more.
    """
    try:
        os.path.abspath(directory).encode('utf-8')
    except UnicodeEncodeError:
        raise ValueError(
            f'{str(directory)!r} is no UTF-8 here, and the checkpoint library writes to no such path; give another directory, or set a '
            'locale such as LC_ALL=C.UTF-8'
        ) from None
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise OSError(e.errno, f'{directory} cannot be made ({e.strerror}); give another directory') from e
    path = directory / FILE
    file, locked = _opened(path)
    try:
        _take(file, path, locked)
        own = {'token': secrets.token_hex(8), 'pid': os.getpid(), 'machine': _machine(), 'host': socket.gethostname()}
        _write(file, own | {'renewed': 0})
        ended = threading.Event()
        threading.Thread(target=_renew, args=(file, path, own, ended), name='lock', daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            # A disk that fails here has failed before, and that error is the one to tell. What stays of the lock bars nobody.
            with contextlib.suppress(OSError):
                if not _lost(file, path, own):
                    path.unlink(missing_ok=True)
            if made:
                with contextlib.suppress(OSError):  # not empty: there is something to keep
                    directory.rmdir()
    finally:
        os.close(file)


def _opened(path: Path) -> tuple[int, bool]:
    """The file, and whether it has the kernel's lock: not every file system has one. Raises DirectoryInUse."""
    while True:
        file, locked = os.open(path, os.O_RDWR | os.O_CREAT, 0o644), True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(file)
            os.close(file)
            raise _in_use(path, holder) from None
        except OSError as e:
            if e.errno not in _UNSUPPORTED:
                os.close(file)
                raise
            locked = False
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(file).st_ino == path.stat().st_ino:
                return file, locked
        os.close(file)  # its holder ended and removed it meanwhile


def _take(file: int, path: Path, locked: bool) -> None:
    """Waits until the holder named in the file must be gone. Raises DirectoryInUse where it counts on."""
    before = _read(file)
    if not before or locked and before.get('machine') == _machine():
        return
    print(f'{path} is of {_name(before)}; watching for {WATCH_S:g} s whether it still works', flush=True)
    until = time.monotonic() + WATCH_S
    while time.monotonic() < until:
        time.sleep(min(1.0, WATCH_S / 10))
        if _read(file) not in ({}, before):
            raise _in_use(path, before)


def _renew(file: int, path: Path, own: dict[str, Any], ended: threading.Event) -> None:
    for renewed in range(1, 2**62):
        if ended.wait(RENEW_S):
            return
        with contextlib.suppress(OSError):  # a file system that is away for a while
            lost = _lost(file, path, own)
            if ended.is_set():  # then it was this process that removed the file
                return
            if lost:
                _end(lost)
            _write(file, own | {'renewed': renewed})


def _lost(file: int, path: Path, own: dict[str, Any]) -> str:
    """Why the directory is this process's no longer, as a message; '' while it is. Raises OSError where that cannot be told."""
    try:
        same = os.path.samestat(path.stat(), os.fstat(file))
    except (FileNotFoundError, NotADirectoryError):
        return f'error: {path.parent} or the file {path.name} in it was removed or renamed; nothing more is written'
    holder = _read(file) if same else _said_in(path)
    if same and holder.get('token') in (own['token'], None):
        return ''
    return f'error: {path.parent} was taken by {_name(holder)}; nothing more is written'


def _end(message: str) -> None:
    """Ends the process, with the message for whoever reads standard error, if anybody does."""

    def say() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f'{message}\n'.encode())

    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    saying.join(1.0)  # a pipe that is full takes nothing
    os._exit(1)


def _said_in(path: Path) -> dict[str, Any]:
    """`_read` of the file that lies there now."""
    file = os.open(path, os.O_RDONLY)
    try:
        return _read(file)
    finally:
        os.close(file)


def _read(file: int) -> dict[str, Any]:
    """What the holder wrote; {} for a file that is new or half written."""
    try:
        said = json.loads(os.pread(file, _SIZE, 0))
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _write(file: int, holder: dict[str, Any]) -> None:
    os.pwrite(file, json.dumps(holder).encode().ljust(_SIZE), 0)
    os.fsync(file)


def _machine() -> str:
    """This machine since it was started; two machines may share a host name."""
    try:
        boot = Path('/proc/sys/kernel/random/boot_id').read_text('ascii').strip()
    except OSError:
        boot = ''
    return f'{socket.gethostname()} {boot}'


def _in_use(path: Path, holder: dict[str, Any]) -> DirectoryInUse:
    return DirectoryInUse(f'{path.parent} is in use by {_name(holder)}; wait until it ends, or give another directory')


def _name(holder: dict[str, Any]) -> str:
    return f'process {holder.get("pid", "(unknown)")} on {holder.get("host", "an unknown host")}'
