"""A lock, so that only one process at a time writes into a run directory.

The file `lock` names the holder. The kernel's lock on it (flock) ends with the holder, however that ends. A
network file system may not show this lock to other machines, so the holder also increments a counter in the
file every RENEW_S seconds. A newcomer that finds another machine's file watches it for WATCH_S: if the
counter does not change, the holder is gone. No clocks are compared.

If the file or its directory is removed or renamed, the holder loses the lock and ends.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LOCK_FILE = 'lock'
RENEW_S, WATCH_S = 5.0, 20.0
_SIZE = 512  # bytes of the file, padded with blanks: renewing it needs no space on a full disk
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # from file systems without flock


class DirectoryInUse(ValueError):
    """Another process is using the directory."""


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Inside, this process holds the directory. If it made the directory and left it empty, it removes it.

    Raises DirectoryInUse, naming the holder, if another process holds the directory; ValueError if the path
    is not UTF-8; and OSError if the directory cannot be made.

    This process ends with status 1 and writes nothing more if another one takes the directory (after the
    machine slept or the network broke), or if the directory or the lock is removed or renamed.
    """
    try:
        os.path.abspath(directory).encode('utf-8')
    except UnicodeEncodeError:
        raise ValueError(
            f'{str(directory)!r} is not valid UTF-8 in this locale, so the checkpoint library cannot write '
            'to it; give another directory, or set a locale such as LC_ALL=C.UTF-8'
        ) from None
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise OSError(e.errno, f'{directory} cannot be created ({e.strerror}); give another directory') from e
    path = directory / LOCK_FILE
    file, locked = _opened(path)
    try:
        _take(file, path, locked)
        own = {
            'token': secrets.token_hex(8),
            'pid': os.getpid(),
            'machine': _machine(),
            'host': socket.gethostname(),
            'pids': _pids(),
        }
        _write(file, own | {'renewed': 0})
        ended = threading.Event()
        threading.Thread(target=_renew, args=(file, path, own, ended), name='lock', daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            # A disk that fails here failed before, and that error is reported. A leftover lock blocks nobody.
            with contextlib.suppress(OSError):
                if not _lost(file, path, own):
                    path.unlink(missing_ok=True)
            if made:
                with contextlib.suppress(OSError):  # not empty: keep it
                    directory.rmdir()
    finally:
        os.close(file)


def _opened(path: Path) -> tuple[int, bool]:
    """Returns the open file, and whether it has the kernel's lock, which not every file system supports.

    Raises DirectoryInUse if another process has that lock.
    """
    while True:
        file, locked = os.open(path, os.O_RDWR | os.O_CREAT, 0o666), True
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
        os.close(file)  # its holder ended and removed it in the meantime


def _take(file: int, path: Path, locked: bool) -> None:
    """Waits until the holder named in the file must be gone. Raises DirectoryInUse if its counter changes."""
    before = _read(file)
    if not before or locked and before.get('machine') == _machine():
        return
    if _is_renewed(path, lambda: _read(file), before):
        raise _in_use(path, before)


def _is_renewed(path: Path, read: Callable[[], dict[str, Any]], before: dict[str, Any]) -> bool:
    """Watches a lock for WATCH_S at most, until it differs from `before`."""
    print(
        f'{path} belongs to {_name(before)}; waiting up to {WATCH_S:g} s to see whether that process still '
        'runs',
        flush=True,
    )
    until = time.monotonic() + WATCH_S
    while time.monotonic() < until:
        time.sleep(min(1.0, WATCH_S / 10))
        if read() not in ({}, before):
            return True
    return False


def is_held(directory: Path) -> bool:
    """Whether a process holds the directory. Takes and writes nothing, so the directory may be read-only.

    If that cannot be told at once, as for another machine's process, it watches the lock for WATCH_S at most.
    """
    path = directory / LOCK_FILE
    try:
        before = _said_in(path)
        if before.get('machine') == _machine():
            # In another container, the process may live under a number that is free here.
            if _pids() and before.get('pids') == _pids() and not Path(f'/proc/{before.get("pid")}').exists():
                return False
            if _is_listed(path, before.get('pid')):
                return True
        return _is_renewed(path, lambda: _said_in(path), before)
    except FileNotFoundError:  # at the end of a run
        return False


def _is_listed(path: Path, pid: Any) -> bool:
    """Whether the kernel lists a process's lock on the file. It lists none of other machines."""
    try:
        listed = [line.split() for line in Path('/proc/locks').read_text('ascii').splitlines()]
    except OSError:
        return False
    inode = path.stat().st_ino
    return any(str(pid) in words and words[-3].endswith(f':{inode}') for words in listed)


def _renew(file: int, path: Path, own: dict[str, Any], ended: threading.Event) -> None:
    for renewed in range(1, 2**62):
        if ended.wait(RENEW_S):
            return
        with contextlib.suppress(OSError):  # a file system that is temporarily unreachable
            lost = _lost(file, path, own)
            if ended.is_set():  # then this process removed the file itself
                return
            if lost:
                _end(lost)
            _write(file, own | {'renewed': renewed})


def _lost(file: int, path: Path, own: dict[str, Any]) -> str:
    """A message that says why this process no longer holds the directory; '' while it does.

    Raises OSError if that cannot be determined.
    """
    try:
        same = os.path.samestat(path.stat(), os.fstat(file))
    except (FileNotFoundError, NotADirectoryError):
        return (
            f'error: {path.parent} or its file {path.name} was removed or renamed, so this process stops; '
            'restore the directory if it is gone, then run the same command'
        )
    holder = _read(file) if same else _said_in(path)
    if same and holder.get('token') in (own['token'], None):
        return ''
    return (
        f'error: {path.parent} was taken over by {_name(holder)}, so this process stops; wait until that one '
        'ends'
    )


def _end(message: str) -> None:
    """Ends the process with a message on standard error, without waiting for a reader."""

    def say() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f'{message}\n'.encode())

    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    saying.join(1.0)  # a full pipe would block
    os._exit(1)


def _said_in(path: Path) -> dict[str, Any]:
    """`_read` of the file that is at `path` now."""
    file = os.open(path, os.O_RDONLY)
    try:
        return _read(file)
    finally:
        os.close(file)


def _read(file: int) -> dict[str, Any]:
    """What the holder wrote; {} if the file is new or half written."""
    try:
        said = json.loads(os.pread(file, _SIZE, 0))
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _write(file: int, holder: dict[str, Any]) -> None:
    os.pwrite(file, json.dumps(holder).encode().ljust(_SIZE), 0)
    os.fsync(file)


def _machine() -> str:
    """Identifies this machine and its boot; two machines may have the same host name."""
    try:
        boot = Path('/proc/sys/kernel/random/boot_id').read_text('ascii').strip()
    except OSError:
        boot = ''
    return f'{socket.gethostname()} {boot}'


def _pids() -> str:
    """Identifies the numbers of processes that this one sees, which are a container's own; '' if unknown."""
    try:
        return os.readlink('/proc/self/ns/pid')
    except OSError:
        return ''


def _in_use(path: Path, holder: dict[str, Any]) -> DirectoryInUse:
    return DirectoryInUse(
        f'{path.parent} is in use by {_name(holder)}; wait until it ends, or give another directory'
    )


def _name(holder: dict[str, Any]) -> str:
    return f'process {holder.get("pid", "(unknown)")} on {holder.get("host", "an unknown host")}'
