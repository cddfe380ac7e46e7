"""What a run changes in a folder, call by call, and the states in which a crash can leave it.

`recording` logs every call below a folder that changes it: what was done, to which file, and the
bytes. `Disk.states` yields the folder as it can be found after a crash at any call:

    killed   every process ended before the call: what was written before it is there, synced or not
    one      one process ended before its call; each other one went on until its next collective
    power    the machine stopped: what no later sync of the file (bytes) or of the folder (names)
             made durable may be lost, all of it or some

After a power loss no order is assumed between the changes that were not synced; that is weaker than
what ext4 keeps. A rename is done or not done. A folder's name is in its parent folder.

`Disk.build` makes such a state on the disk, under the same paths. Journals note inode numbers, so
`as_recorded` shows the recorded numbers and times of the files that were built, until they are
removed. No other file may get one of these numbers meanwhile: the recorded folder must be kept, and
`recording` keeps what is removed by links beside its log.
"""

from __future__ import annotations

import fcntl
import os
import pathlib
import pickle
import random
import shutil
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

PAGE = 4096
_open = os.open
_FICLONERANGE = 0x4020940D


class Call(NamedTuple):
    """One call that was made."""

    process: int
    operation: str  # create, write, size, sync, replace, link, unlink, mkdir, rmdir, mark
    path: str = ""  # relative to the folder; of create, unlink, mkdir, rmdir, link, replace
    other: str = ""  # the new name, of link and replace
    inode: int = 0  # of the file, or of the folder that is synced
    offset: int = 0  # of write; of size the size
    data: bytes = b""
    times: tuple[int, int] = (0, 0)  # of the file after it: modified, changed, in nanoseconds


class Node:
    """A file or a folder: its bytes, and those of them that were synced."""

    def __init__(self, inode, is_folder):
        self.inode, self.is_folder = inode, is_folder
        self.data, self.synced = bytearray(), b""
        self.times = (0, 0)

    def copy(self):
        node = Node(self.inode, self.is_folder)
        node.data, node.synced, node.times = bytearray(self.data), self.synced, self.times
        return node


class State(NamedTuple):
    """A folder as a crash leaves it."""

    kind: str
    at: int  # the number of calls that were made
    files: dict  # name -> node; a node of two names is a file of two links
    is_power_loss: bool


# -- recording -------------------------------------------------------------------------------------


class _Log:
    """Appends calls to a file that all processes of a world share, in their true order."""

    def __init__(self, path, folder):
        self.path, self.folder = path, os.path.realpath(folder)
        self.process = self._kept = 0
        self._link, self._rename, self._mkdir = os.link, os.rename, os.mkdir
        os.makedirs(f"{path}.removed", exist_ok=True)

    @contextmanager
    def locked(self):
        fd = _open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT)  # not what `recording` puts there
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def add(self, operation, **facts):
        with open(self.path, "ab") as file:
            pickle.dump(Call(self.process, operation, **facts), file)

    def keep(self, path):
        """Keep the inode of what is about to lose its last name."""
        self._kept += 1
        place = f"{self.path}.removed/{os.getpid()}-{self._kept}"
        if os.path.isdir(path) and not os.listdir(path):
            self._rename(path, place)
            self._mkdir(path)  # to be removed in its place
        elif os.path.isfile(path) and os.lstat(path).st_nlink == 1:
            self._link(path, place)

    def name_of(self, path):
        """Return a path relative to the folder; None if it is elsewhere."""
        if isinstance(path, int):
            return None
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if path == self.folder:
            return ""
        return path.removeprefix(self.folder + "/") if path.startswith(self.folder + "/") else None

    def is_of_folder(self, fd):
        return (
            self.name_of(os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")) is not None
        )


def whole_path(path, dir_fd=None):
    """Return a path that a call names relative to an open folder."""
    if isinstance(path, int) or dir_fd is None:
        return path
    return os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fspath(path))


def _times(status):
    return status.st_mtime_ns, status.st_ctime_ns


@contextmanager
def recording(folder, log_path):
    """Log all calls that change something below `folder`, in this process and its children."""
    log, real = _Log(log_path, folder), {}

    def patched(stack, name, module=os):
        def register(function):
            real[name] = getattr(module, name)

            def call(*args, **options):
                with log.locked():
                    return function(*args, **options)

            stack.enter_context(mock.patch.object(module, name, call))
            accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10
            if accessor is not None and hasattr(accessor, name):
                stack.enter_context(mock.patch.object(accessor, name, staticmethod(call)))

        return register

    def of_file(operation, fd, **facts):
        status = os.fstat(fd)
        log.add(operation, inode=status.st_ino, times=_times(status), **facts)

    with ExitStack() as stack:

        @patched(stack, "open")
        def open_(path, flags, mode=0o777, **options):
            whole = whole_path(path, options.get("dir_fd"))
            name = log.name_of(os.fspath(whole))
            is_new = bool(name) and flags & os.O_CREAT and not os.path.lexists(whole)
            fd = real["open"](path, flags, mode, **options)
            if is_new:
                of_file("create", fd, path=name)
            return fd

        @patched(stack, "pwritev")
        def pwritev(fd, buffers, offset, *flags):
            count = real["pwritev"](fd, buffers, offset, *flags)
            if log.is_of_folder(fd):
                data = b"".join(map(bytes, buffers))[:count]
                of_file("write", fd, offset=offset, data=data)
            return count

        @patched(stack, "copy_file_range")
        def copy_file_range(src, dst, count, offset_src=None, offset_dst=None):
            copied = real["copy_file_range"](src, dst, count, offset_src, offset_dst)
            if log.is_of_folder(dst):
                of_file("write", dst, offset=offset_dst, data=_content(dst, offset_dst, copied))
            return copied

        @patched(stack, "ioctl", fcntl)
        def ioctl(fd, request, *args):
            outcome = real["ioctl"](fd, request, *args)
            if request == _FICLONERANGE and log.is_of_folder(fd):
                _, _, nbytes, offset = struct.unpack("qQQQ", args[0])
                of_file("write", fd, offset=offset, data=_content(fd, offset, nbytes))
            return outcome

        def sized(name):
            def call(target, *args):
                outcome = real[name](target, *args)
                status = os.fstat(target) if isinstance(target, int) else os.stat(target)
                if log.is_of_folder(target) if isinstance(target, int) else log.name_of(target):
                    log.add(
                        "size", inode=status.st_ino, offset=status.st_size, times=_times(status)
                    )
                return outcome

            return call

        for name in ("truncate", "ftruncate", "posix_fallocate"):
            patched(stack, name)(sized(name))

        @patched(stack, "fsync")
        def fsync(fd):  # the log is what becomes durable; a real sync would only take time
            if log.is_of_folder(fd):
                of_file("sync", fd)

        @patched(stack, "replace")
        def replace(old, new, src_dir_fd=None, dst_dir_fd=None):
            old, new = whole_path(old, src_dir_fd), whole_path(new, dst_dir_fd)
            a, b = log.name_of(os.fspath(old)), log.name_of(os.fspath(new))
            if b is not None:
                log.keep(new)
            real["replace"](old, new)
            if b is not None:
                status = os.lstat(new)
                log.add("replace", path=a, other=b, inode=status.st_ino, times=_times(status))

        @patched(stack, "link")
        def link(old, new, src_dir_fd=None, dst_dir_fd=None, **options):
            old, new = whole_path(old, src_dir_fd), whole_path(new, dst_dir_fd)
            a, b = log.name_of(os.fspath(old)), log.name_of(os.fspath(new))
            real["link"](old, new, **options)
            if b is not None:
                status = os.lstat(new)
                log.add("link", path=a, other=b, inode=status.st_ino, times=_times(status))

        def named(name):
            def call(path, *args, dir_fd=None, **options):
                path = whole_path(path, dir_fd)
                relative = log.name_of(os.fspath(path))
                if relative is not None and name != "mkdir":
                    log.keep(path)
                real[name](path, *args, **options)
                if relative is not None:
                    inode = os.lstat(path).st_ino if name == "mkdir" else 0
                    log.add(name, path=relative, inode=inode)

            return call

        for name in ("unlink", "mkdir", "rmdir"):
            patched(stack, name)(named(name))
        yield log


def _content(fd, offset, nbytes):
    data = b""
    while len(data) < nbytes:
        data += os.pread(fd, nbytes - len(data), offset + len(data))
    return data


# -- states ----------------------------------------------------------------------------------------


class _Tree:
    """Files by name, and what of them is durable."""

    def __init__(self, files):
        copies = {id(node): node.copy() for node in files.values()}
        self.names = {
            name: copies[id(node)] for name, node in files.items()
        }  # as programs see them
        self.names.setdefault("", Node(0, is_folder=True))  # is there, and never lost
        self.unsynced = []  # changes of names that no sync of their folder made durable
        self.durable = dict(self.names)  # names that a power loss leaves

    def apply(self, call):
        """Make one call."""
        kind = call.operation
        if kind == "mkdir" and not call.path:
            self.names[""].inode = call.inode
        elif kind in ("create", "mkdir"):
            node = Node(call.inode, kind == "mkdir")
            node.times = call.times
            self._change((call.path, node))
        elif kind in ("replace", "link"):
            node = self.names[call.path]
            node.times = call.times
            removed = [(call.path, None)] if kind == "replace" else []
            self._change(*removed, (call.other, node))
        elif kind in ("unlink", "rmdir"):
            self._change((call.path, None))
        elif kind in ("write", "size"):
            node = self.open_node(call.inode)
            node.times = call.times
            size = call.offset + len(call.data)
            if kind == "size":
                del node.data[call.offset :]
            node.data.extend(bytes(max(0, size - len(node.data))))
            node.data[call.offset : size] = call.data
        elif kind == "sync":
            node = self.open_node(call.inode)
            if node.is_folder:
                self._sync_names(node)
            else:
                node.synced = bytes(node.data)

    def open_node(self, inode):
        """Return the node of a descriptor."""
        for node in (*self.names.values(), *self.durable.values()):
            if node.inode == inode:
                return node
        return Node(inode, is_folder=False)  # it has no name any more: nothing of it is seen

    def _change(self, *entries):
        for name, node in entries:
            if node is None:
                self.names.pop(name, None)
            else:
                self.names[name] = node
        self.unsynced.append(entries)

    def _sync_names(self, folder):
        names = [name for name, node in self.names.items() if node is folder]
        rest = []
        for entries in self.unsynced:
            if os.path.dirname(entries[-1][0]) in names:
                _enter(self.durable, entries)
            else:
                rest.append(entries)
        self.unsynced = rest

    def view(self, dropped_names=(), content=lambda node: node.data):
        """Return names and nodes without some changes of names, with bytes chosen by `content`."""
        names = dict(self.durable)
        for number, entries in enumerate(self.unsynced):
            if number not in dropped_names:
                _enter(names, entries)
        copies = {}
        files = {}
        for name, node in names.items():
            parents = [str(parent) for parent in Path(name).parents if str(parent) != "."]
            if not all(parent in names for parent in parents):
                continue  # the folder that it was in is lost
            if id(node) not in copies:
                copies[id(node)] = node.copy()
                copies[id(node)].data = bytearray(content(node))
            files[name] = copies[id(node)]
        return files


def _enter(names, entries):
    for name, node in entries:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Disk:
    """The calls of one run in a folder, and what was there before it."""

    def __init__(self, folder, log_path, before=None):
        self.folder = Path(folder)
        self.before = before or {}  # name -> node
        self.calls = []
        if Path(log_path).exists():
            with open(log_path, "rb") as file:
                while file.peek(1):
                    self.calls.append(pickle.load(file))
        numbers = {node.inode: name for name, node in self.before.items()}
        for call in self.calls:
            assert call.operation not in ("create", "mkdir") or call.inode not in numbers, (
                f"{call.path} has the inode number of {numbers[call.inode]}"
            )

    def killed(self) -> Iterator[State]:
        """Yield the state before each call, and after the last."""
        tree = _Tree(self.before)
        for number, call in enumerate(self.calls):
            if call.operation != "mark":
                yield State("killed", number, tree.view(), False)
                tree.apply(call)
        yield State("killed", len(self.calls), tree.view(), False)

    def one_killed(self, process) -> Iterator[State]:
        """Yield the states before each call of a process; the others go on to their next mark."""
        for number, call in enumerate(self.calls):
            if call.process != process or call.operation == "mark":
                continue
            tree, ended = _Tree(self.before), {process}
            for later, other in enumerate(self.calls):
                if later >= number and other.operation == "mark":
                    ended.add(other.process)
                elif other.operation != "mark" and (later < number or other.process not in ended):
                    tree.apply(other)
            yield State(f"process {process} killed", number, tree.view(), False)

    def power_lost(self, seed=0) -> Iterator[State]:
        """Yield what a power loss before each call can leave, each state once."""
        rng, tree, seen = random.Random(seed), _Tree(self.before), set()
        for number, call in enumerate([*self.calls, Call(0, "mark")]):
            for kind, files in self._losses(tree, rng):
                key = hash(tuple((n, node.is_folder, bytes(node.data))
                                 for n, node in sorted(files.items())))  # fmt: skip
                if key not in seen:
                    seen.add(key)
                    yield State(kind, number, files, True)
            if call.operation != "mark":
                tree.apply(call)

    def _losses(self, tree, rng):
        names = range(len(tree.unsynced))
        synced = lambda node: node.synced  # noqa: E731
        zeros = lambda node: node.synced.ljust(len(node.data), b"\0")  # noqa: E731

        def torn(node):
            return (
                zeros(node)[:-PAGE] + node.data[-PAGE:] if len(node.data) > PAGE else synced(node)
            )

        def some(node):
            return rng.choice((synced, zeros, lambda node: node.data))(node)

        yield "all lost", tree.view(names, synced)
        yield "bytes lost, files shorter", tree.view((), synced)
        yield "bytes lost, files of zeros", tree.view((), zeros)
        yield "a page written", tree.view((), torn)
        if names:
            yield "names lost", tree.view(names)
            yield "a name lost", tree.view([rng.choice(names)])
            yield "a name kept", tree.view({*names} - {rng.choice(names)}, synced)
        half = [number for number in names if rng.random() < 0.5]
        yield "a random half", tree.view(half, some)

    def build(self, state):
        """Make the folder of a state; return its inode numbers now -> the recorded nodes."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if "" not in state.files:
            return {}
        self.folder.mkdir()
        nodes, first_names = {}, {}
        for name, node in sorted(state.files.items()):
            path = self.folder / name
            if node.is_folder:
                path.mkdir(exist_ok=True)
            elif id(node) in first_names:
                os.link(first_names[id(node)], path)
                continue
            else:
                first_names[id(node)] = path
                path.write_bytes(node.data)
                os.utime(path, ns=(node.times[0], node.times[0]))
            status = path.lstat()
            nodes[status.st_dev, status.st_ino] = node
        for name in state.files:
            if state.is_power_loss and name.endswith(".rankxform/lock"):
                os.utime(self.folder / name, (0, 0))
        return nodes


def contents_of(folder):
    """Return the files of a folder as nodes, all of it durable."""
    nodes, by_inode = {}, {}
    if not Path(folder).exists():
        return nodes
    for path in [Path(folder), *sorted(Path(folder).rglob("*"))]:
        status = path.lstat()
        if status.st_ino not in by_inode:
            node = by_inode[status.st_ino] = Node(status.st_ino, path.is_dir())
            if not node.is_folder:
                node.data = bytearray(path.read_bytes())
                node.synced = bytes(node.data)
            node.times = _times(status)
        name = str(path.relative_to(folder))
        nodes["" if name == "." else name] = by_inode[status.st_ino]
    return nodes


@contextmanager
def as_recorded(nodes):
    """Show programs the recorded inode numbers and times of built files, until they are removed."""
    real = {name: getattr(os, name) for name in ("stat", "lstat", "fstat", "open", "mkdir")}

    def shown(status):
        node = nodes.get((status.st_dev, status.st_ino))
        if node is None or node.is_folder:
            return status
        facts = {name: getattr(status, name) for name in dir(status) if name.startswith("st_")}
        return os.stat_result(
            (status.st_mode, node.inode, *status[2:]), {**facts, "st_ctime_ns": node.times[1]}
        )

    def looking(name):
        return lambda *args, **options: shown(real[name](*args, **options))

    def open_(path, flags, *args, **options):
        whole = whole_path(path, options.get("dir_fd"))
        is_new = flags & os.O_CREAT and not os.path.lexists(whole)
        fd = real["open"](path, flags, *args, **options)
        if is_new:  # it may have the number of one that was removed
            status = real["fstat"](fd)
            nodes.pop((status.st_dev, status.st_ino), None)
        return fd

    def mkdir(path, *args, **options):
        real["mkdir"](path, *args, **options)
        status = real["stat"](path)
        nodes.pop((status.st_dev, status.st_ino), None)

    with ExitStack() as stack:
        changed = {name: looking(name) for name in ("stat", "lstat", "fstat")}
        changed |= {"open": open_, "mkdir": mkdir, "fsync": lambda fd: None}
        for name, function in changed.items():
            stack.enter_context(mock.patch.object(os, name, function))
            accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10
            if accessor is not None and hasattr(accessor, name):
                stack.enter_context(mock.patch.object(accessor, name, staticmethod(function)))
        yield
