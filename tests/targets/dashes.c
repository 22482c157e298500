/* Fires dashes:go__on(0, 1, …) and dashes:go as often as its argument says. -DPROVIDER=… names the provider otherwise. */
#include <sys/sdt.h>

#include <stdlib.h>

#ifndef PROVIDER
#define PROVIDER dashes
#endif

int main(int argc, char **argv)
{
	long count = argc > 1 ? atol(argv[1]) : 1;

	for (long number = 0; number < count; number++) {
		STAP_PROBE1(PROVIDER, go__on, number);
		STAP_PROBE1(PROVIDER, go, number);
	}
	return 0;
}
