/*
 * A program with the probes spans:begin and spans:end, which says what it did with them.
 *
 * A line on standard input is an order, upon which each of THREADS threads does something COUNT times:
 *
 *   pair COUNT THREADS      begin(number, thread), end(number, thread)
 *   nest COUNT THREADS      the same with two more begin() in between
 *   begin COUNT THREADS     begin(number, thread); then the thread ends
 *   end COUNT THREADS       end(number, thread)
 *   exec COUNT THREADS      begin(number, thread); then a thread that is not the main one executes this program anew
 *   stay COUNT THREADS      begin(number, thread), in the main thread
 *
 * A third argument of begin is signed and of 32 bits, -number. The answer, when that is done, is
 *
 *   done NANOSECONDS
 *
 * the sum of the times from before each begin to after its end, in which nothing else takes time.
 */
#define _GNU_SOURCE
#include <sys/sdt.h>

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 2000

struct thread {
	pthread_t id;
	uint64_t number;
	int64_t elapsed_ns;
};

static char order[20];
static uint64_t count;
static char *path;

static int64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000ll + time.tv_nsec;
}

static void __attribute__((noinline)) begin(uint64_t number, uint64_t thread, int32_t negative)
{
	STAP_PROBE3(spans, begin, number, thread, negative);
}

static void __attribute__((noinline)) end(uint64_t number, uint64_t thread)
{
	STAP_PROBE2(spans, end, number, thread);
}

static void *work(void *argument)
{
	struct thread *thread = argument;

	for (uint64_t number = 0; number < count; number++) {
		int64_t begin_ns = now();

		if (strcmp(order, "end"))
			begin(number, thread->number, -(int32_t)number);
		if (!strcmp(order, "nest")) {
			begin(number, thread->number, 1);
			begin(number, thread->number, 2);
		}
		if (!strcmp(order, "pair") || !strcmp(order, "nest") || !strcmp(order, "end"))
			end(number, thread->number);
		thread->elapsed_ns += now() - begin_ns;
	}
	if (!strcmp(order, "exec"))
		execl(path, path, (char *)NULL);
	return NULL;
}

int main(int argc, char **argv)
{
	static struct thread all[MAX_THREADS];
	char line[200];

	(void)argc;
	path = argv[0];
	setvbuf(stdout, NULL, _IOLBF, 0);
	printf("ready\n");
	while (fgets(line, sizeof(line), stdin)) {
		uint64_t threads;
		int64_t elapsed_ns = 0;

		if (sscanf(line, "%19s %lu %lu", order, &count, &threads) != 3 || threads > MAX_THREADS) {
			fprintf(stderr, "no order: %s", line);
			return 2;
		}
		memset(all, 0, sizeof(all));
		for (uint64_t number = 0; number < threads; number++) {
			all[number].number = number;
			if (!strcmp(order, "stay"))
				work(&all[number]);
			else
				pthread_create(&all[number].id, NULL, work, &all[number]);
		}
		for (uint64_t number = 0; number < threads; number++) {
			if (strcmp(order, "stay"))
				pthread_join(all[number].id, NULL);
			elapsed_ns += all[number].elapsed_ns;
		}
		printf("done %ld\n", elapsed_ns);
	}
	return 0;
}
