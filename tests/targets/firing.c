/*
 * A program that only fires firing:hit, which has three integer arguments and no semaphore, and says what that cost.
 *
 * A line on standard input is an order of four numbers,
 *
 *   COUNT SECONDS RATE THREADS
 *
 * upon which each of THREADS threads fires COUNT times at the most and for SECONDS at the most (0: without that bound),
 * RATE times a second, or as fast as it can (0). The first argument counts on in each thread, from 0. The answer, when
 * the threads are done, is a line of JSON:
 *
 *   {"fired": 1000, "begin_ns": 123456789, "wall_ns": 500000, "cpu_ns": 480000}
 *
 * begin_ns is CLOCK_MONOTONIC, wall_ns the time until the last thread was done, and cpu_ns what all threads spent in
 * the firing itself, without the pauses in between.
 *
 * With -DTEXTS=N the second argument is one of N strings of 63 bytes in turn.
 */
#define _GNU_SOURCE
#include <sys/sdt.h>

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>

#define SECOND 1000000000ll
#define MAX_THREADS 64
#define FULL_SPEED_BATCH 8192	/* hits between two looks at the clock */

struct order {
	uint64_t count;
	int64_t wall_ns;
	int64_t rate;
};

struct thread {
	pthread_t id;
	int number;
	const struct order *order;
	uint64_t fired;
	int64_t cpu_ns;
	int64_t end_ns;
};

static int64_t now(clockid_t clock)
{
	struct timespec time;

	clock_gettime(clock, &time);
	return time.tv_sec * SECOND + time.tv_nsec;
}

static void sleep_until(int64_t ns)
{
	struct timespec time = {ns / SECOND, ns % SECOND};

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL))
		;
}

#ifdef TEXTS
static char texts[TEXTS][64];

static void __attribute__((noinline)) hit(uint64_t number, int32_t negative, int32_t thread)
{
	(void)negative;
	STAP_PROBE3(firing, hit, number, &texts[number % TEXTS][0], thread);
}
#else
static void __attribute__((noinline)) hit(uint64_t number, int32_t negative, int32_t thread)
{
	STAP_PROBE3(firing, hit, number, negative, thread);
}
#endif

static void *fire(void *argument)
{
	struct thread *thread = argument;
	const struct order *order = thread->order;
	uint64_t batch = order->rate ? (order->rate + 999) / 1000 : FULL_SPEED_BATCH;
	int64_t begin = now(CLOCK_MONOTONIC);

	while (thread->fired < order->count && now(CLOCK_MONOTONIC) - begin < order->wall_ns) {
		uint64_t left = order->count - thread->fired;
		uint64_t end = thread->fired + (left < batch ? left : batch);
		int64_t cpu = now(CLOCK_THREAD_CPUTIME_ID);

		for (; thread->fired < end; thread->fired++)
			hit(thread->fired, -(int32_t)thread->fired, thread->number);
		thread->cpu_ns += now(CLOCK_THREAD_CPUTIME_ID) - cpu;
		if (order->rate)
			sleep_until(begin + (int64_t)((double)thread->fired * SECOND / order->rate));
	}
	thread->end_ns = now(CLOCK_MONOTONIC);
	return NULL;
}

int main(void)
{
	char line[200];
	double seconds;
	int threads;

#ifdef TEXTS
	for (int i = 0; i < TEXTS; i++)
		snprintf(texts[i], sizeof(texts[i]), "%063d", i);
#endif
	setvbuf(stdout, NULL, _IOLBF, 0);
	while (fgets(line, sizeof(line), stdin)) {
		struct thread all[MAX_THREADS] = {0};
		struct thread sum = {0};
		struct order order;
		int64_t begin = now(CLOCK_MONOTONIC);

		if (sscanf(line, "%lu %lf %ld %d", &order.count, &seconds, &order.rate, &threads) != 4 ||
		    (!order.count && !seconds) || threads < 1 || threads > MAX_THREADS) {
			fprintf(stderr, "not COUNT SECONDS RATE THREADS: %s", line);
			return 2;
		}
		order.wall_ns = seconds ? (int64_t)(seconds * SECOND) : INT64_MAX;
		order.count = order.count ? order.count : UINT64_MAX;
		for (int i = 0; i < threads; i++) {
			all[i].number = i;
			all[i].order = &order;
			pthread_create(&all[i].id, NULL, fire, &all[i]);
		}
		for (int i = 0; i < threads; i++) {
			pthread_join(all[i].id, NULL);
			sum.fired += all[i].fired;
			sum.cpu_ns += all[i].cpu_ns;
			if (all[i].end_ns > sum.end_ns)
				sum.end_ns = all[i].end_ns;
		}
		printf("{\"fired\": %lu, \"begin_ns\": %ld, \"wall_ns\": %ld, \"cpu_ns\": %ld}\n",
		       sum.fired, begin, sum.end_ns - begin, sum.cpu_ns);
	}
	return 0;
}
