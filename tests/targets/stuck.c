/*
 * Fires stuck:hit with the address of a page that never comes: userfaultfd(2) tells of it, and nobody reads that. Says
 * "ready" first, and fires when it is told a line. SIGKILL ends the wait.
 */
#include <sys/sdt.h>

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static void __attribute__((noinline)) hit(char *page)
{
	STAP_PROBE1(stuck, hit, page);
}

int main(void)
{
	long size = sysconf(_SC_PAGESIZE);
	char *page = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct uffdio_api api = {.api = UFFD_API};
	struct uffdio_register range = {
		.range = {.start = (unsigned long)page, .len = size},
		.mode = UFFDIO_REGISTER_MODE_MISSING,
	};
	int file = syscall(SYS_userfaultfd, O_CLOEXEC);

	if (page == MAP_FAILED || file < 0 || ioctl(file, UFFDIO_API, &api) || ioctl(file, UFFDIO_REGISTER, &range)) {
		perror("userfaultfd");
		return 1;
	}
	puts("ready");
	fflush(stdout);
	getchar();
	hit(page);
	return 0;
}
