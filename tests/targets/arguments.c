/* Fires a probe of each number of arguments, 0 to 12: argument N of zero up is 100 * count + N. -DPROVIDER=… names it. */
#include <sys/sdt.h>

#ifndef PROVIDER
#define PROVIDER arguments
#endif

static volatile int base;

#define A(count, index) (100 * (count) + (index) + base)

static void __attribute__((noinline)) fire(void)
{
	STAP_PROBE(PROVIDER, none);
	STAP_PROBE1(PROVIDER, one, A(1, 0));
	STAP_PROBE2(PROVIDER, two, A(2, 0), A(2, 1));
	STAP_PROBE3(PROVIDER, three, A(3, 0), A(3, 1), A(3, 2));
	STAP_PROBE6(PROVIDER, six, A(6, 0), A(6, 1), A(6, 2), A(6, 3), A(6, 4), A(6, 5));
	STAP_PROBE10(PROVIDER, ten, A(10, 0), A(10, 1), A(10, 2), A(10, 3), A(10, 4), A(10, 5), A(10, 6), A(10, 7),
		     A(10, 8), A(10, 9));
	STAP_PROBE12(PROVIDER, twelve, A(12, 0), A(12, 1), A(12, 2), A(12, 3), A(12, 4), A(12, 5), A(12, 6), A(12, 7),
		     A(12, 8), A(12, 9), A(12, 10), A(12, 11));
}

int main(void)
{
	fire();
	STAP_PROBE1(PROVIDER, one, 7);
	return 0;
}
