/*
 * Fires probes at nops of NOP_BYTES bytes where a tracer that touches more than the nop does harm. -DLEADING puts a 1-byte nop,
 * which is the site then, in front of each.
 *
 * It answers commands on standard input:
 *
 *   leaf COUNT   "wrong N": fires longnop:leaf in a leaf function that keeps its data below the stack, COUNT times, and
 *                says how many results were wrong
 *   fork COUNT   "child N": fires longnop:forked COUNT times, and as often in a child that is forked then; N is the
 *                signal that killed the child, or 0
 */
#include <sys/sdt.h>
#undef _SDT_NOP
#ifdef LEADING
#define _SDT_NOP nop; .nops NOP_BYTES
#else
#define _SDT_NOP .nops NOP_BYTES
#endif

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

__attribute__((noinline)) static long leaf(long a, long b)
{
	/* volatile: they live in memory, and since nothing is called, in the 128 bytes below the stack pointer */
	volatile long tripled = a * 3, sum = a + b, mixed = a ^ b;

	STAP_PROBE1(longnop, leaf, a);
	return tripled + sum + mixed;
}

static long wrong_results(long count)
{
	long wrong = 0;

	for (long i = 0; i < count; i++)
		wrong += leaf(i, i + 1) != i * 3 + i + i + 1 + (i ^ (i + 1));
	return wrong;
}

__attribute__((noinline)) static void fire(long count)
{
	for (long i = 0; i < count; i++)
		STAP_PROBE1(longnop, forked, i);
}

static long child_signal(long count)
{
	int status = 0;

	fire(count);
	if (!fork()) {
		fire(count);
		_exit(0);
	}
	wait(&status);
	return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

int main(void)
{
	char command[64];
	long count;

	setbuf(stdout, NULL);
	puts("ready");
	while (fgets(command, sizeof command, stdin)) {
		if (sscanf(command, "leaf %ld", &count) == 1)
			printf("wrong %ld\n", wrong_results(count));
		else if (sscanf(command, "fork %ld", &count) == 1)
			printf("child %ld\n", child_signal(count));
	}
	return 0;
}
