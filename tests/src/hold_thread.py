"""Stops one thread of a process, by its name, until standard input ends.

A signal stops a whole process; only a tracer can stop one thread of it.
"""

import ctypes
import os
import sys
import threading

SEIZE, INTERRUPT = 0x4206, 0x4207

pid, name = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4


def ptrace(request, thread):
    if libc.ptrace(request, thread, 0, 0) != 0:
        sys.exit(f"ptrace {request:#x}: {os.strerror(ctypes.get_errno())}")


def comm(thread):
    with open(f"/proc/{pid}/task/{thread}/comm") as file:
        return file.read().strip()


threads = [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
threads = [thread for thread in threads if comm(thread) == name]
if len(threads) != 1:
    sys.exit(f"{len(threads)} threads are called {name}")
ptrace(SEIZE, threads[0])
ptrace(INTERRUPT, threads[0])
print("held", flush=True)


def let_go():
    sys.stdin.read()
    # The end of a tracer lets its thread go on.
    os._exit(0)


threading.Thread(target=let_go).start()
# A thread that ends is not gone before its tracer knows, nor is its process.
while True:
    try:
        os.waitpid(threads[0], 0x40000000)
    except ChildProcessError:
        break
