/*
 * Says "ready" once eager:hit is not patched, waits until it is, fires it 1000 times at once, and says so. Compile it
 * with -no-pie.
 */
#include <sys/sdt.h>

#include <stdint.h>
#include <stdio.h>

#define BREAKPOINT 0xcc
#define HITS 1000

extern const volatile uint8_t site[];

static void __attribute__((noinline)) hit(int number)
{
	/* what follows the label is the probe's own instruction */
	asm volatile(".globl site\nsite:");
	STAP_PROBE1(eager, hit, number);
}

int main(void)
{
	/* a file that nobody maps may stay armed for a moment */
	while (site[0] == BREAKPOINT)
		;
	puts("ready");
	fflush(stdout);
	while (site[0] != BREAKPOINT)
		;
	for (int number = 0; number < HITS; number++)
		hit(number);
	printf("%d\n", HITS);
	return 0;
}
