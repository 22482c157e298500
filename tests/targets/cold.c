/*
 * Strings and numbers that are not in memory when a probe fires; see tests/kernel/test_cold.py.
 *
 *   cold strings COUNT   fires cold:string(number, "cold-<number>", pid), each string in a page of its own that nobody
 *                        has read
 *   cold warm            fires cold:warm(number, "warm", pid) as fast as it can, until there is another line
 *   cold constant COUNT  fires cold:constant("only the probe names it", a number, number), both in a page of the
 *                        program's constants that it never reads
 *   cold again PATH      fires cold:again(the text at the begin of the file) once for each line on standard input
 *
 * All run on CPU 0, and begin with a line on standard input, after they have said "ready". The answer is "done PID".
 */
#define _GNU_SOURCE
#include <sys/sdt.h>

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096

/* further from anything else than what the kernel maps around a page that is read (fault_around_bytes) */
__asm__(".pushsection .rodata.lonely, \"a\"\n"
	".balign 262144\n"
	".zero 131072\n"
	"lonely_number: .quad -1234567890123\n"
	"lonely_text: .asciz \"only the probe names it\"\n"
	".zero 131072\n"
	".popsection\n");
extern const long lonely_number __attribute__((visibility("hidden")));
extern const char lonely_text[] __attribute__((visibility("hidden")));

static void to_first_cpu(void)
{
	cpu_set_t first;

	CPU_ZERO(&first);
	CPU_SET(0, &first);
	sched_setaffinity(0, sizeof(first), &first);
}

static void started(void)
{
	puts("ready");
	fflush(stdout);
	getchar();
}

static const char *cold_pages(long count)
{
	char page[PAGE] = "", path[] = "/var/tmp/cold.XXXXXX";
	int file = mkstemp(path);
	char *pages;

	unlink(path);
	for (long number = 0; number < count; number++) {
		sprintf(page, "cold-%ld", number);
		if (write(file, page, sizeof(page)) != sizeof(page))
			exit(1);
	}
	fsync(file);
	posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
	pages = mmap(0, count * PAGE, PROT_READ, MAP_SHARED, file, 0);
	if (pages == MAP_FAILED)
		exit(1);
	madvise(pages, count * PAGE, MADV_RANDOM);
	return pages;
}

static void again(const char *path)
{
	const char *text = mmap(0, PAGE, PROT_READ, MAP_SHARED, open(path, O_RDONLY), 0);

	if (text == MAP_FAILED)
		exit(1);
	while (getchar() == '\n') {
		STAP_PROBE1(cold, again, text);
		puts("fired");
		fflush(stdout);
	}
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	long count = argc > 2 ? atol(argv[2]) : 0;

	to_first_cpu();
	if (!strcmp(what, "strings")) {
		const char *pages = cold_pages(count);

		started();
		for (long number = 0; number < count; number++)
			STAP_PROBE3(cold, string, number, pages + number * PAGE, getpid());
	} else if (!strcmp(what, "warm")) {
		struct pollfd input = {.fd = 0, .events = POLLIN};

		started();
		for (long number = 0; number % 1024 || !poll(&input, 1, 0); number++)
			STAP_PROBE3(cold, warm, number, "warm", getpid());
	} else if (!strcmp(what, "constant")) {
		started();
		for (long number = 0; number < count; number++)
			STAP_PROBE3(cold, constant, (const char *)lonely_text, lonely_number, number);
	} else if (!strcmp(what, "again")) {
		started();
		again(argv[2]);
	} else {
		return 2;
	}
	printf("done %d\n", getpid());
}
