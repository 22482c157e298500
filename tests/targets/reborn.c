/* Runs a program under a given pid: reborn PID PROGRAM [ARGUMENT...]. Fails where another process has it. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	pid_t pid = argc > 2 ? atoi(argv[1]) : 0;
	struct clone_args args = {
		.exit_signal = SIGCHLD,
		.set_tid = (uintptr_t)&pid,
		.set_tid_size = 1,
	};
	long child = syscall(SYS_clone3, &args, sizeof args);
	int status;

	if (child < 0) {
		perror("clone3");
		return 1;
	}
	if (child == 0) {
		execv(argv[2], argv + 2);
		perror(argv[2]);
		_exit(1);
	}
	while (waitpid(child, &status, 0) < 0 && errno == EINTR)
		;
	return 0;
}
