/* Executes its text from elsewhere, as programs do that want it in huge pages, or does what only looks like that.
 *
 *     ready                 at the start
 *     page, text, shared    move the page with the probe, all text, or the page to a memfd: "moved 0"
 *     jit                   map anonymous executable memory elsewhere
 *     unmap                 unmap the page with a probe that is not fired
 *     drop                  drop the page with the probe, which comes back from the file
 *     fire N                "fired N"
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sdt.h>
#include <unistd.h>

#define PAGE 4096

/* in pages of their own */
__attribute__((noinline, aligned(PAGE), section(".text.hot"))) static void hit(long i)
{
    DTRACE_PROBE1(PROVIDER, hit, i);
}

__attribute__((noinline, aligned(PAGE), used, section(".text.cold"))) void never(void)
{
    DTRACE_PROBE(PROVIDER, never);
}

__attribute__((noinline, aligned(PAGE), section(".text.rest"))) static void other(void)
{
    DTRACE_PROBE(PROVIDER, other);
}

static char *page_of(void *place)
{
    return (char *)((uintptr_t)place & ~(uintptr_t)(PAGE - 1));
}

static void check(int ok, const char *what)
{
    if (!ok) {
        perror(what);
        exit(1);
    }
}

/* Put a copy of memory in its own place. */
static void move(char *place, size_t size, int descriptor)
{
    int flags = descriptor < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    if (descriptor >= 0)
        check(ftruncate(descriptor, size) == 0, "ftruncate");
    char *copy = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, descriptor, 0);
    check(copy != MAP_FAILED, "mmap");
    memcpy(copy, place, size);
    check(mprotect(copy, size, PROT_READ | PROT_EXEC) == 0, "mprotect");
    check(mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, place) == place, "mremap");
}

static void move_text(void)
{
    char line[512];
    unsigned long start, end;
    FILE *maps = fopen("/proc/self/maps", "r");
    check(maps != NULL, "/proc/self/maps");
    while (fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx r-xp", &start, &end) == 2 && strstr(line, "r-xp") && start <= (uintptr_t)hit &&
            (uintptr_t)hit < end) {
            fclose(maps);
            move((char *)start, end - start, -1);
            return;
        }
    check(0, "its own text");
}

static void do_as_told(const char *command)
{
    if (!strcmp(command, "page"))
        move(page_of(hit), PAGE, -1);
    else if (!strcmp(command, "text"))
        move_text();
    else if (!strcmp(command, "shared"))
        move(page_of(hit), PAGE, memfd_create("text", 0));
    else if (!strcmp(command, "jit"))
        check(mmap(NULL, PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED, "mmap");
    else if (!strcmp(command, "unmap"))
        check(munmap(page_of(never), PAGE) == 0, "munmap");
    else if (!strcmp(command, "drop"))
        check(madvise(page_of(hit), PAGE, MADV_DONTNEED) == 0, "madvise");
}

int main(void)
{
    char command[32];
    long count;
    puts("ready");
    fflush(stdout);
    while (scanf("%31s", command) == 1) {
        if (!strcmp(command, "fire") && scanf("%ld", &count) == 1) {
            for (long i = 0; i < count; i++)
                hit(i);
            other();
            printf("fired %ld\n", count);
        } else {
            do_as_told(command);
            puts("done 0");
        }
        fflush(stdout);
    }
    return 0;
}
