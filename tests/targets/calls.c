/* Calls the kernel as it is told, so that a test knows what with, and what came of it.
 *
 *     read COUNT TIMES THREADS   reads so many bytes, so often, in each of so many threads
 *     open PATH                  opens it, and says what errno was
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int file;
static long count, times;

static void *reading(void *bytes)
{
	char *buffer = malloc(count);
	long sum = 0;

	for (long number = 0; number < times; number++)
		sum += pread(file, buffer, count, 0);
	free(buffer);
	*(long *)bytes = sum;
	return NULL;
}

int main(int argc, char **argv)
{
	char line[512];

	if (argc != 2 || (file = open(argv[1], O_RDONLY)) < 0)
		return 1;
	printf("ready\n");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		long threads, bytes = 0;

		line[strcspn(line, "\n")] = '\0';
		if (sscanf(line, "read %ld %ld %ld", &count, &times, &threads) == 3) {
			pthread_t made[64];
			long each[64];

			for (long number = 0; number < threads; number++)
				pthread_create(&made[number], NULL, reading, &each[number]);
			for (long number = 0; number < threads; number++) {
				pthread_join(made[number], NULL);
				bytes += each[number];
			}
		} else if (!strncmp(line, "open ", 5)) {
			int opened = open(line + 5, O_RDONLY | O_CLOEXEC);

			bytes = opened < 0 ? -errno : opened;
			if (opened >= 0)
				close(opened);
		}
		printf("bytes %ld\n", bytes);
		fflush(stdout);
	}
	return 0;
}
