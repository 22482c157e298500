/* What costs a daemon that watches all processes, done as fast as C can: `crowding MODE [ARGUMENT...]`, until it is killed.
 *
 *   rename                   name itself anew
 *   threads                  begin and end threads
 *   protect                  make a page executable, and not
 *   pass FOLDER FILES        children that map so many of a folder's files each, and end at once
 *   burst FOLDER FILES PERIOD_MS    60 processes that map so many files of a folder at the same moments
 *   deep FOLDER BYTES COUNT  map a file below a folder so often that has a path of so many bytes
 *   often FILE COUNT         map a file executable so often
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096
#define FILES 6000
#define PROCESSES 60

static void ready(void)
{
	puts("ready");
	fflush(stdout);
}

static void *map(int file)
{
	return mmap(NULL, PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE, file, 0);
}

static int opened(const char *name)
{
	int file = open(name, O_RDWR | O_CREAT, 0755);

	if (file < 0 || write(file, "no ELF file", 11) < 0)
		exit(1);
	return file;
}

static int numbered(int number)
{
	char name[32];

	snprintf(name, sizeof name, "f%d", number);
	return opened(name);
}

static pid_t forked(void)
{
	pid_t pid = fork();

	if (pid == 0)
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	return pid;
}

static void rename_without_end(void)
{
	char name[16];

	for (unsigned number = 0;; number++) {
		snprintf(name, sizeof name, "n%u", number);
		prctl(PR_SET_NAME, name);
	}
}

static void *nothing(void *argument)
{
	return argument;
}

static void thread_without_end(void)
{
	pthread_t thread;

	for (;;)
		if (pthread_create(&thread, NULL, nothing, NULL) == 0)
			pthread_join(thread, NULL);
}

static void protect_without_end(void)
{
	void *page = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	for (;;) {
		mprotect(page, PAGE, PROT_READ | PROT_EXEC);
		mprotect(page, PAGE, PROT_READ);
	}
}

static void pass(int files)
{
	for (int number = 0; number < FILES; number++)
		close(numbered(number));
	for (int first = 0;; first = (first + files) % FILES) {
		if (forked() == 0) {
			for (int number = 0; number < files; number++)
				map(numbered((first + number) % FILES));
			_exit(0);
		}
		wait(NULL);
	}
}

static void burst(int files, long period_ms)
{
	int *file = calloc(files, sizeof *file);
	void **page = calloc(files, sizeof *page);
	struct timespec now;

	for (int number = 0; number < files; number++)
		file[number] = numbered(number);
	for (int process = 0; process < PROCESSES; process++)
		while (forked() == 0)
			for (;;) {
				clock_gettime(CLOCK_REALTIME, &now);
				usleep((period_ms - (now.tv_sec * 1000L + now.tv_nsec / 1000000) % period_ms) * 1000);
				for (int number = 0; number < files; number++)
					page[number] = map(file[number]);
				usleep(period_ms * 500);
				for (int number = 0; number < files; number++)
					munmap(page[number], PAGE);
			}
}

static void deep(long bytes, long count)
{
	char name[256];
	int file;

	memset(name, 'd', 250);
	name[250] = 0;
	for (long depth = 0; depth < bytes / 251; depth++)
		if (mkdir(name, 0755) || chdir(name))
			exit(1);
	file = numbered(0);
	while (count-- && map(file) != MAP_FAILED)
		;
}

static void often(const char *name, long count)
{
	int file = open(name, O_RDONLY);

	while (count-- && map(file) != MAP_FAILED)
		;
}

int main(int count, char **arguments)
{
	const char *mode = arguments[1];

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (count > 2 && strcmp(mode, "often") && chdir(arguments[2]))
		return 1;
	if (strcmp(mode, "often") == 0)
		often(arguments[2], atol(arguments[3]));
	if (strcmp(mode, "burst") == 0)
		burst(atoi(arguments[3]), atol(arguments[4]));
	if (strcmp(mode, "deep") == 0)
		deep(atol(arguments[3]), atol(arguments[4]));
	ready();
	if (strcmp(mode, "rename") == 0)
		rename_without_end();
	if (strcmp(mode, "threads") == 0)
		thread_without_end();
	if (strcmp(mode, "protect") == 0)
		protect_without_end();
	if (strcmp(mode, "pass") == 0)
		pass(atoi(arguments[3]));
	pause();
	return 0;
}
