/* A library for churning.c. -DPROVIDER=… names the provider. */
#include <sys/sdt.h>

#include <stdint.h>

void churned_call(unsigned long id, unsigned long count)
{
	for (uint64_t number = 0; number < count; number++)
		STAP_PROBE2(PROVIDER, called, number, (uint64_t)id);
}
