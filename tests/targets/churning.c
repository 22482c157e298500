/*
 * A program that changes under the tracer's hands: it executes others, forks, opens and unloads libraries (churned.c).
 *
 *   fire ID N           fire PROVIDER:beat and PROVIDER:pulse N times each, with a number that counts on from 0, and ID
 *   threads T ID N      the same in each of T threads
 *   forks K ID N        the same in each of K children, which end before the answer
 *   fork                make a child that does nothing and ends with this process
 *   exec PATH           become that program, which answers in this one's place
 *   open PATH           dlopen a library; `memfd PATH` does so with a copy in a memfd, whose descriptor it closes
 *   call ID N           fire PROVIDER:called N times in the library
 *   close               unload it
 *   semaphores          only answer
 *
 * The answer is "COMMAND SEMAPHORES", the sum of those of beat and pulse. -DPROVIDER=… names the provider.
 */
#define _GNU_SOURCE
#define _SDT_HAS_SEMAPHORES 1
#include <sys/sdt.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define JOINED(provider, name) provider##_##name##_semaphore
#define SEMAPHORE(provider, name) unsigned short JOINED(provider, name) __attribute__((section(".probes")))
SEMAPHORE(PROVIDER, beat);
SEMAPHORE(PROVIDER, pulse);
#define VALUE(provider, name) (*(volatile unsigned short *)&JOINED(provider, name))

static unsigned long count, id;

static void *fire(void *unused)
{
	uint64_t end = count, tag = id;

	for (uint64_t number = 0; number < end; number++) {
		STAP_PROBE2(PROVIDER, beat, number, tag);
		STAP_PROBE2(PROVIDER, pulse, number, tag);
	}
	return unused;
}

static void fire_in_threads(int threads)
{
	pthread_t ids[64];

	if (threads > 64)
		threads = 64;
	for (int i = 0; i < threads; i++)
		pthread_create(&ids[i], NULL, fire, NULL);
	for (int i = 0; i < threads; i++)
		pthread_join(ids[i], NULL);
}

static void fire_in_children(int children)
{
	for (int i = 0; i < children; i++) {
		if (fork() == 0) {
			fire(NULL);
			_exit(0);
		}
	}
	while (wait(NULL) > 0)
		;
}

static void *open_copy(const char *path)
{
	int file = open(path, O_RDONLY | O_CLOEXEC);
	int copy = memfd_create("churned", MFD_CLOEXEC);
	struct stat status;
	char name[64];
	void *library;

	fstat(file, &status);
	if (sendfile(copy, file, NULL, status.st_size) != status.st_size)
		abort();
	snprintf(name, sizeof(name), "/proc/self/fd/%d", copy);
	library = dlopen(name, RTLD_NOW);
	close(file);
	close(copy);
	return library;
}

int main(int argc, char *argv[])
{
	static char line[5000];
	void *library = NULL;
	void (*call)(unsigned long, unsigned long) = NULL;
	int many;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc > 1 && !strcmp(argv[1], "again"))
		printf("exec %u\n", VALUE(PROVIDER, beat) + VALUE(PROVIDER, pulse));
	else
		puts("ready");
	while (fgets(line, sizeof(line), stdin)) {
		line[strcspn(line, "\n")] = 0;
		if (sscanf(line, "fire %lu %lu", &id, &count) == 2) {
			fire(NULL);
		} else if (sscanf(line, "threads %d %lu %lu", &many, &id, &count) == 3) {
			fire_in_threads(many);
		} else if (sscanf(line, "forks %d %lu %lu", &many, &id, &count) == 3) {
			fire_in_children(many);
		} else if (!strcmp(line, "fork")) {
			if (fork() == 0) {
				prctl(PR_SET_PDEATHSIG, SIGKILL);
				for (;;)
					pause();
			}
		} else if (!strncmp(line, "exec ", 5)) {
			execl(line + 5, line + 5, "again", NULL);
			perror(line);
		} else if (!strncmp(line, "open ", 5) || !strncmp(line, "memfd ", 6)) {
			library = line[0] == 'o' ? dlopen(line + 5, RTLD_NOW) : open_copy(line + 6);
			call = library ? (void (*)(unsigned long, unsigned long))dlsym(library, "churned_call") : NULL;
			if (!call)
				fprintf(stderr, "%s\n", dlerror());
		} else if (sscanf(line, "call %lu %lu", &id, &count) == 2) {
			call(id, count);
		} else if (!strcmp(line, "close")) {
			dlclose(library);
		}
		printf("%.20s %u\n", line, VALUE(PROVIDER, beat) + VALUE(PROVIDER, pulse));
	}
	return 0;
}
