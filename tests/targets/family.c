/*
 * A program that has children, and answers each command with one line when the child that it names has ended.
 *
 *   fork N          a child fires family:tick N times
 *   exec PATH N     a child executes a program, which fires N times
 *   vfork PATH N    the same by posix_spawn(3), as the C library does it by vfork(2)
 *   orphan N        a child's child fires, when the child has ended
 *   thread N        the child is a thread's that was there from the beginning
 *   new N           the child is a new thread's
 *   crowd N         N children, up to 8 at a time, fire once, sleep for half a millisecond, and fire once more
 *   relay N         N children end while a child of each goes on, on the same CPU, and fires 5 times
 *   stay            a child stays as long as this process; the answer ends with its id
 *   semaphore       only answer
 *
 * The answer is "COMMAND SEMAPHORE", the value of family:tick's semaphore in this process. -DPROVIDER=… names the
 * provider otherwise.
 */
#define _GNU_SOURCE
#define _SDT_HAS_SEMAPHORES 1
#include <sys/sdt.h>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef PROVIDER
#define PROVIDER family
#endif
#define JOINED(provider, name) provider##_##name##_semaphore
#define SEMAPHORE(provider, name) JOINED(provider, name)
unsigned short SEMAPHORE(PROVIDER, tick) __attribute__((section(".probes")));

extern char **environ;
static int asked[2], done[2];

static void fire(int count)
{
	for (int number = 0; number < count; number++)
		if (*(volatile unsigned short *)&SEMAPHORE(PROVIDER, tick))
			STAP_PROBE1(PROVIDER, tick, number);
}

static void *fork_and_fire(void *count)
{
	pid_t child = fork();

	if (!child) {
		fire((int)(long)count);
		_exit(0);
	}
	waitpid(child, NULL, 0);
	return NULL;
}

static void *old_thread(void *unused)
{
	int count;

	while (read(asked[0], &count, sizeof(count)) == sizeof(count)) {
		fork_and_fire((void *)(long)count);
		if (write(done[1], &count, sizeof(count)) < 0)
			break;
	}
	return unused;
}

static void orphan(int count)
{
	int over[2];
	char byte;

	if (pipe(over))
		return;
	if (!fork()) {
		pid_t parent = getpid();

		if (!fork()) {
			while (getppid() == parent)
				usleep(1000);
			fire(count);
		}
		_exit(0);
	}
	close(over[1]);
	wait(NULL);
	/* until the grandchild has ended, too */
	while (read(over[0], &byte, 1) > 0)
		;
	close(over[0]);
}

static void crowd(int count)
{
	for (int number = 0; number < count; number++) {
		if (!fork()) {
			fire(1);
			usleep(500);
			fire(1);
			_exit(0);
		}
		while (number % 8 == 7 && wait(NULL) > 0)
			;
	}
	while (wait(NULL) > 0)
		;
}

/* The kernel may swap the perf events of two tasks when it switches from one to the other. */
static void relay(int count)
{
	cpu_set_t first_cpu, all;

	CPU_ZERO(&first_cpu);
	CPU_SET(0, &first_cpu);
	sched_getaffinity(0, sizeof(all), &all);
	sched_setaffinity(0, sizeof(first_cpu), &first_cpu);
	for (int number = 0; number < count; number++) {
		int over[2], begun[2], ended[2];
		char byte = 0;

		if (pipe(over) || pipe(begun) || pipe(ended))
			return;
		if (!fork()) {
			if (!fork()) {
				close(ended[1]);
				if (write(begun[1], &byte, 1) < 0 || read(ended[0], &byte, 1) < 0)
					_exit(1);
				fire(5);
				_exit(0);
			}
			if (read(begun[0], &byte, 1) < 0)
				_exit(1);
			if (number & 1)
				sched_yield();
			_exit(0);
		}
		close(over[1]);
		close(ended[1]);
		wait(NULL);
		/* until the grandchild has ended, too */
		while (read(over[0], &byte, 1) > 0)
			;
		close(over[0]);
		close(ended[0]);
		close(begun[0]);
		close(begun[1]);
	}
	sched_setaffinity(0, sizeof(all), &all);
}

static pid_t stay(void)
{
	pid_t child = fork();

	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (;;)
			pause();
	}
	return child;
}

static void execute(const char *path, const char *count, int by_spawn)
{
	char *const arguments[] = { (char *)path, (char *)count, NULL };
	pid_t child;

	if (by_spawn) {
		if (posix_spawn(&child, path, NULL, NULL, arguments, environ))
			return;
	} else {
		child = fork();
		if (!child) {
			execv(path, arguments);
			_exit(127);
		}
	}
	waitpid(child, NULL, 0);
}

int main(void)
{
	static char line[5000], path[4097], number[16];
	pthread_t thread;
	int count;

	if (pipe(asked) || pipe(done) || pthread_create(&thread, NULL, old_thread, NULL))
		return 1;
	setvbuf(stdout, NULL, _IOLBF, 0);
	puts("ready");
	while (fgets(line, sizeof(line), stdin)) {
		line[strcspn(line, "\n")] = 0;
		if (sscanf(line, "fork %d", &count) == 1) {
			fork_and_fire((void *)(long)count);
		} else if (sscanf(line, "exec %4096s %15s", path, number) == 2) {
			execute(path, number, 0);
		} else if (sscanf(line, "vfork %4096s %15s", path, number) == 2) {
			execute(path, number, 1);
		} else if (sscanf(line, "orphan %d", &count) == 1) {
			orphan(count);
		} else if (sscanf(line, "crowd %d", &count) == 1) {
			crowd(count);
		} else if (sscanf(line, "relay %d", &count) == 1) {
			relay(count);
		} else if (sscanf(line, "thread %d", &count) == 1) {
			if (write(asked[1], &count, sizeof(count)) < 0 || read(done[0], &count, sizeof(count)) < 0)
				return 1;
		} else if (sscanf(line, "new %d", &count) == 1) {
			pthread_create(&thread, NULL, fork_and_fire, (void *)(long)count);
			pthread_join(thread, NULL);
		} else if (!strcmp(line, "stay")) {
			printf("stay %d\n", stay());
			continue;
		}
		printf("%.20s %u\n", line, *(volatile unsigned short *)&SEMAPHORE(PROVIDER, tick));
	}
	return 0;
}
