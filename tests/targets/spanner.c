/*
 * A program whose hits come in pairs. It does what it is told on standard input, and answers each command with one line.
 *
 *   pairs N         N times spanner:begin(key, number, "work N") and spanner:end(key, number, nanoseconds at least), in
 *                   one thread, with the thread's number as key
 *   threads T N     the same in each of T threads at once, which end before the answer
 *   recurse D       spanner:begin D times, then spanner:end D times
 *   begin KEY       spanner:begin(KEY, 0, "KEY")
 *   end KEY         spanner:end(KEY, 0, 0)
 *   die T           T threads, one after the other, that end between the two
 *   exec            execute itself between the two; answers as the new program
 *   quit
 *
 * The answer is "COMMAND NUMBER", nanoseconds between both probes of all pairs at most.
 */
#define _GNU_SOURCE
#include <sys/sdt.h>

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef PROVIDER
#define PROVIDER spanner
#endif

#define MAX_THREADS 64

static uint64_t longest;

static uint64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000ULL + time.tv_nsec;
}

static void __attribute__((noinline)) begin(uint64_t key, int32_t number, const char *text)
{
	STAP_PROBE3(PROVIDER, begin, key, number, text);
}

static void __attribute__((noinline)) end(uint64_t key, int32_t number, uint64_t elapsed)
{
	STAP_PROBE3(PROVIDER, end, key, number, elapsed);
}

static void pair(uint64_t key, int32_t number)
{
	char text[32];
	uint64_t before, within;

	snprintf(text, sizeof(text), "work %d", number % 7);
	before = now();
	begin(key, number, text);
	within = now();
	while (now() - within < (uint64_t)(number % 5) * 1000)
		;
	end(key, number, now() - within);
	__atomic_fetch_add(&longest, now() - before, __ATOMIC_RELAXED);
}

struct job {
	uint64_t key;
	long count;
};

static void *make_pairs(void *given)
{
	struct job *job = given;

	for (long number = 0; number < job->count; number++)
		pair(job->key, (int32_t)number);
	return NULL;
}

static void *only_begin(void *unused)
{
	begin(0, 0, "abandoned");
	return unused;
}

int main(int argc, char **argv)
{
	static char line[256];
	struct job jobs[MAX_THREADS];
	pthread_t ids[MAX_THREADS];
	unsigned long key;
	long count;
	int threads;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc > 1)
		puts("exec 0");
	else
		puts("ready");
	while (fgets(line, sizeof(line), stdin)) {
		line[strcspn(line, "\n")] = 0;
		longest = 0;
		if (sscanf(line, "pairs %ld", &count) == 1) {
			make_pairs(&(struct job){ 1, count });
		} else if (sscanf(line, "threads %d %ld", &threads, &count) == 2 && threads <= MAX_THREADS) {
			for (int i = 0; i < threads; i++) {
				jobs[i] = (struct job){ i, count };
				pthread_create(&ids[i], NULL, make_pairs, &jobs[i]);
			}
			for (int i = 0; i < threads; i++)
				pthread_join(ids[i], NULL);
		} else if (sscanf(line, "recurse %ld", &count) == 1) {
			for (long depth = 0; depth < count; depth++)
				begin(1, (int32_t)depth, "deep");
			for (long depth = count - 1; depth >= 0; depth--)
				end(1, (int32_t)depth, 0);
		} else if (sscanf(line, "begin %lu", &key) == 1) {
			begin(key, 0, line + strlen("begin "));
		} else if (sscanf(line, "end %lu", &key) == 1) {
			end(key, 0, 0);
		} else if (sscanf(line, "die %d", &threads) == 1) {
			for (int i = 0; i < threads; i++) {
				pthread_create(&ids[0], NULL, only_begin, NULL);
				pthread_join(ids[0], NULL);
			}
		} else if (!strcmp(line, "exec")) {
			begin(0, 0, "executing");
			execl("/proc/self/exe", argv[0], "again", NULL);
		} else if (!strcmp(line, "quit")) {
			break;
		}
		printf("%.20s %lu\n", line, (unsigned long)longest);
	}
	return 0;
}
