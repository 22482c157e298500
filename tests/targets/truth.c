/*
 * A program that fires probes, and says what it did with them by its own clock and counters.
 *
 * A line on standard input is an order for each of THREADS threads; the answer is a line of JSON.
 *
 *   spans COUNT THREADS DEPTH
 *       COUNT operations, each with operations within it down to DEPTH: begin(number, thread), end(number, thread,
 *       status). After them each thread begins one more, and leaves it open. The answer has for each operation
 *       [thread, number, depth, status, before_begin, after_begin, before_end, after_end], in nanoseconds of
 *       CLOCK_MONOTONIC; one that is open has no ends.
 *   words COUNT THREADS 0
 *       word(text, value) COUNT times. Texts differ in their last characters alone. The answer has for each text
 *       [text, count, sum, min, max], and the values' powers of two: [low, count].
 *   ticks MILLISECONDS THREADS RATE
 *       tick(thread) RATE times a second. The answer has pairs of a time and of how many had been fired by then, counted
 *       before and after, every 10 ms or so: [before_ns, fired, after_ns].
 */
#define _GNU_SOURCE
#include <sys/sdt.h>

#include <inttypes.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_THREADS 16
#define MAX_RECORDS 40000
#define TEXTS 8
#define PREFIX_BYTES 150

struct operation {
	int thread, depth, status;
	uint64_t number;
	int64_t before_begin, after_begin, before_end, after_end;
};

struct of_text {
	uint64_t count;
	int64_t sum, min, max;
};

struct moment {
	int64_t before_ns, after_ns;
	uint64_t fired;
};

struct thread {
	pthread_t id;
	int number;
	uint64_t next, state;
	struct operation operations[MAX_RECORDS];
	size_t recorded;
	struct of_text of_texts[TEXTS];
	uint64_t powers[65];
};

static char order[20], texts[TEXTS][PREFIX_BYTES + 10];
static uint64_t count, threads, extra;
static struct thread all[MAX_THREADS];
static struct moment moments[MAX_RECORDS];

static int64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000ll + time.tv_nsec;
}

static uint64_t next_random(struct thread *thread)
{
	thread->state = thread->state * 6364136223846793005ull + 1442695040888963407ull;
	return thread->state >> 33;
}

static void spend(uint64_t rounds)
{
	for (volatile uint64_t round = 0; round < rounds; round++)
		;
}

static void __attribute__((noinline)) begin(uint64_t number, uint64_t thread)
{
	STAP_PROBE2(PROVIDER, begin, number, thread);
}

static void __attribute__((noinline)) end(uint64_t number, uint64_t thread, int32_t status)
{
	STAP_PROBE3(PROVIDER, end, number, thread, status);
}

static void operate(struct thread *thread, int depth)
{
	struct operation *operation;

	if (thread->recorded == MAX_RECORDS)
		exit(3);
	operation = &thread->operations[thread->recorded++];
	*operation = (struct operation){
		.thread = thread->number, .depth = depth, .status = next_random(thread) % 3, .number = thread->next++};
	operation->before_begin = now();
	begin(operation->number, thread->number);
	operation->after_begin = now();
	spend(next_random(thread) % 3000);
	if (depth < (int)extra)
		operate(thread, depth + 1);
	operation->before_end = now();
	end(operation->number, thread->number, operation->status);
	operation->after_end = now();
}

static void leave_open(struct thread *thread)
{
	struct operation *operation = &thread->operations[thread->recorded++];

	*operation = (struct operation){.thread = thread->number, .status = -1, .number = thread->next++};
	operation->before_begin = now();
	begin(operation->number, thread->number);
	operation->after_begin = now();
}

static void say(struct thread *thread)
{
	int text = next_random(thread) % TEXTS;
	int64_t value = next_random(thread) % (1ull << next_random(thread) % 40);
	struct of_text *of = &thread->of_texts[text];

	STAP_PROBE2(PROVIDER, word, texts[text], value);
	of->min = of->count && of->min < value ? of->min : value;
	of->max = of->count && of->max > value ? of->max : value;
	of->count++;
	of->sum += value;
	thread->powers[value ? 64 - __builtin_clzll(value) : 0]++;
}

static void *work(void *argument)
{
	struct thread *thread = argument;

	for (uint64_t done = 0; done < count; done++)
		if (!strcmp(order, "spans"))
			operate(thread, 1);
		else
			say(thread);
	if (!strcmp(order, "spans"))
		leave_open(thread);
	return NULL;
}

static void tell_spans(void)
{
	const char *separator = "";

	printf("[");
	for (uint64_t number = 0; number < threads; number++)
		for (size_t each = 0; each < all[number].recorded; each++) {
			struct operation *of = &all[number].operations[each];

			printf("%s[%d,%" PRIu64 ",%d,%d,%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 "]", separator, of->thread,
			       of->number, of->depth, of->status, of->before_begin, of->after_begin, of->before_end, of->after_end);
			separator = ",";
		}
	printf("]\n");
}

static void tell_words(void)
{
	const char *separator = "";

	printf("{\"texts\":[");
	for (int text = 0; text < TEXTS; text++) {
		struct of_text sum = {0};

		for (uint64_t number = 0; number < threads; number++) {
			struct of_text *of = &all[number].of_texts[text];

			if (!of->count)
				continue;
			sum.min = sum.count && sum.min < of->min ? sum.min : of->min;
			sum.max = sum.count && sum.max > of->max ? sum.max : of->max;
			sum.count += of->count;
			sum.sum += of->sum;
		}
		printf("%s[\"%s\",%" PRIu64 ",%" PRId64 ",%" PRId64 ",%" PRId64 "]", separator, texts[text], sum.count, sum.sum,
		       sum.min, sum.max);
		separator = ",";
	}
	printf("],\"powers\":[");
	separator = "";
	for (int power = 0; power <= 64; power++) {
		uint64_t sum = 0;

		for (uint64_t number = 0; number < threads; number++)
			sum += all[number].powers[power];
		if (sum) {
			printf("%s[%" PRIu64 ",%" PRIu64 "]", separator, (uint64_t)(power ? 1ull << (power - 1) : 0), sum);
			separator = ",";
		}
	}
	printf("]}\n");
}

static void tick(void)
{
	int64_t begun = now(), ends = begun + (int64_t)count * 1000000;
	uint64_t fired = 0;
	size_t recorded = 0;
	const char *separator = "";

	while (now() < ends && recorded < MAX_RECORDS) {
		struct moment *moment = &moments[recorded++];
		uint64_t due = (uint64_t)((now() - begun) / 1000000) * extra / 1000;

		moment->before_ns = now();
		for (; fired < due; fired++)
			STAP_PROBE1(PROVIDER, tick, fired);
		moment->fired = fired;
		moment->after_ns = now();
		nanosleep(&(struct timespec){0, 10000000}, NULL);
	}
	printf("[");
	for (size_t each = 0; each < recorded; each++) {
		printf("%s[%" PRId64 ",%" PRIu64 ",%" PRId64 "]", separator, moments[each].before_ns, moments[each].fired,
		       moments[each].after_ns);
		separator = ",";
	}
	printf("]\n");
}

int main(void)
{
	char line[200];

	setvbuf(stdout, NULL, _IOFBF, 1 << 16);
	for (int text = 0; text < TEXTS; text++) {
		memset(texts[text], 'x', PREFIX_BYTES);
		snprintf(texts[text] + PREFIX_BYTES, 10, "-%d", text);
	}
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		if (sscanf(line, "%19s %lu %lu %lu", order, &count, &threads, &extra) != 4 || threads > MAX_THREADS) {
			fprintf(stderr, "no order: %s", line);
			return 2;
		}
		memset(all, 0, sizeof(all));
		for (uint64_t number = 0; strcmp(order, "ticks") && number < threads; number++) {
			all[number].number = number;
			all[number].state = number + 1;
			pthread_create(&all[number].id, NULL, work, &all[number]);
		}
		for (uint64_t number = 0; strcmp(order, "ticks") && number < threads; number++)
			pthread_join(all[number].id, NULL);
		if (!strcmp(order, "ticks"))
			tick();
		else if (!strcmp(order, "spans"))
			tell_spans();
		else
			tell_words();
		fflush(stdout);
	}
	return 0;
}
