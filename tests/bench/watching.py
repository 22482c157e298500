"""What watching costs: 1,000 programs started in a second, 1,000 processes that sleep, a memfd library that appears."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from statistics import median

from stapsdtd.kernel.tracefs import Tracefs
from tests.attached import own
from tests.bench.report import Figure
from tests.bench.setup import BUFFER_KIB, Setup, cpu_ns, percentile
from tests.support import Recorder, resident_kib, wait_for

RATE = 1000
PROBES = 60
PROCESSES = 1000
LIBRARIES = 20

STORM = r"""
#define _GNU_SOURCE
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
extern char **environ;
/* storm PROGRAM RATE COUNT */
int main(int argc, char **argv) {
    long rate = atol(argv[2]), count = atol(argv[3]);
    struct timespec next;
    clock_gettime(CLOCK_MONOTONIC, &next);
    while (count-- > 0) {
        pid_t pid;
        char *arguments[] = {argv[1], NULL};
        if (posix_spawn(&pid, argv[1], NULL, NULL, arguments, environ)) return 1;
        while (waitpid(-1, NULL, WNOHANG) > 0);
        next.tv_nsec += 1000000000 / rate;
        next.tv_sec += next.tv_nsec / 1000000000;
        next.tv_nsec %= 1000000000;
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL);
    }
    while (waitpid(-1, NULL, 0) > 0);
    return 0;
}
"""

_LIBRARY = r"""
#define _SDT_HAS_SEMAPHORES 1
#include <sys/sdt.h>
volatile unsigned short watched_called_semaphore __attribute__((section(".probes")));
void called(int i) { STAP_PROBE1(watched, called, i); }
"""

_LOADER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <time.h>
#include <unistd.h>
static long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000 + time.tv_nsec;
}
/* loader LIBRARY COUNT: load so many copies, which stay, and print for each the nanoseconds until its probe is armed */
int main(int argc, char **argv) {
    char path[64];
    for (long count = atol(argv[2]); count > 0; count--) {
        int file = open(argv[1], O_RDONLY), memory = memfd_create("watched", MFD_CLOEXEC);
        while (sendfile(memory, file, NULL, 1 << 20) > 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", memory);
        usleep(20000);
        long begin = now();
        void *library = dlopen(path, RTLD_NOW);
        volatile unsigned short *semaphore = library ? dlsym(library, "watched_called_semaphore") : NULL;
        if (!semaphore) return 1;
        while (!*semaphore)
            if (now() - begin > 10000000000) return 1; else usleep(10);
        printf("%ld\n", now() - begin);
        close(file);
    }
    return 0;
}
"""


def run(setup: Setup) -> list[Figure]:
    return _storms(setup) + _many_processes(setup) + _libraries(setup)


def _storms(setup: Setup) -> list[Figure]:
    storm = compiled(setup.folder, "storm", STORM)
    program = compiled(setup.folder, "program", _program())
    count = RATE * _seconds(setup)
    unwatched, beside, within, missed = [], [], [], []

    def share_of(what: str) -> float:
        return share(daemon.pid, [str(storm), what, str(RATE), str(count)])

    with setup.daemon() as daemon:
        for _ in range(setup.repeats):
            unwatched.append(share_of("/bin/true"))
            with subprocess.Popen([program, "stay"], stdin=subprocess.PIPE) as staying:
                with Recorder(daemon.target, "storm:*", kernel_buffer_kib=BUFFER_KIB) as recorder:
                    wait_for(lambda: len(recorder.armed()) == PROBES, "the program to be armed")
                    beside.append(share_of("/bin/true"))
                    within.append(share_of(str(program)))
                    account = recorder.finish()
                missed.append(count - account.fired)
                staying.kill()
    shares = median(unwatched) * 100, median(beside) * 100, median(within) * 100
    return [
        Figure("daemon, 1,000 exec/s, nothing subscribed", shares[0], "% of a core", None, "<= 15 %", shares[0] <= 15),
        Figure("daemon, 1,000 exec/s, 60 probes armed", shares[1], "% of a core", None, "<= 25 %", shares[1] <= 25),
        Figure(
            "daemon, 1,000 exec/s that fire one of them", shares[2], "% of a core", None, "<= 25 %", shares[2] <= 25
        ),
        Figure("hits of these that were missed", median(missed), "", None, "0", not any(missed)),
    ]


def _program() -> str:
    """It has PROBES probes, of which it fires one and ends, or with an argument waits instead."""
    others = "\n".join(f"STAP_PROBE1(storm, other{number}, c);" for number in range(PROBES - 1))
    return f"""
#include <sys/sdt.h>
#include <unistd.h>
int main(int c, char **v) {{
    if (c > 1) {{ pause(); {others} }}
    STAP_PROBE1(storm, begin, c);
    return 0;
}}
"""


def _many_processes(setup: Setup) -> list[Figure]:
    ready, idle, resident = [], [], []
    processes = [subprocess.Popen(["/bin/sleep", "1000"]) for _ in range(PROCESSES)]
    try:
        for _ in range(setup.repeats):
            begin = time.perf_counter()
            with setup.daemon() as daemon:
                ready.append(time.perf_counter() - begin)
                idle.append(share(daemon.pid, ["/bin/sleep", str(_seconds(setup))]))
                resident.append(resident_kib(daemon.pid) / 1024)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
    start, idling, memory = median(ready), median(idle) * 100, median(resident)
    return [
        Figure("daemon starts among 1,000 processes", start, "s", None, "<= 1 s", start <= 1),
        Figure("daemon idles among 1,000 processes", idling, "% of a core", None, "< 0.5 %", idling < 0.5),
        Figure("its memory then", memory, "MiB", None, "<= 90 MiB", memory <= 90),
    ]


def _libraries(setup: Setup) -> list[Figure]:
    library = compiled(setup.folder, "watched.so", _LIBRARY, "-shared", "-fPIC")
    loader = compiled(setup.folder, "loader", _LOADER, "-ldl")
    times: list[int] = []
    tracefs = Tracefs.locate()
    with setup.daemon() as daemon, Recorder(daemon.target, "watched:*"):
        command = [str(loader), str(library), str(LIBRARIES)]
        for _ in range(setup.repeats):
            lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
            times.extend(map(int, lines))
            # to disarm takes the daemon long, and is no part of what is measured
            wait_for(lambda: not own(tracefs, daemon.pid), "the libraries to be let go")
    half, most = percentile(times, 0.5) / 1e9, percentile(times, 0.99) / 1e9
    return [
        Figure("a memfd library from dlopen to armed, p50", half, "s", None, "<= 3 ms", half <= 0.003),
        Figure("a memfd library from dlopen to armed, p99", most, "s", None, "<= 10 ms", most <= 0.01),
    ]


def _seconds(setup: Setup) -> int:
    return 2 if setup.quick else 5


def compiled(folder: Path, name: str, source: str, *flags: str) -> Path:
    output = folder / name
    subprocess.run(["gcc", "-O1", "-xc", "-", "-o", str(output), *flags], input=source, text=True, check=True)
    return output


def share(pid: int, command: list[str]) -> float:
    """Answer how much of a core a process takes while a command runs."""
    begin, used = time.perf_counter_ns(), cpu_ns(pid)
    subprocess.run(command, check=True)
    return (cpu_ns(pid) - used) / (time.perf_counter_ns() - begin)
