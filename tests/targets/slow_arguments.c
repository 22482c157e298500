/* Has a page of its command line come from a file: slow_arguments PATH, of a file of slow_files.c.
 *
 * It starts itself anew with an argument of some pages, the first whole one of which is the file's then.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <sys/sdt.h>

#define PAGE 4096

int main(int argc, char **argv)
{
	static char padding[3 * PAGE];
	uintptr_t page;

	if (argc == 2) {
		memset(padding, 'x', sizeof padding - 1);
		execl("/proc/self/exe", "slow_arguments", padding, argv[1], NULL);
		return 1;
	}
	page = ((uintptr_t)argv[1] + PAGE - 1) / PAGE * PAGE;
	if (mmap((void *)page, PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, open(argv[2], O_RDONLY), 0) == MAP_FAILED)
		return 1;
	puts("ready");
	fflush(stdout);
	getchar();
	STAP_PROBE(slow_arguments, end);
	return 0;
}
