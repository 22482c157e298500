/*
 * A program with probes that does what it is told on standard input, and answers each command with one line.
 *
 *   fire N          fire ticker:tick N times; the first argument counts on, from 0
 *   threads T N     the same N times in each of T threads, which end before the answer
 *   values          fire ticker:values once, with a value of each width and sign
 *   text STRING     fire ticker:text(STRING, its length)
 *   semaphore       only answer
 *   open PATH       dlopen a library (library.c); `call N` calls it N times, `close` unloads it
 *   leave           end the main thread, and go on in another one
 *   quit
 *
 * The answer is "COMMAND SEMAPHORE", the value of ticker:tick's semaphore. With an argument N: fire N times and exit.
 * -DPROVIDER=… names the provider otherwise.
 */
#define _GNU_SOURCE
#define _SDT_HAS_SEMAPHORES 1
#include <sys/sdt.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef PROVIDER
#define PROVIDER ticker
#endif
#define JOINED(provider, name) provider##_##name##_semaphore
#define SEMAPHORE(provider, name) JOINED(provider, name)
#define DEFINE(semaphore) unsigned short semaphore __attribute__((section(".probes")))
DEFINE(SEMAPHORE(PROVIDER, tick));
DEFINE(SEMAPHORE(PROVIDER, values));
DEFINE(SEMAPHORE(PROVIDER, text));

static void __attribute__((noinline)) tick(uint64_t number)
{
	if (__builtin_expect(SEMAPHORE(PROVIDER, tick), 0))
		STAP_PROBE3(PROVIDER, tick, number, -(int32_t)number, "tick");
}

static void *fire(void *count)
{
	for (uint64_t number = 0; number < (uintptr_t)count; number++)
		tick(number);
	return NULL;
}

static void fire_in_threads(int threads, unsigned long count)
{
	pthread_t ids[64];

	if (threads > 64)
		threads = 64;
	for (int i = 0; i < threads; i++)
		pthread_create(&ids[i], NULL, fire, (void *)(uintptr_t)count);
	for (int i = 0; i < threads; i++)
		pthread_join(ids[i], NULL);
}

static void values(void)
{
	volatile int8_t s8 = -8;
	volatile uint8_t u8 = 0xf8;
	volatile int16_t s16 = -1600;
	volatile uint16_t u16 = 0xf916;
	volatile int32_t s32 = -320000;
	volatile uint32_t u32 = 0xffffff32;
	volatile int64_t s64 = INT64_MIN;
	volatile uint64_t u64 = UINT64_MAX;

	STAP_PROBE10(PROVIDER, values, s8, u8, s16, u16, s32, u32, s64, u64, 77, -77);
}

static void *serve(void *unused)
{
	static char line[70000];
	void *library = NULL;
	void (*call)(int) = NULL;
	unsigned long count;
	pthread_t other;
	int threads;

	while (fgets(line, sizeof(line), stdin)) {
		line[strcspn(line, "\n")] = 0;
		if (sscanf(line, "fire %lu", &count) == 1) {
			fire((void *)(uintptr_t)count);
		} else if (sscanf(line, "threads %d %lu", &threads, &count) == 2) {
			fire_in_threads(threads, count);
		} else if (!strcmp(line, "values")) {
			values();
		} else if (!strncmp(line, "text ", 5)) {
			STAP_PROBE2(PROVIDER, text, line + 5, (int)strlen(line + 5));
		} else if (!strncmp(line, "open ", 5)) {
			library = dlopen(line + 5, RTLD_NOW);
			call = library ? (void (*)(int))dlsym(library, "library_call") : NULL;
			if (!call)
				fprintf(stderr, "%s\n", dlerror());
		} else if (sscanf(line, "call %lu", &count) == 1) {
			for (unsigned long i = 0; i < count; i++)
				call((int)i);
		} else if (!strcmp(line, "close")) {
			dlclose(library);
		} else if (!strcmp(line, "leave")) {
			pthread_create(&other, NULL, serve, NULL);
			pthread_exit(NULL);
		} else if (!strcmp(line, "quit")) {
			break;
		}
		printf("%.20s %u\n", line, *(volatile unsigned short *)&SEMAPHORE(PROVIDER, tick));
	}
	return unused;
}

int main(int argc, char **argv)
{
	if (argc > 1) {
		fire((void *)strtoul(argv[1], NULL, 0));
		return 0;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	puts("ready");
	serve(NULL);
	return 0;
}
