"""The server of `warm.py`: imports torch once, and forks a program off itself for every stand-in that connects."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import threading
import types
from pathlib import Path

PRELOADED = (
    "numpy", "torch", "torch.distributed.pipelining", "torch.distributed.tensor.parallel", "torch.distributed.fsdp",
    "torch.distributed.run", "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch._subclasses.schema_check_mode", "torch.profiler._cupti_monitor", "numpy.ma", "encodings.ascii",
    "sentinel.collect.attach", "sentinel.daemon.daemon", "sentinel.daemon.http.app", "sentinel.daemon.http.event_loop",
    "sentinel.cli.serve", "sentinel.cli.run", "sentinel.cli.status", "sentinel.import_trial", "tests.support.frozen",
)  # fmt: skip


STAND_IN_S = 30.0
"""Longest that a stand-in may take, once connected, to say what it stands in for: one may be killed or stopped there."""


class Program:
    """One program, and the stand-in that waits for it."""

    def __init__(self, stand_in: socket.socket) -> None:
        self.stand_in = stand_in
        self.pid = self.pidfd = 0

    def begin(self) -> list[str] | None:
        """Fork; returns in the child its arguments, and None here. Raises ConnectionError where the stand-in is gone."""
        self.stand_in.settimeout(STAND_IN_S)
        try:
            reported, streams, _, _ = socket.recv_fds(self.stand_in, 2**20, 3)
        except TimeoutError:
            raise ConnectionError("the stand-in says nothing") from None
        if not reported:
            raise ConnectionError("the stand-in has ended")
        arguments, environment, folder, mask, ignored, blocked = json.loads(reported)
        sys.stdout.flush()
        sys.stderr.flush()
        # Until it has the stand-in's own mask, a signal for it waits.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if self.pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
            self.pidfd = os.pidfd_open(self.pid)
            # One that was killed meanwhile is seen by its socket, and its program is killed then.
            with contextlib.suppress(OSError):
                self.stand_in.send(str(self.pid).encode())
        else:
            os.setsid()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
        for stream in streams:
            os.close(stream)
        if self.pid:
            return None
        # What the server's own streams were made for, a file say, is not what these are.
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
        os.chdir(folder)
        os.umask(mask)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[1:1] = [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one and one not in sys.path]
        importlib.invalidate_caches()
        sys.executable = environment.get("PYTHON_EXEC", sys.executable)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return list(arguments)

    def end(self) -> None:
        """Tell the stand-in how its program ended."""
        _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(OSError):
            self.stand_in.send(str(os.waitstatus_to_exitcode(status)).encode())
        self.close()

    def close(self) -> None:
        self.stand_in.close()
        os.close(self.pidfd)


def serve(listener: socket.socket, owner: int) -> list[str]:
    """Answer stand-ins until the process `owner` is over; returns in each program, with its arguments."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    owner_fd = os.pidfd_open(owner)
    selector.register(owner_fd, selectors.EVENT_READ)
    programs: set[Program] = set()
    while True:
        for key, _ in selector.select():
            if key.fd == owner_fd:
                for program in programs:
                    _kill(program)
                shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)
                os._exit(0)
            elif key.data is None:
                program = Program(listener.accept()[0])
                try:
                    arguments = program.begin()
                except ConnectionError:
                    program.stand_in.close()
                    continue
                if arguments is not None:
                    selector.close()
                    listener.close()
                    os.close(owner_fd)
                    program.stand_in.close()
                    for other in programs:
                        other.close()
                    return arguments
                programs.add(program)
                selector.register(program.pidfd, selectors.EVENT_READ, program)
                selector.register(program.stand_in, selectors.EVENT_READ, program)
            elif key.data in programs:
                program = key.data
                if key.fd != program.pidfd:
                    _kill(program)
                programs.discard(program)
                selector.unregister(program.pidfd)
                selector.unregister(program.stand_in)
                program.end()


def _kill(program: Program) -> None:
    with contextlib.suppress(ProcessLookupError):
        try:
            os.killpg(program.pid, signal.SIGKILL)
        except ProcessLookupError:  # It has no session of its own yet.
            os.kill(program.pid, signal.SIGKILL)


def run(arguments: list[str]) -> None:
    """Be the interpreter of these arguments."""
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        del arguments[0]
    what, *rest = arguments
    if what == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *rest[1:]]
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path[0] = str(Path(what).resolve().parent)
        sys.argv = arguments
        runpy.run_path(what, run_name="__main__")


def code_of(arguments: list[str]) -> int:
    """Run a program, and return its exit code, below 0 the signal that ends it: what an interpreter makes of its end.

    A process that the program forks off itself, and that ends as an interpreter does, comes by here too.
    """
    try:
        run(arguments)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end(code: int) -> None:
    """End this process as an interpreter does, but for taking torch apart, which takes a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    for name in (*PRELOADED, *sys.argv[3:]):
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as begins:
        draft = Path(sys.argv[1]).with_suffix(".new")
        begins.bind(str(draft))
        begins.listen(64)
        draft.rename(sys.argv[1])
        arguments = serve(begins, int(sys.argv[2]))
    end(code_of(arguments))
