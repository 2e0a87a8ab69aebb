"""A wall clock that can be put forward and back under a running process; its monotonic clock stays right.

A tiny library is loaded into the process (LD_PRELOAD) and adds the seconds that stand in a file to every answer.
libfaketime would do, but the version that Debian ships makes time.sleep fail with EINVAL.
"""

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static volatile long *error_s;

/* Not when the program starts: a process that was forked is told its file only then. */
static void begin(void) {
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) error_s = page;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, at);
    if (!error_s && clock == CLOCK_REALTIME) begin();
    if (code == 0 && clock == CLOCK_REALTIME && error_s) at->tv_sec += *error_s;
    return code;
}
"""
#: The C compiler; without one no clock can be put wrong.
COMPILER = shutil.which("cc")


class Clock:
    """The clock of one process after the other, as long as they get `environment`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._library = file.parent / "clock.so"
        self.put_wrong(0)
        if COMPILER and not self._library.exists():
            command = [COMPILER, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(self._library), "-ldl"]
            subprocess.run(command, input=SOURCE.encode(), check=True, timeout=60)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(self._file)} if COMPILER else {}

    def put_wrong(self, seconds: int) -> None:
        """By so many seconds, from now on."""
        with self._file.open("r+b" if self._file.exists() else "w+b") as file:
            file.write(struct.pack("@l", seconds))
