/*
 * A program that fires raid:text(STRING, NUMBER) and raid:number(NUMBER), without semaphores: `raiding LENGTH`.
 *
 * It says "ready", and on each line of standard input, `fire COUNT PAUSE_US`, fires both so often, with a pause after
 * every hundred, and says how often. STRING has LENGTH bytes. It ends with its parent.
 */
#define _GNU_SOURCE
#include <sys/sdt.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	size_t length = argc > 1 ? strtoul(argv[1], NULL, 0) : 0;
	char *string = malloc(length + 1);
	unsigned long count, i;
	unsigned int pause_us;
	char line[100];

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	memset(string, 'a', length);
	string[length] = 0;
	setvbuf(stdout, NULL, _IOLBF, 0);
	puts("ready");
	while (fgets(line, sizeof(line), stdin)) {
		if (sscanf(line, "fire %lu %u", &count, &pause_us) != 2)
			return 2;
		for (i = 0; i < count; i++) {
			STAP_PROBE2(raid, text, string, i);
			STAP_PROBE1(raid, number, i);
			if (pause_us && i % 100 == 99)
				usleep(pause_us);
		}
		printf("fired %lu\n", count);
	}
	return 0;
}
