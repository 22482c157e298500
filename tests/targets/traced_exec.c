/* Holds a program up in execve(2), as who traces it may: traced_exec exec|exit PROGRAM ARGUMENT.
 *
 * exec: at its end, before the new program's first instruction. exit: in the middle of it, where a thread that starts
 * the program waits for the others to be gone, of which one may not go. A line on standard input lets it go on.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

static void *start(void *arguments)
{
	execv(((char **)arguments)[0], arguments);
	return NULL;
}

int main(int argc, char **argv)
{
	int wanted, status;
	pthread_t thread;
	pid_t child, each;

	if (argc != 4)
		return 1;
	wanted = strcmp(argv[1], "exec") ? PTRACE_EVENT_EXIT : PTRACE_EVENT_EXEC;
	child = fork();
	if (!child) {
		ptrace(PTRACE_TRACEME, 0, 0, 0);
		raise(SIGSTOP);
		pthread_create(&thread, NULL, start, argv + 2);
		for (;;)
			pause();
	}
	waitpid(child, &status, 0);
	ptrace(PTRACE_SETOPTIONS, child, 0,
	       PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL |
		       (wanted == PTRACE_EVENT_EXIT ? PTRACE_O_TRACEEXIT : PTRACE_O_TRACEEXEC));
	each = child;
	do
		ptrace(PTRACE_CONT, each, 0, 0);
	while ((each = waitpid(-1, &status, __WALL)) > 0 && status >> 16 != wanted);
	puts("ready");
	fflush(stdout);
	if (getchar() == EOF)
		return 1;
	do
		ptrace(PTRACE_CONT, each, 0, 0);
	while ((each = waitpid(-1, &status, __WALL)) > 0 && !(each == child && (WIFEXITED(status) || WIFSIGNALED(status))));
	printf("ended %d\n", WIFEXITED(status) ? 0 : WTERMSIG(status));
	return 0;
}
