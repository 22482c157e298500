/* A library with one probe without a semaphore, for programs that load it late. */
#include <sys/sdt.h>

void library_call(int number)
{
	STAP_PROBE1(library, called, number);
}
