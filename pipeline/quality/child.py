"""What runs inside the sandbox: gives up its rights, runs a program, says how it went.

Started by sandbox.py as a script of its own, with nothing but the standard library, in an empty
folder and an empty environment. Rights are given up in layers; each is tried, those that the system
has are named in the report: limits of the system on time, memory, files and processes; a filter of
system calls (seccomp: no process, no socket, no signal, no change of rights); writing in this
folder only (Landlock); and a hook inside the interpreter that refuses all of these by name. The
first three hold whatever the program does; the hook, which is all there is on other systems, stops
accidents, not attacks.
"""

import ctypes
import json
import os
import platform
import resource
import struct
import sys
import types
from collections.abc import Callable
from typing import Any

REPORT = "report.json"
DETAIL_CHARS = 300
FILE_BYTES = 2**20  # of any file that is written
OPEN_FILES = 64

DENIED = {  # by machine: (its number in a seccomp filter, system calls that are refused)
    "x86_64": (
        0xC000003E,
        [
            *(41, 42, 53, 56, 57, 58, 59, 62, 90, 91, 92, 93, 94, 101, 132, 155),
            *(160, 161, 165, 200, 234, 235, 250, 260, 261, 268, 272, 280, 298, 302, 308, 310),
            *(311, 321, 322, 323, 424, 425, 434, 435, 438, 452),
        ],
    ),
    "aarch64": (
        0xC00000B7,
        [
            *(40, 41, 51, 52, 53, 54, 55, 88, 97, 117, 129, 130, 131, 164, 198, 199),
            *(203, 220, 221, 241, 261, 268, 270, 271, 280, 281, 282, 424, 425, 434, 435, 438),
            452,
        ],
    ),
}
X32 = 0x40000000  # x86-64's other table of system calls
LOAD, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # REFUSE: the call fails with EPERM
SET_NO_NEW_PRIVS, SET_SECCOMP, FILTER_MODE = 38, 22, 2

WRITING = 0b1_1111_1111_0010  # Landlock: write, remove and make files of every kind (version 1)
REFER, TRUNCATE = 1 << 13, 1 << 14  # of versions 2 and 3
CREATE_RULESET, ADD_RULE, RESTRICT_SELF, PATH_BENEATH = 444, 445, 446, 1

REFUSED = (  # audit events of the interpreter
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.kill"),
    *("os.killpg", "os.chmod", "os.chown", "os.lchmod", "os.setxattr", "os.startfile", "pty.spawn"),
    *("subprocess.Popen", "ctypes.dlopen", "ctypes.dlsym", "ctypes.call_function"),
    *("resource.setrlimit", "resource.prlimit", "socket.__new__", "socket.connect", "socket.bind"),
    *("signal.pthread_kill", "_thread.start_new_thread", "sys.remote_exec"),
)
CHANGES = (
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"),
    "os.utime",
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> None:
    """Read the job from stdin, run it, write the report."""
    job = json.load(sys.stdin)
    folder = os.getcwd()
    limit(job["cpu_seconds"], job["memory_bytes"])
    layers = ["limits"]
    layers += ["folder"] if restrict_writing(folder) else []
    layers += ["calls"] if filter_calls() else []
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    file = os.open(REPORT, os.O_WRONLY | os.O_CREAT)
    write, leave, dumps = os.write, os._exit, json.dumps  # the program may put others in place
    sys.addaudithook(guard(folder))
    status, detail = run(job["program"])
    report = {"token": job["token"], "layers": layers, "status": status}
    write(file, dumps({**report, "detail": detail[:DETAIL_CHARS]}).encode())
    leave(0)  # what the program left behind does not run


def run(program: str) -> tuple[str, str]:
    """passed, failed (an exception, be it an assertion's) or error (it is no program)."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    sys.setrecursionlimit(5000)
    try:
        code = compile(program, "solution.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return "error", f"{type(error).__name__}: {error}"
    try:
        exec(code, module.__dict__)  # the point of it all
    except MemoryError:
        return "error", "out of memory"
    except BaseException as error:  # SystemExit too: the tests have not run to their end
        return "failed", f"{type(error).__name__}: {error}"
    return "passed", ""


def limit(cpu_seconds: int, memory_bytes: int) -> None:
    """Limits that the process cannot raise again (root may, but for the filter of calls)."""
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    if sys.platform == "linux":
        limits[resource.RLIMIT_AS] = memory_bytes
    for name, value in limits.items():
        _, most = resource.getrlimit(name)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(name, (value, value))


def restrict_writing(folder: str) -> bool:
    """Whether from now on only files below `folder` can be written, made or removed."""
    if sys.platform != "linux" or not _no_new_rights():
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    rights = WRITING | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    handled = ctypes.c_uint64(rights)
    rules = libc.syscall(CREATE_RULESET, ctypes.byref(handled), 8, 0)
    if rules < 0:
        return False
    inside = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, inside))
    done = libc.syscall(ADD_RULE, rules, PATH_BENEATH, rule, 0) == 0
    done = done and libc.syscall(RESTRICT_SELF, rules, 0) == 0
    os.close(inside)
    os.close(rules)
    return done


def filter_calls() -> bool:
    """Whether from now on the system refuses new processes, sockets, signals and other rights."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in DENIED or not _no_new_rights():
        return False
    number, calls = DENIED[machine]
    steps = [(LOAD, 0, 0, 4), (IF_EQUAL, 1, 0, number), (RETURN, 0, 0, REFUSE), (LOAD, 0, 0, 0)]
    if machine == "x86_64":
        steps += [(IF_AT_LEAST, 0, 1, X32), (RETURN, 0, 0, REFUSE)]
    for call in calls:
        steps += [(IF_EQUAL, 0, 1, call), (RETURN, 0, 0, REFUSE)]
    steps.append((RETURN, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(
        struct.pack("@HP", len(steps), ctypes.addressof(code))
    )  # struct sock_fprog
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_ulong(ctypes.addressof(program))
    zero = ctypes.c_ulong(0)
    mode = ctypes.c_ulong(FILTER_MODE)
    return libc.prctl(SET_SECCOMP, mode, address, zero, zero) == 0


def _no_new_rights() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    one, zero = ctypes.c_ulong(1), ctypes.c_ulong(0)
    return libc.prctl(SET_NO_NEW_PRIVS, one, zero, zero, zero) == 0


def guard(folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    """The hook: raises PermissionError where something refused is about to happen."""
    resolve, join, separator = os.path.realpath, os.path.join, os.sep
    decode = os.fsdecode

    def inside(path: Any) -> bool:
        if isinstance(path, int) or path is None:
            return True  # a file that is open already
        whole = resolve(join(folder, decode(path)))
        return whole == folder or whole.startswith(folder + separator)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in REFUSED:
            raise PermissionError(f"{event} is refused in the sandbox")
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITES and not inside(path):
                raise PermissionError(f"writing {path!r} is refused in the sandbox")
        elif event in CHANGES:
            paths = [one for one in arguments if isinstance(one, str | bytes)]
            if not all(map(inside, paths)):
                raise PermissionError(f"{event} is refused in the sandbox")

    return hook


if __name__ == "__main__":
    main()
