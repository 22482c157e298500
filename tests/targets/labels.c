/*
 * Fires labels:hit(label, length, weight) from threads that take turns with a few labels, some of them long or missing.
 *
 * A line on standard input, "COUNT THREADS", has each of THREADS threads fire COUNT times: the label's number is that of
 * the hit modulo LABELS, and the weight is the hit's number. The answer is "done".
 */
#include <sys/sdt.h>

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define LABELS 8
#define MAX_THREADS 16

static char labels[LABELS][128];

static void __attribute__((noinline)) hit(const char *label, uint32_t length, int64_t weight)
{
	STAP_PROBE3(labels, hit, label, length, weight);
}

static void *fire(void *count)
{
	for (uint64_t number = 0; number < *(uint64_t *)count; number++) {
		const char *label = labels[number % LABELS];

		hit(number % LABELS ? label : NULL, strlen(label), number);
	}
	return NULL;
}

int main(void)
{
	static const int lengths[LABELS] = {0, 0, 1, 7, 62, 63, 64, 100};
	pthread_t threads[MAX_THREADS];
	uint64_t count;
	int n;

	for (int label = 0; label < LABELS; label++)
		memset(labels[label], 'a' + label, lengths[label]);
	setvbuf(stdout, NULL, _IOLBF, 0);
	puts("ready");
	while (scanf("%lu %d", &count, &n) == 2 && n <= MAX_THREADS) {
		for (int i = 0; i < n; i++)
			pthread_create(&threads[i], NULL, fire, &count);
		for (int i = 0; i < n; i++)
			pthread_join(threads[i], NULL);
		puts("done");
	}
	return 0;
}
