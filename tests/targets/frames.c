/* Calls itself, with a probe where each call begins and one where it has returned, as a kernel function's are.
 *
 *     nest DEPTH TIMES THREADS   calls that deep, so often, in each of so many threads
 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include <sys/sdt.h>

static long depth, times;

/* What a return takes off the stack is missing there. Nothing else may use the stack meanwhile. */
#ifdef __x86_64__
#define RETURNED "add $8, %%rsp"
#define GO_ON "sub $8, %%rsp"
#else
#define RETURNED ""
#define GO_ON ""
#endif

__attribute__((noinline, optimize("no-omit-frame-pointer"))) static long call(long left, long number)
{
	char name[64];
	long below = 0;

	snprintf(name, sizeof(name), "call %ld of %ld", left, number);
	STAP_PROBE3(app, entry, name, number, left);
	if (left > 1)
		below = call(left - 1, number);
	/* only the entry can have read it */
	memset(name, 0, sizeof(name));
	asm volatile(RETURNED : : "r"(name) : "memory");
	STAP_PROBE3(app, return, left % 2 ? number : -1, number, left);
	asm volatile(GO_ON : : "r"(name) : "memory");
	return below + 1;
}

static void *calling(void *argument)
{
	for (long number = 0; number < times; number++)
		call(depth, number);
	return argument;
}

int main(void)
{
	char line[128];
	long threads;

	printf("ready\n");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		pthread_t made[64];

		if (sscanf(line, "nest %ld %ld %ld", &depth, &times, &threads) != 3 || threads > 64)
			return 1;
		for (long number = 0; number < threads; number++)
			pthread_create(&made[number], NULL, calling, NULL);
		for (long number = 0; number < threads; number++)
			pthread_join(made[number], NULL);
		printf("calls %ld\n", depth * times * threads);
		fflush(stdout);
	}
	return 0;
}
