/*
 * Threads that are moved to another CPU between two probes, and back before the next pair.
 *
 *   migrating T N   in each of T threads N times migrating:start(thread, number), the other CPU, migrating:done(thread,
 *                   number)
 */
#define _GNU_SOURCE
#include <sys/sdt.h>

#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>

#ifndef PROVIDER
#define PROVIDER migrating
#endif

#define MAX_THREADS 64

static long count;
static int cpus[2];

static void move_to(int cpu)
{
	cpu_set_t one;

	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	/* the kernel moves the thread before this returns */
	sched_setaffinity(0, sizeof(one), &one);
}

static void *migrate(void *argument)
{
	uint64_t thread = (uintptr_t)argument;

	for (int64_t number = 1; number <= count; number++) {
		move_to(cpus[thread % 2]);
		STAP_PROBE2(PROVIDER, start, thread, number);
		move_to(cpus[(thread + 1) % 2]);
		STAP_PROBE2(PROVIDER, done, thread, number);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	int threads = argc > 2 ? atoi(argv[1]) : 0, found = 0;
	pthread_t ids[MAX_THREADS];
	cpu_set_t all;

	sched_getaffinity(0, sizeof(all), &all);
	for (int cpu = 0; cpu < CPU_SETSIZE && found < 2; cpu++)
		if (CPU_ISSET(cpu, &all))
			cpus[found++] = cpu;
	if (threads < 1 || threads > MAX_THREADS || found < 2)
		return 2;
	count = atol(argv[2]);
	for (int thread = 0; thread < threads; thread++)
		pthread_create(&ids[thread], NULL, migrate, (void *)(uintptr_t)thread);
	for (int thread = 0; thread < threads; thread++)
		pthread_join(ids[thread], NULL);
	return 0;
}
