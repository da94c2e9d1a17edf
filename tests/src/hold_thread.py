"""Stops one thread of a process, by its name: is ready for it first, stops it when a line comes,
and lets it go on when standard input ends.

A signal stops a whole process; only a tracer can stop one thread of it. With a number of
milliseconds the thread goes on, and stands for that long before and after each of its system
calls.
"""

import ctypes
import os
import signal
import sys
import threading
import time

SEIZE, INTERRUPT, SYSCALL = 0x4206, 0x4207, 24
ALL_THREADS = 0x40000000

pid, name = sys.argv[1:3]
pause_ms = int(sys.argv[3]) if len(sys.argv) > 3 else None
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4


def ptrace(request, thread):
    if libc.ptrace(request, thread, 0, 0) != 0:
        sys.exit(f"ptrace {request:#x}: {os.strerror(ctypes.get_errno())}")


def of(thread, what):
    with open(f"/proc/{pid}/task/{thread}/{what}") as file:
        return file.read().strip()


def let_go():
    sys.stdin.read()
    # The end of a tracer lets its thread go on.
    os._exit(0)


threads = [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
threads = [thread for thread in threads if of(thread, "comm") == name]
if len(threads) != 1:
    sys.exit(f"{len(threads)} threads are called {name}")
print("ready", flush=True)
if not sys.stdin.readline():
    sys.exit()
ptrace(SEIZE, threads[0])
ptrace(INTERRUPT, threads[0])
while of(threads[0], "stat").rpartition(")")[2].split()[0] != "t":
    pass
print("held", flush=True)
threading.Thread(target=let_go).start()
# A thread that ends is not gone before its tracer knows, nor is its process.
while True:
    try:
        _, status = os.waitpid(threads[0], ALL_THREADS)
    except ChildProcessError:
        break
    if pause_ms is None or not os.WIFSTOPPED(status):
        continue
    time.sleep(pause_ms / 1000)
    stopped_by = os.WSTOPSIG(status)
    # What is no system call and no other stop of the tracer's is a signal for the thread.
    is_signal = stopped_by != signal.SIGTRAP and status >> 16 == 0
    # One that was killed meanwhile is waited for once more.
    libc.ptrace(SYSCALL, threads[0], 0, stopped_by if is_signal else 0)
