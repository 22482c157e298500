/*
 * fire COUNT [THREADS [WAITS]] fires heldout:hit COUNT times in each of THREADS threads (1), with known values.
 *
 * If WAITS is 1, it begins when somebody traces the probe, or after 30 seconds. It prints the nanoseconds that a hit took
 * and the semaphore's value.
 */
#define _SDT_HAS_SEMAPHORES 1
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/sdt.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 64

__extension__ unsigned short heldout_hit_semaphore __attribute__((used, section(".probes")));

static const char *text = "hello from the held-out program";
static long count;

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1e9 + time.tv_nsec;
}

static void *fire(void *thread)
{
	for (long i = 0; i < count; i++)
		STAP_PROBE3(heldout, hit, i, text, (short)(-3 - (long)thread));
	return NULL;
}

int main(int argc, char **argv)
{
	long threads = argc > 2 ? atol(argv[2]) : 1;
	int waits = argc > 3 && atoi(argv[3]);
	pthread_t started[MAX_THREADS];
	double began;

	if (argc < 2 || threads < 1 || threads > MAX_THREADS)
		return 2;
	count = atol(argv[1]);
	for (int i = 0; waits && i < 600 && !*(volatile unsigned short *)&heldout_hit_semaphore; i++)
		usleep(50000);
	began = now();
	for (long i = 0; i < threads; i++)
		pthread_create(&started[i], NULL, fire, (void *)i);
	for (long i = 0; i < threads; i++)
		pthread_join(started[i], NULL);
	printf("%.1f %d\n", (now() - began) / count / threads, heldout_hit_semaphore);
	return 0;
}
