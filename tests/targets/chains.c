/* Calls of a, b and c in each other, with a probe where each begins and one where it has returned, as kernel functions'.
 *
 *     run SCRIPT TIMES THREADS   so often, in each of so many threads
 *
 * In a script, a to d enter a function, whose probes tell the place in the script and 1, or -1 for A to D; `-` returns, `!`
 * with -1. `t` enters a and then b in the same frame, as b is called in the place of a's return. `m` enters a, and nobody
 * sees it return. `w` waits until all threads do, and `x` ends the thread.
 */
#include <ctype.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/sdt.h>

static char script[4096];
static long times;
static pthread_barrier_t all_wait;
static _Thread_local const char *at;
static _Thread_local long result;

/* What a return takes off the stack is missing there. Nothing else may use the stack meanwhile. */
#ifdef __x86_64__
#define RETURNED "add $8, %%rsp"
#define GO_ON "sub $8, %%rsp"
#else
#define RETURNED ""
#define GO_ON ""
#endif

static void run(void);

#define FUNCTION(name)                                                                                                \
	__attribute__((noinline, optimize("no-omit-frame-pointer"))) static void call_##name(long place, long number) \
	{                                                                                                             \
		volatile char frame[64] = { place };                                                                  \
		long returned;                                                                                        \
                                                                                                                      \
		STAP_PROBE2(app, name##__entry, place, number);                                                       \
		run();                                                                                                \
		returned = result;                                                                                    \
		asm volatile(RETURNED : : "r"(frame), "r"(returned) : "memory");                                      \
		STAP_PROBE2(app, name##__return, place, returned);                                                    \
		asm volatile(GO_ON : : "r"(frame) : "memory");                                                        \
	}

FUNCTION(a)
FUNCTION(b)
FUNCTION(c)
FUNCTION(d)

__attribute__((noinline, optimize("no-omit-frame-pointer"))) static void call_in_place(long place, int is_seen)
{
	volatile char frame[64] = { place };

	STAP_PROBE2(app, a__entry, place, 1);
	if (is_seen)
		STAP_PROBE2(app, b__entry, place, 1);
	run();
	if (!is_seen)
		return;
	asm volatile(RETURNED : : "r"(frame) : "memory");
	STAP_PROBE2(app, b__return, place, 1);
	STAP_PROBE2(app, a__return, place, 1);
	asm volatile(GO_ON : : "r"(frame) : "memory");
}

__attribute__((noinline)) static void run(void)
{
	while (*at) {
		long place = at - script;
		char what = *at++;
		long number = isupper(what) ? -1 : 1;

		switch (tolower(what)) {
		case 'a': call_a(place, number); break;
		case 'b': call_b(place, number); break;
		case 'c': call_c(place, number); break;
		case 'd': call_d(place, number); break;
		case 't': call_in_place(place, 1); break;
		case 'm': call_in_place(place, 0); break;
		case 'w': pthread_barrier_wait(&all_wait); break;
		case 'x': pthread_exit(NULL);
		default:
			result = what == '!' ? -1 : 1;
			return;
		}
	}
}

static void *calling(void *argument)
{
	for (long number = 0; number < times; number++) {
		at = script;
		run();
	}
	return argument;
}

int main(void)
{
	char line[sizeof(script) + 64];
	long threads;

	printf("ready\n");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		pthread_t made[64];

		if (sscanf(line, "run %4095s %ld %ld", script, &times, &threads) != 3 || threads > 64)
			return 1;
		pthread_barrier_init(&all_wait, NULL, threads);
		for (long number = 0; number < threads; number++)
			pthread_create(&made[number], NULL, calling, NULL);
		for (long number = 0; number < threads; number++)
			pthread_join(made[number], NULL);
		printf("calls %zu\n", strlen(script) * times * threads);
		fflush(stdout);
	}
	return 0;
}
