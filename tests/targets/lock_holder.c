/* Holds the lock of its memory map: lock_holder PATH, of a file of slow_files.c.
 *
 * A thread waits for a page of the file. Another one maps the file anew, which was opened for direct I/O this time, so that the
 * kernel drops what it has of it (fuse_file_mmap), waits for that page, and holds mmap_lock meanwhile. Each line on standard
 * input begins one of both, and a third one ends the program. Whoever arms lock_holder:released waits for that lock, too.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/sdt.h>

static void *touch(void *page)
{
	*(volatile char *)page;
	return NULL;
}

static void *map(const char *path)
{
	return mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, open(path, O_RDONLY), 0);
}

static void wait_for_line(void)
{
	int character;

	do
		character = getchar();
	while (character != EOF && character != '\n');
}

int main(int argc, char **argv)
{
	pthread_t thread;
	void *page;

	if (argc < 2 || (page = map(argv[1])) == MAP_FAILED)
		return 1;
	puts("ready");
	fflush(stdout);
	wait_for_line();
	pthread_create(&thread, NULL, touch, page);
	wait_for_line();
	map(argv[1]);
	pthread_join(thread, NULL);
	STAP_PROBE(lock_holder, released);
	wait_for_line();
	return 0;
}
